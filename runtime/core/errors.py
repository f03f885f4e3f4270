"""The errors a user can cause, each with one clear message."""


class UserError(ValueError):
    """Something given to the program cannot be used; command lines print it and exit with 2."""


class BundleError(UserError):
    """An engine bundle is damaged, incomplete or made for another version."""


class RequestError(UserError):
    """A prompt or a generation option cannot be served."""


class DeviceError(RuntimeError):
    """A device or its driver failed, or lacks the memory that an engine needs."""


class DeviceMemoryError(DeviceError):
    """A device lacks memory. What it holds already is intact, and it can go on."""
