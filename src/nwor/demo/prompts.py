"""Prompts that a base model continues well: code, extraction, a list, prose."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and what kind of text it is."""

    kind: str
    text: str


CODE = Prompt(
    "code",
    '''class Vector:
    """A vector in the plane."""

    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __add__(self, other):
        return Vector(self.x + other.x, self.y + other.y)

    def __sub__(self, other):
        return Vector(self.x - other.x, self.y - other.y)

    def __mul__(self, scalar):
        return Vector(self.x * scalar, self.y * scalar)

    def __eq__(self, other):
        return self.x == other.x and self.y == other.y


class Vector3:
    """A vector in space."""

    def __init__(self, x, y, z):
''',
)

EXTRACTION = Prompt(
    "extraction",
    """Order 1041 was placed by Maria Lindqvist on 3 March and shipped to Gothenburg by rail.
Order 1042 was placed by Tomas Novak on 4 March and shipped to Brno by truck.
Order 1043 was placed by Aisha Rahman on 4 March and shipped to Dhaka by air.
Order 1044 was placed by Peter Okafor on 6 March and shipped to Lagos by sea.

As a table:
order: 1041, name: Maria Lindqvist, date: 3 March, city: Gothenburg, transport: rail
order: 1042, name: Tomas Novak, date: 4 March, city: Brno, transport: truck
order:""",
)

LIST = Prompt(
    "list",
    """Capitals of Europe:
1. The capital of France is Paris.
2. The capital of Germany is Berlin.
3. The capital of Italy is Rome.
4. The capital of Spain is Madrid.
5. The capital of Portugal is Lisbon.
6. The capital of Austria is Vienna.
7. The capital of""",
)

PROSE = Prompt(
    "prose",
    """It was the best of times, it was the worst of times, it was the age of wisdom, it was the age
of foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of
Light, it was the season of Darkness, it was the spring of hope, it was the winter of despair, we had
everything before us, we had nothing before us,""",
)

ALL = (CODE, EXTRACTION, LIST, PROSE)
