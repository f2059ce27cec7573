"""The `nwor` command: one module per subcommand, each with `add` (arguments) and `run`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from nwor import __version__
from nwor.cli import audit, doctor, generate
from nwor.errors import InputError, NworError

COMMANDS = (generate, audit, doctor)
BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130


def parser() -> argparse.ArgumentParser:
    """Build the parser of all subcommands."""
    top = argparse.ArgumentParser(
        prog="nwor", description="No write on reject: a transactional KV cache for speculation."
    )
    top.add_argument("--version", action="version", version=f"nwor {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 2 for bad input, 130 after Ctrl-C."""
    args = parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except InputError as error:
        sys.stderr.write(f"nwor: {error}\n")
        return BAD_INPUT
    except NworError as error:
        sys.stderr.write(f"nwor: {type(error).__name__}: {error}\n")
        return FAILED
    except KeyboardInterrupt:
        sys.stderr.write("nwor: interrupted\n")
        return INTERRUPTED
    return code
