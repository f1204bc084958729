"""Formats log lines on stderr: text, in colour on a terminal; one JSON object per line on request.

Lines of the server and of libraries (uvicorn, aiohttp, Python's warnings) have the same form and
carry ids (`group_id`, `rollout_id`, `run`). Anything that looks like a secret is removed from the
line before it is written.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from typing import TextIO, cast

import structlog
from structlog.typing import Processor

from ..config import LogFormat
from ..telemetry.log_lines import strike, text_processors


class CurrentStderr(io.TextIOBase):
    """Writes to the current `sys.stderr`. A progress bar replaces it while it is shown, and prints
    lines above itself."""

    def write(self, text: str, /) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def configure_logs(level: str, form: LogFormat = "auto") -> None:
    """Shows events of at least `level` ("debug" ... "error"); for libraries, at least warnings.

    Args:
        form: auto is console: text between the tables of a command, wherever stderr goes.
    """
    number = logging.getLevelNamesMapping()[level.upper()]
    stderr = cast(TextIO, CurrentStderr())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
    ]
    shown = _renderers(form)
    structlog.configure(
        processors=[*shared, *shown],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(stderr),
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *shown],
    )
    root = logging.getLogger()
    for handler in [one for one in root.handlers if isinstance(one, _Lines)]:
        root.removeHandler(handler)
    lines = _Lines(stderr)
    lines.setFormatter(formatter)
    root.addHandler(lines)
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)


class _Lines(logging.StreamHandler[TextIO]):
    """Handles log records of libraries."""


def _renderers(form: LogFormat) -> list[Processor]:
    if form == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(), strike]
    return text_processors(colors=sys.stderr.isatty() and "NO_COLOR" not in os.environ)
