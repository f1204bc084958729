"""Runs a command's coroutine on uvloop; SIGTERM ends it like Ctrl-C, with full clean-up.

`SignalStop` stops a run instead: the first signal lets its open groups end, the second ends it at
once, and the third kills this process and all that it started; so does `CLOSING_SECONDS` after the
end of a stop that does not complete (a stopped process, an engine, a database).
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import io
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Protocol, TextIO, TypeVar, cast

import structlog
import uvloop
from structlog.typing import Processor

from ..running.stopping import Stop, Stoppable
from ..settings.config import LogFormat
from ..telemetry.log_lines import shorten, strike, text_processors
from ..telemetry.redaction import Bucket, counted

T = TypeVar("T")

_THRESHOLDS = 2_000, 5, 200
"""Allocations before the youngest objects are looked through (an answer of 64 tokens with logprobs
makes some hundred), and how often before the next generations are."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_BUSY_SECONDS = 0.02
"""CPU time that a process takes at least between two trims."""


class Terminated(KeyboardInterrupt):
    status = 128 + signal.SIGTERM


def run_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    spare_collector()
    trim_regularly()
    terminated: list[bool] = []
    try:
        return uvloop.run(_terminable(coroutine, lambda: terminated.append(True)))
    except asyncio.CancelledError as error:
        if terminated:
            raise Terminated from None
        raise RuntimeError("The command was cancelled, though no signal ended it.") from error


def spare_collector() -> None:
    """Tunes the garbage collector, which otherwise takes a fifth of the time of a call and pauses.

    Objects that exist now live as long as the process. Reference counting frees nearly all objects
    of a call, but only after they exceed Python's default threshold. The two young generations stay
    small (2,000 and 10,000 objects), since a pause is as long as what is looked through: with
    20,000 and 200,000 it stopped a loop with 1,000 rollouts in flight for 200 and 400 ms.
    """
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


def trim_regularly() -> None:
    """Lets glibc keep freed buffers for the next call, and give back all its free pages each second
    (mallopt(3), malloc_trim(3); it takes 16 ms at 1.1 GB).

    To map each large buffer anew takes a quarter of the CPU of a call of 200,000 tokens. Without
    the trim, what conversations add lies between buffers that were freed: such a rollout held 14 MB
    instead of 8.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim"):  # other C libraries have none
        return
    library.mallopt(_M_TRIM_THRESHOLD, 2**28)
    library.mallopt(_M_MMAP_THRESHOLD, 2**25)

    def trim() -> None:
        used = 0.0
        while True:
            time.sleep(1.0)
            if time.process_time() - used > _BUSY_SECONDS:
                library.malloc_trim(0)
                used = time.process_time()

    threading.Thread(target=trim, name="trim", daemon=True).start()


async def _terminable(coroutine: Coroutine[Any, Any, T], on_sigterm: Callable[[], None]) -> T:
    task = asyncio.ensure_future(coroutine)

    def end() -> None:
        on_sigterm()
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
    return await task


@asynccontextmanager
async def meanwhile(name: str, work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs `work` while the block runs; its error is raised at the end of the block."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


CLOSING_SECONDS = 15.0


SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def on_signals(do: Callable[[], object]) -> None:
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, do)


def stopped() -> asyncio.Event:
    """Returns an event that a signal sets from now on."""
    stop = asyncio.Event()
    on_signals(stop.set)
    return stop


def off_signals() -> None:
    for number in SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(number)


class SignalStop(Stop):
    """Stops a run on SIGINT or SIGTERM; `drain_seconds`: then open groups are cancelled."""

    def __init__(self, say: Callable[[str], object], *, drain_seconds: float | None = None) -> None:
        super().__init__()
        self.say = say
        self._drain_seconds = drain_seconds

    def attach(
        self, scheduler: Stoppable, drain: Callable[[], None], cancel: Callable[[], object]
    ) -> None:
        super().attach(scheduler, drain, cancel)
        on_signals(self._on_signal)

    def _on_signal(self) -> None:
        if self.cancelled:
            self._kill()
        elif self.requested:
            self.say("Stopping at once; a third signal kills what does not end.")
            self.at_once()
            self._kill_after(CLOSING_SECONDS)
        else:
            self.say(
                f"Finishing {counted(self.open_groups, 'open group')}; a second signal "
                "stops at once."
            )
            self.finish()
            if self._drain_seconds is not None:
                self._kill_after(self._drain_seconds + CLOSING_SECONDS)

    def _kill_after(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._kill)
        timer.daemon = True  # the event loop may be what does not answer
        timer.start()

    def _kill(self) -> None:
        from ..workers.linux import descendants, kill  # `run-api` has no programs to kill

        self.say("Killed the processes that had not ended.")
        for pid in descendants():
            kill(pid)
        os._exit(1)


_EQUAL_WARNINGS: Final = (0.1, 10.0)
"""Rate a second, and burst."""
_MOST_KINDS: Final = 256


class CurrentStderr(io.TextIOBase):
    """Writes to the current `sys.stderr`: a progress bar replaces it while it is shown."""

    def write(self, text: str, /) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


class LogSettings(Protocol):
    @property
    def log_level(self) -> str: ...

    @property
    def log_format(self) -> LogFormat: ...


def show_logs(settings: LogSettings) -> None:
    configure_logs(settings.log_level, settings.log_format)


def configure_logs(level: str, form: LogFormat = "auto") -> None:
    """Shows events of at least `level` ("debug" ... "error"); for libraries, at least warnings.
    `form`: auto is console."""
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
    for handler in [known for known in root.handlers if isinstance(known, _Lines)]:
        root.removeHandler(handler)
    lines = _Lines(stderr)
    lines.setFormatter(formatter)
    lines.addFilter(FewWarnings())
    root.addHandler(lines)
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)


class FewWarnings(logging.Filter):
    """Lets ten equal warnings of a library pass, then one in ten seconds.
    Every client can cause some: uvicorn writes one for each request that is not HTTP."""

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


class _Lines(logging.StreamHandler[TextIO]): ...


def _renderers(form: LogFormat) -> list[Processor]:
    if form == "json":
        exception = structlog.processors.format_exc_info
        return [exception, shorten, structlog.processors.JSONRenderer(), strike]
    return text_processors(colors=sys.stderr.isatty() and "NO_COLOR" not in os.environ)
