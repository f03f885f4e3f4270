"""The error of a training run that cannot start."""

from runtime.core.errors import UserError


class TrainingError(UserError):
    """Data or a setting that training cannot use; the message names it."""
