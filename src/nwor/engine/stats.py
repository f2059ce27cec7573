"""What an engine did, beside the windows that `nwor.metrics.Metrics` counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nwor.metrics import Written


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine was made.

    Attributes:
        prefill: rows of prompts, written straight to the durable store (summed over layers).
        prefill_seconds: time spent on prompts, their first token included.
        decode_seconds: time spent on windows, drafting included.
        draft_seconds: the drafter's part of it.
        decoded: tokens emitted by windows.
        steps: verify steps.
        drafted: per draft position (0: the first), drafts proposed.
        accepted: per draft position, drafts accepted and emitted.
        rows: per step, rows of the batch (bonus and drafts, in one layer).
        kept: per step, the rows that became durable.
        peak_durable_bytes: most bytes that the running requests' durable rows had at a time.
    """

    prefill: Written = field(default_factory=Written)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    draft_seconds: float = 0.0
    decoded: int = 0
    steps: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    peak_durable_bytes: int = 0

    def count_step(self, drafts: Sequence[int], accepted: Sequence[int], emitted: int) -> None:
        """Count one verify step by its requests' drafts and accepted drafts."""
        self.steps += 1
        self.decoded += emitted
        self.rows.append(sum(drafts) + len(drafts))
        self.kept.append(sum(accepted) + len(accepted))
        for total, counts in ((self.drafted, drafts), (self.accepted, accepted)):
            total.extend([0] * (max(counts) - len(total)))
            for count in counts:
                for position in range(count):
                    total[position] += 1

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per request and verify step; 1 without speculation."""
        windows = sum(self.kept) - sum(self.accepted)
        return self.decoded / windows if windows else 0.0
