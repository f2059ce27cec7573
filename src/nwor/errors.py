"""Every error nwor raises on purpose.

Bad input is refused at the boundary, before anything has been mutated, by an `InputError` that names
the value. A call that does not fit the window's state is a `StateError`. `ShouldFallback` marks the
refusals after which the caller should write the rows through itself, as it would without nwor.
"""


class NworError(Exception):
    """Base of all errors raised by nwor."""


class InputError(NworError, ValueError):
    """A value handed to nwor is not acceptable; nothing has been changed."""


class ModeError(InputError):
    """A mode that does not exist."""


class LayoutError(InputError):
    """A KV tensor whose layout is unknown, overlaps itself, or does not fit the rows."""


class AcceptanceError(InputError):
    """Accepted counts, sampled ids or tree paths that contradict the window."""


class StateError(NworError, RuntimeError):
    """A call that the window's state does not allow."""


class WindowOpenError(StateError):
    """`begin` while a window is open: clearing it silently would lose its staged rows."""


class NoWindowError(StateError):
    """Stage, commit or cancel without an open window."""


class StaleWindowError(StateError):
    """A handle of an older generation: its window has been closed already."""


class ShouldFallback(NworError, RuntimeError):  # noqa: N818 - public name of the first API
    """Staging cannot proceed: the caller writes these rows through itself."""


class StageError(InputError, ShouldFallback):
    """Rows that cannot be staged; the store and the open window are unharmed."""


class RowCountError(StageError):
    """More rows, fewer rows, or the same rows twice."""


class SlotError(StageError):
    """Slots out of range, duplicated within a window, or of a wrong dtype."""


class TensorMismatchError(StageError):
    """Shape, dtype or device of K/V does not fit the layer."""


class ScaleError(StageError):
    """A quantisation scale whose axis is not stated, or whose length contradicts the axis stated."""


class UnknownLayerError(StageError):
    """A layer the store does not know."""


class NoStorageError(StageError):
    """Fake or meta tensors: there is nothing to stage or to write."""


class CommitError(ShouldFallback):
    """A writer failed inside `commit`.

    Attributes:
        layer_id: the layer whose writer failed, or None when no single layer is to blame.
        restored: True if every durable row is byte-identical to what it was before the commit.
    """

    def __init__(self, message: str, *, layer_id: str | None, restored: bool) -> None:
        super().__init__(message)
        self.layer_id = layer_id
        self.restored = restored
