"""The launcher's own lines in the log, among those of the server behind it: as text, or as JSON."""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

LOGGER = logging.getLogger("ctc_speculator.launcher")
TEXT_FORM, JSON_FORM = "text", "json"
# What the two servers are called.
TRITONSERVER, WORKER = "tritonserver", "the worker"
STOPPED_EARLY = "stopped before the models were ready"


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        now = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        return json.dumps({"time": now, **vars(record)["fields"]})


def write_to_stderr(form: str) -> None:
    """Write all lines that follow to stderr. form: TEXT_FORM or JSON_FORM"""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if form == JSON_FORM else logging.Formatter())
    LOGGER.handlers = [handler]
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False


def say(line: str) -> None:
    """Write one line, which as text begins with the command's name."""
    write(f"serve: {line}", {"event": "serve", "message": line})


def write(text: str, fields: Mapping[str, Any]) -> None:
    """Write one line: the text, or the fields as a JSON object after the time."""
    LOGGER.info("%s", text, extra={"fields": fields})
