"""Who is staged: what the overlays decide before anything is touched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from enum import StrEnum
from typing import Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from nwor.errors import LayoutError
from nwor.metrics import Metrics
from nwor.store.paged import PagedGroup
from nwor.store.staging import NOBODY, StagingPages

Ints = NDArray[np.int64]


class OverlayRefusal(StrEnum):
    """Why a request's window was written through to its durable pages."""

    OUT_OF_STAGING_PAGES = "out_of_staging_pages"
    """Every lease belongs to another request of the same step."""
    WINDOW_OVER_TWO_PAGES = "window_over_two_pages"
    """The window reaches more pages than a lease has."""
    OVERLAY_BROKEN = "overlay_broken"
    """A commit failed for good earlier: nothing is staged any more."""


class Batch(Protocol):
    """What admission needs to know of a batch."""

    @property
    def requests(self) -> Sequence[Hashable]:
        """One identity per request."""

    @property
    def num_drafts(self) -> Ints:
        """Drafts of each."""

    def take(self, chosen: NDArray[np.bool_]) -> Self:
        """Return the batch of the chosen requests."""


AnyBatch = TypeVar("AnyBatch", bound=Batch)


class Admission:
    """Choose the requests to stage, lease pages to them, and count the others.

    Attributes:
        pages: who holds which staging page.
        refused: requests written through, by reason.
    """

    def __init__(self, pages: StagingPages) -> None:
        self.pages = pages
        self.refused: Counter[OverlayRefusal] = Counter()

    def admit(
        self, batch: AnyBatch, fits: NDArray[np.bool_], metrics: Metrics, *, broken: bool
    ) -> tuple[AnyBatch, Ints]:
        """Return the batch of the staged requests and their leases.

        Args:
            batch: the verifying requests.
            fits: bool ``[requests]``, whether the window stays within the pages of a lease.
            metrics: where drafts that are written through are counted.
            broken: nothing may be staged any more.
        """
        if broken:
            nobody = np.zeros(len(fits), np.bool_)
            batch = self._refuse(OverlayRefusal.OVERLAY_BROKEN, batch, nobody, metrics)
        elif not fits.all():
            batch = self._refuse(OverlayRefusal.WINDOW_OVER_TWO_PAGES, batch, fits, metrics)
        leases = np.array(self.pages.lease(batch.requests), np.int64)
        served = leases != NOBODY
        if not served.all():
            batch = self._refuse(OverlayRefusal.OUT_OF_STAGING_PAGES, batch, served, metrics)
        return batch, leases[served]

    def _refuse(
        self,
        reason: OverlayRefusal,
        batch: AnyBatch,
        staged: NDArray[np.bool_],
        metrics: Metrics,
    ) -> AnyBatch:
        self.refused[reason] += int((~staged).sum())
        metrics.flushed += int(batch.num_drafts[~staged].sum())
        return batch.take(staged)


def check_room(groups: Sequence[PagedGroup], pages: StagingPages) -> None:
    """See that every store has the staging pages.

    Raises:
        LayoutError: one ends before they do.
    """
    end = pages.first_page + pages.num_pages
    for index, group in enumerate(groups):
        found = min(rows.key.shape[1] for rows in group.rows)
        if found < end:
            raise LayoutError(
                f"group {index} has {found} pages, staging needs pages {pages.first_page}..{end - 1}"
            )
