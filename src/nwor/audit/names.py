"""What metadata says every slot holds.

A row is named by owner (which request wrote it), position and the step that wrote it. Writes name the
slots of the step's slot mapping; the commit's copies carry names from slot to slot. Nothing here
looks at K or V, so it costs the same for every model and works on every device.

A rejected draft, a stale row, somebody else's row and a row that was never written all have the
wrong name at the place where attention expects another one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Names = NDArray[np.int32]

OWNER, POSITION, STEP = range(3)


class RowNames:
    """The name of the row in every slot of one page space.

    Attributes:
        rows: int32 ``[slots, 3]``: owner, position, step; zeros for a slot never written.
        accepted: ``[slots]``, the row was accepted by the target.
        version: ``[pages]``, grows with every write or copy into the page.
        users: ``[pages]``, requests whose tables name the page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.rows = np.zeros((num_pages * page_size, 3), np.int32)
        self.accepted = np.zeros(num_pages * page_size, np.bool_)
        self.version = np.zeros(num_pages, np.int64)
        self.users = np.zeros(num_pages, np.int32)

    def write(self, slots: Ints, names: Names) -> None:
        """Name the rows that a step writes; none of them is accepted yet."""
        self.rows[slots] = names
        self.accepted[slots] = False
        self.version[slots // self.page_size] += 1

    def copy(self, source: Ints, target: Ints) -> None:
        """Carry names along with rows."""
        self.rows[target] = self.rows[source]
        self.accepted[target] = self.accepted[source]
        self.version[target // self.page_size] += 1
