"""The demo's table and its page."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.console import JustifyMethod
from rich.table import Table

from nwor.demo.lanes import LANES, LOOKUP, STAGE, Comparison, Lane

mpl.rcParams["svg.fonttype"] = "none"

_COLUMNS = (
    "prompt", "way", "same text", "tokens/s", "vs lookup", "tokens a step", "rows staged",
    "rows written", "rows avoided", "durable KiB", "staged KiB",
)  # fmt: skip
_FULL_WIDTH = 140
_COLOURS = ("#9aa5b1", "#6b7a8f", "#d9a441", "#3b8f5a")
_STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:68rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;font-size:.85rem}td,th{padding:.25rem .6rem;text-align:right}
td:nth-child(-n+3),th:nth-child(-n+3){text-align:left}tr:nth-child(4n+1) td{border-top:1px solid #bbb}
pre{white-space:pre-wrap;background:#f5f5f2;padding:.8rem}pre b{font-weight:400;color:#3b8f5a}
svg{max-width:100%;height:auto}"""


def tables(comparisons: Sequence[Comparison], width: int) -> list[Table]:
    """Build the table for a terminal of `width` columns: in two parts where one does not fit."""
    everything = range(len(_COLUMNS))
    if width >= _FULL_WIDTH:
        return [
            _table("rows count every layer; tokens/s include the prefill", comparisons, everything)
        ]
    return [
        _table("speed; tokens/s include the prefill", comparisons, everything[:6]),
        _table("rows, in every layer", comparisons, (0, 1, *everything[6:])),
    ]


def _table(title: str, comparisons: Sequence[Comparison], columns: Sequence[int]) -> Table:
    """Lay out some columns; lanes that have none of them are left out."""
    shown = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in columns:
        justify: JustifyMethod = "left" if column < 3 else "right"
        shown.add_column(_COLUMNS[column], justify=justify, no_wrap=column < 2)
    for comparison in comparisons:
        lanes = [lane for lane in comparison.lanes if 2 in columns or lane.result is not None]
        for lane in lanes:
            cells = [_cells(comparison, lane)[column] for column in columns]
            name = cells[0] if lane is lanes[0] else ""
            shown.add_row(name, *cells[1:], end_section=lane is lanes[-1])
    return shown


def _cells(comparison: Comparison, lane: Lane) -> list[str]:
    base = next(other for other in comparison.lanes if other.name == LOOKUP)
    cells = [
        comparison.name,
        lane.name,
        "yes" if lane.tokens == comparison.lanes[0].tokens else "NO",
        f"{lane.tokens_per_second:.1f}",
        f"{lane.tokens_per_second / base.tokens_per_second:.2f}x",
    ]
    if lane.result is None:
        return [*cells, *["-"] * 6]
    stats, metrics = lane.result.stats, lane.result.metrics
    return [
        *cells,
        f"{stats.acceptance_length:.2f}",
        f"{metrics.rows_staged:,}",
        f"{metrics.rows_written:,}",
        f"{metrics.rows_avoided:,}",
        f"{stats.peak_durable_bytes // 1024:,}",
        f"{metrics.bytes_staged // 1024:,}",
    ]


def write_page(comparisons: Sequence[Comparison], dtype: str) -> str:
    """Return a page of HTML that needs nothing else: table, plots, texts."""
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(c, lane)) + "</tr>"
        for c in comparisons
        for lane in c.lanes
    )
    head = "".join(f"<th>{column}</th>" for column in _COLUMNS)
    plots = "".join(
        f"<h2>{title}</h2>{_svg(figure)}"
        for title, figure in (
            ("Throughput", _throughput(comparisons)),
            ("Acceptance by draft position", _acceptance(comparisons)),
            ("Rows of each window: kept, and never written", _windows(comparisons[-1])),
        )
    )
    texts = "".join(
        f"<h3>{html.escape(c.name)}</h3><pre>{html.escape(c.prompts[0])}<b>{html.escape(c.texts[0])}</b></pre>"
        for c in comparisons
        if len(c.prompts) == 1
    )
    return (
        f"<!doctype html><meta charset=utf-8><title>nwor demo</title><style>{_STYLE}</style>"
        f"<h1>No write on reject: Gemma 3 270M, {dtype}, greedy</h1>"
        f"<table><tr>{head}</tr>{rows}</table>{plots}<h2>Texts</h2>{texts}"
    )


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", bbox_inches="tight")
    text = out.getvalue()
    return text[text.index("<svg") :]


def _throughput(comparisons: Sequence[Comparison]) -> Figure:
    figure = Figure(figsize=(9, 3.2))
    axes = figure.subplots()
    for at, name in enumerate(LANES):
        places = [i + (at - 1.5) * 0.2 for i in range(len(comparisons))]
        axes.bar(
            places,
            [c.lanes[at].tokens_per_second for c in comparisons],
            width=0.19,
            label=name,
            color=_COLOURS[at],
        )
    axes.set_xticks(range(len(comparisons)), [c.name for c in comparisons])
    axes.set_ylabel("tokens/s, prefill included")
    axes.legend(frameon=False)
    return figure


def _stage(comparison: Comparison) -> Lane:
    return next(lane for lane in comparison.lanes if lane.name == STAGE)


def _acceptance(comparisons: Sequence[Comparison]) -> Figure:
    figure = Figure(figsize=(9, 3))
    axes = figure.subplots()
    for comparison in comparisons:
        result = _stage(comparison).result
        if result is None or not result.stats.drafted:
            continue
        drafted, accepted = result.stats.drafted, result.stats.accepted
        rates = [a / d for a, d in zip([*accepted, *[0] * len(drafted)], drafted, strict=False)]
        axes.plot(range(1, len(rates) + 1), rates, marker="o", label=comparison.name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("position of the draft")
    axes.set_ylabel("share accepted")
    axes.set_ylim(0, 1)
    axes.legend(frameon=False)
    return figure


def _windows(comparison: Comparison) -> Figure:
    figure = Figure(figsize=(9, 3))
    axes = figure.subplots()
    result = _stage(comparison).result
    if result is not None:
        kept = result.stats.kept
        avoided = [a - b for a, b in zip(result.stats.rows, kept, strict=True)]
        steps = range(1, len(kept) + 1)
        axes.bar(steps, kept, color=_COLOURS[3], label="committed")
        axes.bar(steps, avoided, bottom=kept, color="#c9ced6", label="rejected: never written")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(f"window ({comparison.name})")
    axes.set_ylabel("rows in one layer")
    axes.legend(frameon=False)
    return figure
