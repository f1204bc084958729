"""Answers a client's retry with the first request's answer; tells side calls of programs apart.

A client that lost an answer sends the same request again. If it says so (`Idempotency-Key`, or
`x-stainless-retry-count` as the official SDKs send it), it joins the first request's call, running
or done. So does an equal request without a mark whose predecessor's answer was lost, or that
a coding program (`body.is_program`) sends right after an answer that it could use: one that
was empty, cut off or malformed is sampled again. A true stream is not repeated but sampled again.
Other equal requests are new samples: that is what an agent wants that asks twice.
"""

from __future__ import annotations

from collections import deque
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from envserver_records.errors import ConflictError
from envserver_records.records import Call

from .asgi import Scope, header, header_number
from .body import is_program
from .dialects.base import ModelRequest

if TYPE_CHECKING:
    from .call_task import CallTask

_REMEMBERED = 64


def digest_of(path: str, agent: str | None, body: bytes) -> bytes:
    """Returns the first half of the SHA-256 digest of a request's path, agent and body."""
    digest = sha256()
    for part in (path.encode(), (agent or "").encode()):
        digest.update(b"%d:" % len(part) + part)
    digest.update(body)
    return digest.digest()[:16]


class RetryMarks:
    """The headers and the digest by which a retry is recognised."""

    def __init__(self, scope: Scope, digest: bytes) -> None:
        self.digest = digest
        self.key = header(scope, b"idempotency-key")
        self.is_retry = header_number(header(scope, b"x-stainless-retry-count")) > 0
        self.of_program = is_program(scope)


class Retries:
    def __init__(self) -> None:
        self._latest: deque[tuple[RetryMarks, CallTask]] = deque(maxlen=_REMEMBERED)

    def find(self, marks: RetryMarks) -> CallTask | None:
        """Returns the call that this request repeats, or None if it is new.

        A key identifies the call. Without one, the call of several equal ones whose answer was lost
        counts.
        """
        if not (marks.key or marks.is_retry):
            return self._unmarked(marks)
        known = [(known, call_task) for known, call_task in self._latest if known.key == marks.key]
        same = [call_task for known, call_task in known if known.digest == marks.digest]
        if marks.key and len(same) < len(known):
            raise ConflictError("This Idempotency-Key was used before with another request.")
        return next((each for each in same if each.is_lost), same[-1] if same else None)

    def _unmarked(self, marks: RetryMarks) -> CallTask | None:
        same = [call_task for known, call_task in self._latest if known.digest == marks.digest]
        lost = next((each for each in same if each.is_lost), None)
        if lost is not None or not (same and marks.of_program):
            return lost
        latest = self._latest[-1][1]
        is_again = latest is same[-1] and not latest.is_waited_for
        return latest if is_again and latest.is_usable else None

    def begin(self, marks: RetryMarks, call_task: CallTask) -> None:
        self._latest.append((marks, call_task))

    def forget(self, call_task: CallTask) -> None:
        """Forgets a call without an answer to repeat: a retry is a new request."""
        self._latest = deque(
            (pair for pair in self._latest if pair[1] is not call_task), _REMEMBERED
        )

    def clear(self) -> None:
        self._latest.clear()


# A program's requests without tools, beside a conversation that has tools, are no part of what the
# task asks for. They are recorded for the agent "side" and not trained. Since a title may be asked
# for before the conversation begins, it is decided when the first request with tools has come.

SIDE = "side"
"""The agent that side calls are recorded for; it is not trained."""


def may_be_side(request: ModelRequest, *, of_program: bool) -> bool:
    """Returns whether `request` is a side call if its agent's conversation has tools.

    Any other agent than a coding program may ask without tools on purpose: only a title, by its
    JSON schema, is taken for one.
    """
    return not request.tools and (of_program or _is_title(request.fields.get("response_format")))


def _is_title(form: Any) -> bool:
    schema = ((form or {}).get("json_schema") or {}).get("schema") or {}
    properties = schema.get("properties")
    return isinstance(properties, dict) and properties.keys() == {"title"}


class SideCalls:
    def __init__(self) -> None:
        self._with_tools: set[str | None] = set()
        self._undecided: dict[str | None, list[Call]] = {}

    def asked(self, agent: str | None, request: ModelRequest) -> list[Call]:
        """Registers a request of `agent`; returns the recorded calls that it makes side calls."""
        if not request.tools:
            return []
        self._with_tools.add(agent)
        return self._decided(agent)

    def recorded(self, agent: str | None, calls: list[Call]) -> list[Call]:
        """Registers calls of `agent` that may be side calls; returns those that are."""
        self._undecided.setdefault(agent, []).extend(calls)
        return self._decided(agent) if agent in self._with_tools else []

    def _decided(self, agent: str | None) -> list[Call]:
        calls = self._undecided.pop(agent, [])
        for call in calls:
            call.agent, call.trained = SIDE, False
        return calls
