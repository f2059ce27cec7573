"""What the terminal shows while text is generated."""

import io

from rich.console import Console
from rich.text import Text

from nwor.cli.live import Tail


def test_a_text_longer_than_the_screen_shows_its_end_until_it_is_whole() -> None:
    console = Console(width=20, height=6, file=io.StringIO(), force_terminal=True)
    screen = Tail(Text("\n".join(f"line {n}" for n in range(30))))
    shown = ["".join(s.text for s in line) for line in console.render_lines(screen, pad=False)]
    assert shown == [f"line {n}" for n in range(25, 30)]
    screen.whole = True
    shown = ["".join(s.text for s in line) for line in console.render_lines(screen, pad=False)]
    assert shown == [f"line {n}" for n in range(30)]
