"""Retries of clients: the same answer again instead of a second sample.

A client that lost an answer sends the same request again. Where it says so (`Idempotency-Key`, or
`x-stainless-retry-count` as the official SDKs send it) it is joined to the first request's work, in
flight or done; a true stream is not told twice, and is sampled anew. Equal requests that are not
marked are new samples: that is what an agent wants that asks twice.
"""

from __future__ import annotations

from collections import deque
from hashlib import blake2b
from typing import Generic, Protocol, TypeVar

from envserver_records.errors import ConflictError

from .asgi import Scope, header

_REMEMBERED = 64


class Answering(Protocol):
    """What is done for a request."""

    @property
    def is_lost(self) -> bool:
        """Nobody waits for its answer, and nobody got it."""


TaskT = TypeVar("TaskT", bound=Answering)


def digest_of(path: str, agent: str | None, body: bytes) -> bytes:
    """BLAKE2b-128 of a request: where it went, who sent it, what it said."""
    digest = blake2b(digest_size=16)
    for part in (path.encode(), (agent or "").encode()):
        digest.update(b"%d:" % len(part) + part)
    digest.update(body)
    return digest.digest()


class RetryMarks:
    """What a request says of being a retry."""

    def __init__(self, scope: Scope, digest: bytes) -> None:
        self.digest = digest
        self.key = header(scope, b"idempotency-key")
        count = header(scope, b"x-stainless-retry-count")
        self.is_retry = count.isdecimal() and int(count) > 0


class Retries(Generic[TaskT]):
    """The latest requests of one attempt."""

    def __init__(self) -> None:
        self._latest: deque[tuple[RetryMarks, TaskT]] = deque(maxlen=_REMEMBERED)

    def find(self, marks: RetryMarks) -> TaskT | None:
        """The work that this request asks for again, None if it is a new one.

        A key names it. Without one, where an agent asked the same several times, it is the work
        whose answer was lost.

        Raises:
            ConflictError: its key came before with another request.
        """
        if not (marks.key or marks.is_retry):
            return None
        known = [(known, call_task) for known, call_task in self._latest if known.key == marks.key]
        same = [call_task for known, call_task in known if known.digest == marks.digest]
        if marks.key and len(same) < len(known):
            raise ConflictError("This Idempotency-Key came before with another request.")
        return next(
            (call_task for call_task in same if call_task.is_lost), same[-1] if same else None
        )

    def begin(self, marks: RetryMarks, call_task: TaskT) -> None:
        """`work` is done for this request."""
        self._latest.append((marks, call_task))

    def forget(self, call_task: TaskT) -> None:
        """`work` came to nothing that could be given again: a retry is a new request."""
        self._latest = deque(
            (pair for pair in self._latest if pair[1] is not call_task), _REMEMBERED
        )

    def clear(self) -> None:
        """Forgets all."""
        self._latest.clear()
