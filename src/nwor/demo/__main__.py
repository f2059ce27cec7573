"""`python -m nwor.demo`: Gemma 3 270M, four prompts, four ways to decode, one table, one page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

from nwor.cli import BAD_INPUT, INTERRUPTED
from nwor.demo import weights
from nwor.demo.lanes import Comparison, compare
from nwor.demo.prompts import ALL
from nwor.demo.report import tables, write_page
from nwor.engine import Loaded, load
from nwor.errors import InputError
from nwor.output_file import check_writable, save

_LOG_WIDTH = 150


def main(argv: list[str] | None = None) -> int:
    """Run the demo."""
    parser = argparse.ArgumentParser(prog="python -m nwor.demo", description=__doc__)
    parser.add_argument("--max-new-tokens", type=int, default=48, metavar="N")
    parser.add_argument("--num-draft-tokens", type=int, default=4, metavar="K")
    parser.add_argument("--dtype", default="float32", help="float32 (default) or bfloat16")
    parser.add_argument("--page", type=Path, default=Path("nwor-demo.html"), help="report to write")
    args = parser.parse_args(argv)
    console = Console()
    if not console.is_terminal:  # a log file has no width: do not squeeze the table into 80 columns
        console = Console(width=_LOG_WIDTH)
    try:
        return _run(args, console)
    except InputError as error:
        console.print(f"nwor: {error}", style="red")
        return BAD_INPUT
    except KeyboardInterrupt:
        console.print("\nnwor: interrupted")
        return INTERRUPTED


def _run(args: argparse.Namespace, console: Console) -> int:
    check_writable(args.page, "--page")
    loaded = _loaded(args.dtype, console)
    console.print(
        f"\nEach prompt is continued by {args.max_new_tokens} tokens, greedily, in {args.dtype}, on "
        f"{torch.get_num_threads()} threads, K = {args.num_draft_tokens}.\n"
    )
    comparisons: list[Comparison] = []
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("generating", total=4 * (len(ALL) + 1))
        for prompts in (*([p] for p in ALL), list(ALL)):
            name = prompts[0].kind if len(prompts) == 1 else f"{len(prompts)} as a batch"
            comparisons.append(
                compare(
                    loaded, name, prompts, args.max_new_tokens, args.num_draft_tokens,
                    lambda lane: bar.update(task, advance=1, description=lane),
                )
            )  # fmt: skip
    for part in tables(comparisons, console.width):
        console.print(part)
    save(args.page, "--page", write_page(comparisons, args.dtype))
    console.print(f"Report with texts and plots: {args.page}")
    different = [c.name for c in comparisons if not c.identical]
    if different:
        console.print(
            f"Texts that differ from plain greedy: {', '.join(different)}", style="yellow"
        )
    # In float32 a different text is a fault; in bf16 ties and batch shape decide some tokens.
    return 1 if different and args.dtype == "float32" else 0


def _loaded(dtype: str, console: Console) -> Loaded:
    console.print("[bold]Gemma 3 270M[/] (base model, Q4_K_M weights dequantised)")
    console.print("Gemma is provided under and subject to the Gemma Terms of Use found at")
    console.print(f"ai.google.dev/gemma/terms; full text: {weights.terms_path()}\n", soft_wrap=True)
    if not weights.is_cached():
        columns = (SpinnerColumn(), *Progress.get_default_columns()[:2], TimeElapsedColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("preparing", total=len(weights.STAGES))
            weights.ensure(lambda stage: bar.update(task, advance=1, description=stage))
    console.print(f"Weights: {weights.ensure()}", soft_wrap=True)
    return load(str(weights.ensure()), dtype)


if __name__ == "__main__":
    sys.exit(main())
