"""One line of `nwor doctor`'s report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, or could not be.

    Attributes:
        name: what was looked at.
        good: None for information.
        found: what was found; why not, if it was not checked.
        remedy: what to change if it is not good, or what to give so that it can be checked.
        checked: False if it cannot be known beforehand, or not from what was given.
    """

    name: str
    good: bool | None
    found: str
    remedy: str = ""
    checked: bool = True


def unchecked(name: str, why: str, remedy: str = "") -> Check:
    """Return the line of what was not checked."""
    return Check(name, None, f"not checked: {why}", remedy, checked=False)
