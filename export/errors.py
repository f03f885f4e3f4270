"""The exporter's error."""

from runtime.core.errors import UserError


class ExportError(UserError):
    """A model, draft head or option cannot be exported exactly."""
