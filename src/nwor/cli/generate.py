"""`nwor generate`: continue prompts with a model on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nwor.cli.results import as_json, summary
from nwor.errors import InputError

if TYPE_CHECKING:
    from nwor.engine import Chunk, Result, Stream

Report = Callable[["Stream", "Chunk"], None]

_EXAMPLES = """examples:
  nwor generate --model ./gemma-3-270m --prompt "def fib(n):"
  nwor generate --model ./gemma-3-270m --prompts questions.jsonl --batch-size 4 --json
  nwor generate --model ./target --drafter model:./small --num-draft-tokens 6 --prompt "Once"
  nwor generate --model ./gemma-3-270m --prompt "A tale:" --temperature 0.8 --top-p 0.9 --seed 1

A line of a prompts file is a JSON string or an object with a "prompt".
Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted (what was generated is shown)."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's arguments."""
    parser = commands.add_parser(
        "generate",
        help="continue prompts with speculative decoding on a transactional KV cache",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--model", required=True, help="directory or id of a causal model")
    parser.add_argument("--prompt", action="append", default=[], help="a prompt; may be repeated")
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help="prompts, one a line")
    parser.add_argument(
        "--drafter",
        default="prompt-lookup",
        metavar="{none,prompt-lookup,model:PATH}",
        help="who drafts (default: %(default)s)",
    )
    parser.add_argument("--num-draft-tokens", type=int, default=4, metavar="K", help="default: 4")
    parser.add_argument(
        "--mode",
        default="stage",
        metavar="{off,immediate,stage}",
        help="how drafted rows reach the cache (default: %(default)s)",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, default=0, help="0 keeps all (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="1 keeps all (default)")
    parser.add_argument("--seed", type=int, help="makes sampling reproducible")
    parser.add_argument("--stop", action="append", default=[], help="text that ends an output")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts at a time (default: 8)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Generate, and show it as the output allows: live, plain, or as JSON."""
    prompts = [*args.prompt, *(read_prompts(args.prompts) if args.prompts else [])]
    if not prompts:
        raise InputError("no prompts: give --prompt TEXT or --prompts FILE.jsonl")
    from nwor.engine import stream  # noqa: PLC0415 - heavy: not for --help

    running = stream(
        args.model,
        prompts,
        drafter=args.drafter,
        mode=args.mode,
        num_draft_tokens=args.num_draft_tokens,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        stop=args.stop,
        batch_size=args.batch_size,
        dtype=args.dtype,
    )
    live = sys.stdout.isatty() and not args.json
    interrupted = _consume(running, prompts, live=live)
    result = running.result
    if args.json:
        sys.stdout.write(json.dumps(as_json(result), ensure_ascii=False) + "\n")
    elif not live:
        _print_plain(result)
    if interrupted:
        sys.stderr.write("nwor: interrupted; the window was closed and nothing of it written\n")
        return 130
    return 0


def _consume(running: Stream, prompts: list[str], *, live: bool) -> bool:
    """Run to the end; True if Ctrl-C came first."""
    try:
        with running:
            if live:
                from nwor.cli.live import show  # noqa: PLC0415 - needs rich

                show(running, prompts)
            else:
                for _ in running:
                    pass
    except KeyboardInterrupt:
        return True
    return False


def read_prompts(path: Path) -> list[str]:
    """Read a JSONL file of prompts.

    Raises:
        InputError: names the file and the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    return [
        _prompt_of(line, f"{path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]


def _prompt_of(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON: {error}") from error
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str) or not prompt:
        raise InputError(f'{where}: expected a string or an object with a "prompt" of some text')
    return prompt


def _print_plain(result: Result) -> None:
    for index, output in enumerate(result.outputs):
        if len(result.outputs) > 1:
            sys.stdout.write(f"--- {index + 1} ({output.finish_reason})\n")
        sys.stdout.write(f"{output.prompt}{output.text}\n")
    sys.stderr.write(summary(result) + "\n")
