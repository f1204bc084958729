"""How log lines look: JSON, one a line, on stderr; coloured text where that is a terminal."""

from __future__ import annotations

import io
import logging
import sys
from typing import TextIO, cast

import structlog


class CurrentStderr(io.TextIOBase):
    """What `sys.stderr` is at the moment: a progress bar stands there while it is shown, and puts
    what is written above itself."""

    def write(self, text: str, /) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def configure_logs(level: str) -> None:
    """Shows events of `level` ("debug" ... "error") and above."""
    number = logging.getLevelNamesMapping()[level.upper()]
    stderr = cast(TextIO, CurrentStderr())
    logging.basicConfig(
        stream=stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    shown = (
        structlog.dev.ConsoleRenderer()
        if sys.stderr.isatty()
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            shown,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(stderr),
    )
