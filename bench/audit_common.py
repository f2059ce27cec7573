"""What the benchmarks of the audit share: the time inside its hooks, and the table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class Timer:
    """Time spent in the audit's hooks; a hook that calls another is counted once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def watch(self, owner: object, *names: str) -> None:
        """Add up the time of these methods of one object."""
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if self._inside:
                return method(*args, **kwargs)
            self._inside, started = True, time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started
                self._inside = False

        return run


def show(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Print medians; `runs` has those of each level, turn by turn, those of ``off`` among them."""
    print("level     tok/s   ratio to off (spread)    audit ms/step  share")
    for name, each in runs.items():
        pairs = zip(each, runs["off"], strict=True)
        ratios = [a["tokens_per_second"] / b["tokens_per_second"] for a, b in pairs]
        rate, spent, share = (
            statistics.median(run[key] for run in each)
            for key in ("tokens_per_second", "audit_ms", "share")
        )
        spread = f"({min(ratios):.3f}-{max(ratios):.3f})"
        middle = statistics.median(ratios)
        print(f"{name:9s} {rate:6.1f}  {middle:.3f} {spread}   {spent:13.3f}  {share:6.2%}")
