"""`DeferredWriteManager`: the first API of deferred KV writes, for engines that already call it.

One call per step and one per layer, with the engine's own writer. Engines written for nwor use
`TransactionalCache`, whose commit moves all layers at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum

from torch import Tensor

from nwor.errors import (
    CommitError,
    ModeError,
    NoWindowError,
    RowCountError,
    StaleWindowError,
    WindowOpenError,
)
from nwor.layer_memory import LayerMemory
from nwor.layout import KVRows, Layout
from nwor.metrics import FallbackReason, Metrics
from nwor.scales import ScaleAxis
from nwor.window import WindowSequence
from nwor.window_rows import WindowRows
from nwor.writer_window import WriterWindow
from nwor.writers import Hold, LayerRows, Writer


class Mode(StrEnum):
    """What the manager does with a window."""

    OFF = "off"
    """Nothing: every call declines and the caller writes as it always did."""
    IMMEDIATE = "immediate"
    """Declines too, but counts windows: the control group."""
    STAGE = "stage"
    """Holds rows until the commit."""

    @classmethod
    def parse(cls, name: str) -> Mode:
        """Return the mode called `name`, whatever its case.

        Raises:
            ModeError: there is no such mode.
        """
        try:
            return cls(name.lower())
        except (ValueError, AttributeError):
            known = ", ".join(mode.value for mode in cls)
            raise ModeError(f"unknown mode {name!r}; known modes: {known}") from None


class DeferredWriteManager:
    """Holds each layer's K/V rows of a speculative window and writes the accepted ones.

    Args:
        mode: ``stage``, ``immediate`` or ``off``.
        hold: ``copy`` holds rows in buffers of the manager's own; ``reference`` holds the caller's
            tensors, which must then stay untouched until the commit (see `Hold`).
        layers: names of the layers that must stage in every window; None accepts any that do.
        undo: save the rows a commit overwrites so that a fault can be undone.
        strict: raise on calls outside a window, which are silently declined otherwise.

    Raises:
        ModeError: unknown mode.
    """

    def __init__(
        self,
        *,
        mode: str = "stage",
        hold: Hold | str = Hold.COPY,
        layers: Collection[str] | None = None,
        undo: bool = True,
        strict: bool = False,
    ) -> None:
        self.metrics = Metrics()
        self._mode = Mode.parse(mode)
        self._hold = Hold(hold)
        self._layers = None if layers is None else frozenset(layers)
        self._undo = undo
        self._strict = strict
        self._memory = LayerMemory()
        self._windows: WindowSequence[WriterWindow] = WindowSequence()
        self._fallback_reason: str | None = None
        self._last: dict[str, int | str] | None = None

    @property
    def window(self) -> WriterWindow | None:
        """The open window, or None."""
        return self._windows.current

    @property
    def window_active(self) -> bool:
        """True between `begin_window` and the end of its window."""
        return self.window is not None

    @property
    def fallback_reason(self) -> str | None:
        """Why the last window was not committed; None if it was."""
        return self._fallback_reason

    def get_mode(self) -> str:
        """Return the mode's name."""
        return self._mode.value

    def set_mode(self, mode: str) -> None:
        """Change the mode.

        Raises:
            ModeError: unknown mode.
            WindowOpenError: a window is open.
        """
        parsed = Mode.parse(mode)
        if self.window is not None and parsed is not self._mode:
            raise WindowOpenError(f"mode {parsed} while window {self.window.generation} is open")
        self._mode = parsed

    def begin_window(self, num_draft_tokens: Sequence[int], rows: WindowRows | None = None) -> bool:
        """Open a window.

        Args:
            num_draft_tokens: drafts of each request; each layer then stages their sum of rows.
            rows: what each row is, for callers that stage whole steps (`WindowRows.step`).

        Returns:
            False if nothing is to be staged: another mode than ``stage``, or no drafts.

        Raises:
            WindowOpenError: a window is open; it is left as it is.
            RowCountError: `num_draft_tokens` is not a list of counts, or contradicts `rows`.
        """
        if self._mode is not Mode.STAGE:
            self.metrics.windows += self._mode is Mode.IMMEDIATE
            return False
        generation = self._windows.next_generation()
        if not len(num_draft_tokens):
            return False
        drafts = WindowRows.drafts(num_draft_tokens)
        if rows is None and not drafts.num_rows:
            return False
        if rows is not None and rows.num_drafts != drafts.num_drafts:
            raise RowCountError(
                f"num_draft_tokens {list(drafts.num_drafts)}, but rows of {list(rows.num_drafts)}"
            )
        window = WriterWindow(
            rows or drafts,
            generation,
            self.metrics,
            self._memory,
            hold=self._hold,
            layers=self._layers,
            undo=self._undo,
        )
        self._windows.opened(window)
        self._fallback_reason = None
        self._last = None
        return True

    def stage_layer(
        self,
        *,
        layer_id: str,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
        writer: Writer,
        scale_axis: ScaleAxis | str | None = None,
        skips_negative: bool = False,
        layout: Layout | str | KVRows | None = None,
    ) -> bool:
        """Hold the next rows of one layer; layers stage in any order, each in one or more chunks.

        The arguments are explained at `LayerRows`.

        Returns:
            True if the rows are held; False, with no window open, if the caller must write them.

        Raises:
            StageError: the rows cannot be held (see `WriterWindow.stage`); a `ShouldFallback`.
            NoWindowError: no window is open, and the manager is strict.
        """
        window = self.window
        if window is None:
            return self._declined("stage_layer")
        window.stage(
            layer_id,
            LayerRows(
                key,
                value,
                slot_mapping,
                key_cache,
                value_cache,
                kv_cache_dtype,
                k_scale,
                v_scale,
                writer,
                scale_axis,
                skips_negative,
                layout,
            ),
        )
        return True

    def commit(
        self,
        accepted_counts: Sequence[int] | Tensor,
        *,
        dropped: Collection[int] = (),
        generation: int | None = None,
    ) -> None:
        """Write the accepted rows of every layer; nothing happens without an open window.

        Args:
            accepted_counts: accepted drafts of each request.
            dropped: requests aborted meanwhile; none of their rows is written.
            generation: if given, the window that is meant; another one is refused.

        Raises:
            AcceptanceError, RowCountError: nothing was written, the window is still open.
            CommitError: a writer failed; see `CommitError.restored`. The window is closed.
            StaleWindowError: `generation` is not the open window's.
            NoWindowError: no window is open, and the manager is strict.
        """
        window = self.window
        if generation is not None and (window is None or window.generation != generation):
            current = "none" if window is None else window.generation
            raise StaleWindowError(f"commit for window {generation}, the open one is {current}")
        if window is None:
            self._declined("commit")
            return
        try:
            report = window.commit(accepted_counts, dropped=dropped)
        except CommitError as error:
            if window.is_open:
                window.abort(FallbackReason.WRITER_FAULT)
            self._fell_back(f"{FallbackReason.WRITER_FAULT}:{error.layer_id}")
            raise
        self._last = self._summary(report.committed, report.rejected, 0)

    def cancel_and_flush(self, reason: str) -> None:
        """Close the window by writing every row that was staged; nothing happens without a window.

        Raises:
            CommitError: a writer failed; see `CommitError.restored`. The window is closed.
            NoWindowError: no window is open, and the manager is strict.
        """
        window = self.window
        if window is None:
            self._declined("cancel_and_flush")
            return
        kind = next((known for known in FallbackReason if known == reason), FallbackReason.CALLER)
        try:
            window.flush(kind)
        except CommitError as error:
            self._fell_back(f"{FallbackReason.WRITER_FAULT}:{error.layer_id}")
            raise
        self._fell_back(reason)

    def finish_step(self) -> None:
        """End the step: a window still open is flushed, with a reason of its own."""
        if self.window is not None:
            self.cancel_and_flush(FallbackReason.UNFINISHED)

    def get_metrics(self) -> dict[str, int | str | dict[str, int]]:
        """Return totals: the first API's names, and rows and bytes counted at the writers."""
        m = self.metrics
        return {
            "mode": self._mode.value,
            "windows": m.windows,
            "tokens_staged": m.staged,
            "tokens_committed": m.committed,
            "tokens_rejected": m.rejected,
            "tokens_fallback": m.flushed,
            "fallbacks": m.fallbacks.total(),
            "fallbacks_by_reason": {reason.value: n for reason, n in m.fallbacks.items()},
            "rows_written": m.rows_written,
            "bytes_written": m.bytes_written,
            "rows_avoided": m.rows_avoided,
            "bytes_avoided": m.bytes_avoided,
        }

    def pop_last_window_metrics(self) -> dict[str, int | str] | None:
        """Return and forget what the last window did; None if there is nothing new."""
        last, self._last = self._last, None
        return last

    def _declined(self, call: str) -> bool:
        if self._strict:
            raise NoWindowError(f"{call} without an open window")
        return False

    def _fell_back(self, reason: str) -> None:
        self._fallback_reason = reason
        self._last = {**self._summary(0, 0, 1), "reason": reason}

    def _summary(self, committed: int, rejected: int, fallback: int) -> dict[str, int | str]:
        return {
            "mode": self._mode.value,
            "committed": committed,
            "rejected": rejected,
            "fallback": fallback,
        }
