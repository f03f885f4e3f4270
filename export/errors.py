"""The error of an export that cannot be made."""

from runtime.errors import UserError


class ExportError(UserError):
    """A model, draft head or option that cannot be exported exactly."""
