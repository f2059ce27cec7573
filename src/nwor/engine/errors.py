"""Errors of the embedded engine; bad values raise `nwor.errors.InputError`."""

from nwor.errors import InputError


class UnsupportedModelError(InputError):
    """A model the engine cannot run exactly: it is refused by name and reason, never guessed."""


class ModelLoadError(InputError):
    """No model at this path or id, or no weights."""
