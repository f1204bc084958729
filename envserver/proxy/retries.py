"""Retries of clients: the same answer again instead of a second sample.

A client that lost an answer sends the same request again. Where it says so (`Idempotency-Key`, or
`x-stainless-retry-count` as the official SDKs send it) it is joined to the first request's work, in
flight or done. Equal requests that are not marked are new samples: that is what an agent wants
that asks twice.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Generic, TypeVar

from ..errors import ConflictError
from .asgi import Scope, header

Work = TypeVar("Work")

_REMEMBERED = 64


def digest_of(path: str, agent: str | None, body: bytes) -> bytes:
    """BLAKE2b-128 of a request: where it went, who sent it, what it said."""
    digest = blake2b(digest_size=16)
    for part in (path.encode(), (agent or "").encode()):
        digest.update(b"%d:" % len(part) + part)
    digest.update(body)
    return digest.digest()


class Marks:
    """What a request says of being a retry."""

    def __init__(self, scope: Scope, digest: bytes) -> None:
        self.digest = digest
        self.key = header(scope, b"idempotency-key")
        count = header(scope, b"x-stainless-retry-count")
        self.is_retry = count.isdecimal() and int(count) > 0


class Retries(Generic[Work]):
    """The latest requests of one attempt, by what they said and by their key."""

    def __init__(self) -> None:
        self._by_digest: OrderedDict[bytes, Work] = OrderedDict()
        self._by_key: OrderedDict[str, tuple[bytes, Work]] = OrderedDict()

    def find(self, marks: Marks) -> Work | None:
        """The work that this request asks for again, None if it is a new one.

        Raises:
            ConflictError: its key came before with another request.
        """
        if marks.key:
            digest, work = self._by_key.get(marks.key, (b"", None))
            if work is not None and digest != marks.digest:
                raise ConflictError("This Idempotency-Key came before with another request.")
            if work is not None or not marks.is_retry:
                return work
        return self._by_digest.get(marks.digest) if marks.is_retry else None

    def begin(self, marks: Marks, work: Work) -> None:
        """`work` is done for this request."""
        self._by_digest[marks.digest] = work
        self._by_digest.move_to_end(marks.digest)
        if marks.key:
            self._by_key[marks.key] = (marks.digest, work)
        for remembered in (self._by_digest, self._by_key):
            while len(remembered) > _REMEMBERED:
                remembered.popitem(last=False)

    def forget(self, work: Work) -> None:
        """`work` came to nothing: a retry is a new request."""
        for digest in [d for d, known in self._by_digest.items() if known is work]:
            del self._by_digest[digest]
        for key in [k for k, (_, known) in self._by_key.items() if known is work]:
            del self._by_key[key]
