"""Text as it is generated, on a terminal: accepted drafts are green, the line below counts."""

from __future__ import annotations

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from nwor.cli.generate import summary
from nwor.engine import Chunk, Stream

ACCEPTED = "green"
_TITLE = "bold"


def show(running: Stream, prompts: list[str], console: Console | None = None) -> None:
    """Consume the stream and show it; what is on the screen stays there when it ends."""
    console = console or Console()
    texts = [_start(index, prompt, len(prompts)) for index, prompt in enumerate(prompts)]
    status = Text(style="dim")
    screen = Group(*texts, status)
    with Live(screen, console=console, refresh_per_second=12, vertical_overflow="visible"):
        for chunk in running:
            _append(texts[chunk.index], chunk)
            status.plain = summary(running)


def _start(index: int, prompt: str, count: int) -> Text:
    text = Text(f"--- {index + 1}\n" if count > 1 else "", style=_TITLE)
    text.append(prompt, style="not bold dim")
    return text


def _append(text: Text, chunk: Chunk) -> None:
    text.append(chunk.drafted_text, style=f"not bold {ACCEPTED}")
    text.append(chunk.text[len(chunk.drafted_text) :], style="not bold")
