"""Text as it is generated, on a terminal: accepted drafts are green, the line below counts."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment, Segments
from rich.text import Text

from nwor.cli.results import summary
from nwor.engine import Chunk, Stream

ACCEPTED = "green"
_TITLE = "bold"


def show(running: Stream, prompts: list[str], console: Console | None = None) -> None:
    """Consume the stream and show it; what is on the screen stays there when it ends."""
    console = console or Console()
    texts = [_start(index, prompt, len(prompts)) for index, prompt in enumerate(prompts)]
    status = Text(style="dim")
    screen = Tail(Group(*texts, status))
    with Live(screen, console=console, refresh_per_second=12, vertical_overflow="visible"):
        try:
            for chunk in running:
                _append(texts[chunk.index], chunk)
                status.plain = summary(running)
        finally:
            screen.whole = True


class Tail:
    """The end of something too long for the screen, which a terminal could not redraw.

    Attributes:
        whole: show everything: nothing will be redrawn any more.
    """

    def __init__(self, content: RenderableType) -> None:
        self.content = content
        self.whole = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines that fit."""
        lines = console.render_lines(self.content, options, pad=False)
        if not self.whole:
            lines = lines[-max(console.size.height - 1, 1) :]
        for line in lines:
            yield Segments(line)
            yield Segment.line()


def _start(index: int, prompt: str, count: int) -> Text:
    text = Text(f"--- {index + 1}\n" if count > 1 else "", style=_TITLE)
    text.append(prompt, style="not bold dim")
    return text


def _append(text: Text, chunk: Chunk) -> None:
    text.append(chunk.drafted_text, style=f"not bold {ACCEPTED}")
    text.append(chunk.text[len(chunk.drafted_text) :], style="not bold")
