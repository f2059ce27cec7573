"""From a mask of wrong rows to a violation with a place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nwor.audit.findings import Findings, Kind, Violation
from nwor.audit.names import Ints
from nwor.audit.step import Step


@contextmanager
def unlogged(logger: logging.Logger) -> Iterator[None]:
    """Say nothing of violations: what a control group leaves behind is no news, and is counted."""
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


class Reporter:
    """Counts violations and tells the first of each kind.

    Args:
        told: called with the first violation of each kind.

    Attributes:
        findings: what was found and how much was looked at; replaced by `reset`.
    """

    def __init__(self, told: Callable[[Violation], None]) -> None:
        self.findings = Findings()
        self._told = told

    def reset(self) -> None:
        """Start new findings."""
        self.findings = Findings()

    def report(self, kind: Kind, count: int = 1, **place: Any) -> None:  # noqa: ANN401 - Violation's
        """Count a violation in the current step."""
        violation = Violation(kind, self.findings.steps, **place)
        if self.findings.add(violation, count):
            self._told(violation)

    def offend(self, step: Step, kind: Kind, slots: Ints, wrong: NDArray[np.bool_]) -> None:
        """Report the wrong ones among the step's rows, ``[groups, rows]``."""
        if wrong.any():
            group, row = np.argwhere(wrong)[0]
            self.report(
                kind,
                int(wrong.sum()),
                request=step.requests[step.of_row[row]],
                group=int(group),
                position=int(step.position[row]),
                slot=int(slots[group, row]),
            )

    def offend_at(
        self,
        kind: Kind,
        wrong: NDArray[np.bool_],
        *,
        requests: Sequence[str],
        request: Ints,
        group: Ints,
        position: Ints,
        slots: Ints,
    ) -> None:
        """Report the wrong ones among rows listed one by one; `request` indexes `requests`."""
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            self.report(
                kind,
                int(wrong.sum()),
                request=requests[request[at]],
                group=int(group[at]),
                position=int(position[at]),
                slot=int(slots[at]),
            )
