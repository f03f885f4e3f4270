"""The page of ``ctc page``, which stands before a running server."""
