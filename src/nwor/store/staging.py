"""Who holds which staging page, and what each page already shows.

A *lease* gives one request two staging pages in every cache group, one for even and one for odd
logical pages. Two are enough: a window shorter than a page touches at most two pages, and those
have different parity. Page numbers follow from the lease by arithmetic, so leases are all there is
to allocate, and their number is the bound.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from nwor.errors import InputError

Ints = NDArray[np.int64]

NOBODY = -1
PAGES_PER_LEASE = 2
"""Staging pages of one lease in one group."""


class StagingPages:
    """Leases on staging pages ``[first_page, first_page + num_pages)``.

    Page of lease l, group g, logical page p: ``first_page + 2 * (l * num_groups + g) + p % 2``.

    Attributes:
        held: per staging page, ``[leases, groups, 2]``: the logical page it stands for, `NOBODY` if
            none.
        durable: the durable page it lies over.
        filled: leading rows that equal the durable page's.
        generation: int64 ``[leases]``, how often each lease was taken back. What was noted under an
            older one says nothing about the pages of the present holder.

    Raises:
        InputError: fewer than one lease or group, or a negative first page.
    """

    def __init__(self, *, first_page: int, num_leases: int, num_groups: int) -> None:
        if first_page < 0 or num_leases < 1 or num_groups < 1:
            raise InputError(
                f"staging needs first_page >= 0, num_leases >= 1 and num_groups >= 1, "
                f"got {first_page}, {num_leases}, {num_groups}"
            )
        self.first_page = first_page
        self.num_leases = num_leases
        self.num_groups = num_groups
        shape = (num_leases, num_groups, PAGES_PER_LEASE)
        self.held = np.full(shape, NOBODY, np.int64)
        self.durable = np.full(shape, NOBODY, np.int64)
        self.filled = np.zeros(shape, np.int64)
        self.generation = np.zeros(num_leases, np.int64)
        self._free = list(reversed(range(num_leases)))
        self._leases: OrderedDict[Hashable, int] = OrderedDict()  # least recently used first

    @property
    def num_pages(self) -> int:
        """Staging pages in all groups together."""
        return self.num_leases * self.num_groups * PAGES_PER_LEASE

    @property
    def pages_in_use(self) -> int:
        """Staging pages that requests hold."""
        return len(self._leases) * self.num_groups * PAGES_PER_LEASE

    @property
    def requests(self) -> tuple[Hashable, ...]:
        """Requests that hold a lease, least recently used first."""
        return tuple(self._leases)

    def lease(self, requests: Sequence[Hashable]) -> list[int]:
        """Return each request's lease, `NOBODY` where none is left.

        A request that is not among `requests` loses its lease, least recently used first, before
        anybody goes without: its pages hold copies only, so all it costs is filling them in again.
        """
        leases = self._leases
        result = []
        waiting = []
        for place, request in enumerate(requests):
            lease = leases.get(request, NOBODY)
            if lease == NOBODY:
                waiting.append(place)
            else:
                leases.move_to_end(request)
            result.append(lease)
        if waiting:
            present = set(requests)
            for place in waiting:
                result[place] = self._take(requests[place], present)
        return result

    def _take(self, request: Hashable, present: set[Hashable]) -> int:
        if not self._free:
            oldest = next(iter(self._leases), None)
            if oldest is None or oldest in present:  # those present were just moved to the end
                return NOBODY
            self.release(oldest)
        lease = self._free.pop()
        self._leases[request] = lease
        return lease

    def release(self, request: Hashable) -> None:
        """Take a request's lease back; a request without one is ignored."""
        lease = self._leases.pop(request, None)
        if lease is None:
            return
        self.held[lease] = NOBODY
        self.durable[lease] = NOBODY
        self.filled[lease] = 0
        self.generation[lease] += 1
        self._free.append(lease)

    def check_integrity(self) -> None:
        """See that every lease is either free or held by one request, and free ones hold nothing.

        Raises:
            AssertionError: they are not, which is nwor's own fault.
        """
        held = list(self._leases.values())
        assert sorted(held + self._free) == list(range(self.num_leases)), (held, self._free)  # noqa: S101
        assert (self.held[self._free] == NOBODY).all(), "a free lease still stands for a page"  # noqa: S101
        assert (self.filled >= 0).all(), "negative fill"  # noqa: S101
