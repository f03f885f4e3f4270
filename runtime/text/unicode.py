"""Text to bytes, with a clear error. Clients use it too, so it imports no library."""

from runtime.core.errors import RequestError


def encode_utf8(name: str, text: str) -> bytes:
    """UTF-8 of the text of field ``name``.

    Raises RequestError for a lone surrogate: half of a character, as JSON and command lines can hold it.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name}: must be valid Unicode, got a lone surrogate at {error.start}") from None
