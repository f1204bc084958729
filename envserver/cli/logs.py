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
import time
from collections import Counter
from typing import Final, Protocol, TextIO, cast

import structlog
from structlog.typing import Processor

from ..settings.config import LogFormat
from ..telemetry.log_lines import shorten, strike, text_processors
from ..telemetry.redaction import Bucket

_EQUAL_WARNINGS: Final = (0.1, 10.0)
"""Rate a second, and burst, of equal warnings of a library."""
_MOST_KINDS: Final = 256


class CurrentStderr(io.TextIOBase):
    """Writes to the current `sys.stderr`. A progress bar replaces it while it is shown, and prints
    lines above itself."""

    def write(self, text: str, /) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


class LogSettings(Protocol):
    """The settings of a command that logs."""

    @property
    def log_level(self) -> str: ...

    @property
    def log_format(self) -> LogFormat: ...


def show_logs(settings: LogSettings) -> None:
    """Shows events as a command's settings say."""
    configure_logs(settings.log_level, settings.log_format)


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
    lines.addFilter(FewWarnings())
    root.addHandler(lines)
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)


class FewWarnings(logging.Filter):
    """Lets ten equal warnings of a library pass, then one in ten seconds.

    Every client can cause some: uvicorn writes one for each request that is not HTTP.
    """

    def __init__(self) -> None:
        super().__init__()
        self._buckets: dict[tuple[str, str], Bucket] = {}
        self._dropped: Counter[tuple[str, str]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno > logging.WARNING or record.name == "py.warnings":
            return True
        now = time.monotonic()
        if len(self._buckets) >= _MOST_KINDS:
            self._buckets.clear()
            self._dropped.clear()
        kind = (record.name, str(record.msg))
        bucket = self._buckets.setdefault(kind, Bucket(*_EQUAL_WARNINGS, now))
        if bucket.wait_seconds(1, now):
            self._dropped[kind] += 1
            return False
        bucket.take(1, now)
        if dropped := self._dropped.pop(kind, 0):
            record.msg = f"{record.msg} ({dropped} more before)"
        return True


class _Lines(logging.StreamHandler[TextIO]):
    """Handles log records of libraries."""


def _renderers(form: LogFormat) -> list[Processor]:
    if form == "json":
        exception = structlog.processors.format_exc_info
        return [exception, shorten, structlog.processors.JSONRenderer(), strike]
    return text_processors(colors=sys.stderr.isatty() and "NO_COLOR" not in os.environ)
