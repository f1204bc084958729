"""Spans of a rollout's life, for whoever collects them; without a collector they do nothing.

A rollout is one trace: its task, each attempt of its agent, each model call, its scoring, and the
storing of its group. Where a part of it runs in a task of its own (a request of an agent), it is
given the Span that it belongs to; within one task the current Span is known by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

Attributes = Mapping[str, Any]


class Span(Protocol):
    """Something that takes time, as a part of a trace."""

    @property
    def traceparent(self) -> str:
        """The W3C header that names it to others; "" where nothing is traced."""

    def child(self, name: str, attributes: Attributes, *, client: bool = False) -> _Opened:
        """A span within this one, ended with the block; an error that leaves the block marks it.

        Args:
            attributes: neither prompts nor answers nor secrets.
            client: somebody else is asked.
        """

    def note(self, attributes: Attributes) -> None:
        """More of what is known of it."""

    def past(self, name: str, attributes: Attributes, started_at: float, ended_at: float) -> None:
        """A child that is over; seconds since the epoch."""


_Opened = AbstractContextManager[Span]


class Tracer(Protocol):
    """Where traces go."""

    def trace(self, name: str, attributes: Attributes) -> _Opened:
        """A new trace with this span as its root, open within the block."""


class _NoSpan:
    traceparent = ""

    def child(self, name: str, attributes: Attributes, *, client: bool = False) -> _Opened:
        return _NOTHING

    def note(self, attributes: Attributes) -> None:
        pass

    def past(self, name: str, attributes: Attributes, started_at: float, ended_at: float) -> None:
        pass


class _NoTracer:
    def trace(self, name: str, attributes: Attributes) -> _Opened:
        return _NOTHING


NO_SPAN: Span = _NoSpan()
NO_TRACER: Tracer = _NoTracer()
_NOTHING: _Opened = nullcontext(NO_SPAN)

_current: ContextVar[Span] = ContextVar("envserver_span", default=NO_SPAN)
_roots: ContextVar[list[Span] | None] = ContextVar("envserver_roots", default=None)


def current() -> Span:
    """The span within which the caller runs."""
    return _current.get()


@contextmanager
def within(opened: _Opened) -> Iterator[Span]:
    """Within: the span is the current one of this task, and of those that it starts."""
    with opened as span:
        token = _current.set(span)
        try:
            yield span
        finally:
            _current.reset(token)


@contextmanager
def root(tracer: Tracer, name: str, attributes: Attributes) -> Iterator[Span]:
    """Within: a new trace, whose root is the current span."""
    with within(tracer.trace(name, attributes)) as span:
        known = _roots.get()
        if span.traceparent and known is not None:
            known.append(span)
        yield span


@contextmanager
def gathered() -> Iterator[list[Span]]:
    """The roots that are begun within, by this task and those that it starts."""
    roots: list[Span] = []
    token = _roots.set(roots)
    try:
        yield roots
    finally:
        _roots.reset(token)
