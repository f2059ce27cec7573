"""What a run comes to: as JSON, or in one line."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

from nwor import __version__

if TYPE_CHECKING:
    from nwor.engine import Result, Stream


def as_json(result: Result) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    return {
        "outputs": [
            {
                "prompt": output.prompt,
                "prompt_tokens": output.prompt_tokens,
                "text": output.text,
                "token_ids": output.token_ids,
                "drafted": output.drafted,
                "finish_reason": output.finish_reason.value,
            }
            for output in result.outputs
        ],
        "metrics": result.metrics.snapshot(),
        "tokens_per_second": result.tokens_per_second,
        "acceptance_length": result.stats.acceptance_length,
        "prefill_seconds": result.stats.prefill_seconds,
        "decode_seconds": result.stats.decode_seconds,
        "versions": {
            "nwor": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def summary(running: Stream | Result) -> str:
    """Return one line: speed, acceptance, rows."""
    stats, metrics = running.stats, running.metrics
    rate = stats.decoded / stats.decode_seconds if stats.decode_seconds else 0.0
    drafted, accepted = sum(stats.drafted), sum(stats.accepted)
    share = f"{accepted / drafted:.0%}" if drafted else "-"
    return (
        f"{rate:.1f} tokens/s | {share} of {drafted} drafts accepted, "
        f"{stats.acceptance_length:.2f} tokens a step | "
        f"rows kept {metrics.rows_written}, avoided {metrics.rows_avoided}"
    )
