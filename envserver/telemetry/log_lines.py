"""Renders log events as lines of text, without secrets, and safe for a terminal.

An event may quote what a model wrote: control characters are shown as escapes and long texts are
cut, so that one event is one line. Only tracebacks and messages of libraries have several.
"""

from __future__ import annotations

import io
from typing import Any, Final, TextIO

import structlog
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

from .redaction import printable, redacted

_LONGEST: Final = 16_384
"""Characters of one text in a line: an exception of a library may quote all that a model sent."""


def text_processors(*, colors: bool) -> list[Processor]:
    renderer = structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=_write_traceback)
    return [shorten, _escape, renderer, strike]


def shorten(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = _shortened(value)
    return event


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]} ... {len(text) - 2 * half} characters left out ... {text[-half:]}"


def strike(_: WrappedLogger, __: str, line: EventDict | str) -> Any:
    return redacted(str(line))


def _escape(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Escapes control characters; `logger` names the library that an event comes from."""
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[name] = _Quoted(value)
    text = event.get("event")
    if isinstance(text, _Quoted):
        of_library = "logger" in event
        shown = printable(text.value, keep="\n\t" if of_library else "")
        event["event"] = shown.replace("\n", "\n    ")
    return event


class _Quoted:
    def __init__(self, value: str) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


def _write_traceback(out: TextIO, error: ExcInfo) -> None:
    """Writes a plain traceback: the coloured one shows variables, prompts and keys among them."""
    text = io.StringIO()
    structlog.dev.plain_traceback(text, error)
    out.write(printable(_shortened(text.getvalue()), keep="\n\t"))
