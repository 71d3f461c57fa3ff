"""The log of a server: one JSON object a line."""

import datetime
import json
import logging
import sys
from typing import Any, TextIO

LOGGERS = ("keras_vit", "uvicorn", "py.warnings")


class JsonFormatter(logging.Formatter):
    """A record as JSON: time, level, logger, event, and the fields passed as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


def set_up(level: str = "info", stream: TextIO | None = None) -> None:
    """Sends the server's log, uvicorn's and Python's warnings to stderr, or to another stream."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.captureWarnings(True)
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
    # Each request has a line of ours; of uvicorn's, only what it warns of.
    logging.getLogger("uvicorn").setLevel(
        max(logging.WARNING, logging.getLogger("keras_vit").level)
    )
