"""Trace spans of rollouts; without a collector they do nothing.

A rollout is one trace: its task, each attempt of its agent, each model call, its scoring, and the
storing of its group. A part that runs in another asyncio task (a request of an agent) is given its
parent Span; within one task the current Span is found through a context variable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

Attributes = Mapping[str, Any]


class Span(Protocol):
    """A timed part of a trace."""

    @property
    def traceparent(self) -> str:
        """The W3C header that identifies the span to other servers; "" if nothing is traced."""

    @property
    def texts(self) -> bool:
        """Whether attributes may hold prompts and answers."""

    def child(self, name: str, attributes: Attributes, *, client: bool = False) -> _Opened:
        """Opens a child span for a block; an error that leaves the block marks it as failed.

        Args:
            attributes: must hold no secrets; prompts and answers only with `texts`.
            client: whether the span covers a request to another server.
        """

    def note(self, attributes: Attributes) -> None:
        """Adds attributes."""

    def past(self, name: str, attributes: Attributes, started_at: float, ended_at: float) -> None:
        """Adds a finished child; times are seconds since the epoch."""


_Opened = AbstractContextManager[Span]
Root = tuple[Attributes, Span]
"""A root span, and the attributes that it began with."""


class Tracer(Protocol):
    """The destination of traces."""

    def trace(self, name: str, attributes: Attributes) -> _Opened:
        """Opens a new trace with this root span for a block."""


class _NoSpan:
    traceparent = ""
    texts = False

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
_roots: ContextVar[list[Root] | None] = ContextVar("envserver_roots", default=None)


def current() -> Span:
    """Returns the current span of this task."""
    return _current.get()


@contextmanager
def within(opened: _Opened) -> Iterator[Span]:
    """Makes a span the current one for this task and the tasks that it starts."""
    with opened as span:
        token = _current.set(span)
        try:
            yield span
        finally:
            _current.reset(token)


@contextmanager
def root(tracer: Tracer, name: str, attributes: Attributes) -> Iterator[Span]:
    """Opens a new trace and makes its root the current span."""
    with within(tracer.trace(name, attributes)) as span:
        known = _roots.get()
        if span.traceparent and known is not None:
            known.append((attributes, span))
        yield span


@contextmanager
def gathered() -> Iterator[list[Root]]:
    """Collects the root spans begun in the block by this task and the tasks that it starts."""
    roots: list[Root] = []
    token = _roots.set(roots)
    try:
        yield roots
    finally:
        _roots.reset(token)
