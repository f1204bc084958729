"""The endpoint that agents talk to.

In flow requests under the unguessable key of one attempt, out flow answers in the agent's own
dialect, and beside them the Calls: the only source of training tokens. What always holds: a call
is recorded before the last byte of its answer leaves; an attempt never gets more turns, tokens or
time than its limits; nothing is recorded after an attempt is sealed; no answer holds the engine's
key, the hidden part of a task, or a field that only we asked the engine for.

    server       who may ask, which route answers
    attempts     one attempt: its limits, its calls
    request      one agent's request, to the last byte; retries: joined to work that is done
    work         the exchange behind it; gate: pauses while weights change
    dialects/    the APIs that agents speak -> ask -> body, what the engine is sent
    source       the engine and how it is asked (ways); asking/: by tokens, completions or chat
    exchange     what it answered, its form checked (shape), streamed (streaming)
    recording    that -> Calls
    sandboxing   what workers ask of their sandboxes
    worker       what workers post; guest: others' environments, unrecorded
"""

from __future__ import annotations

from .attempts import AttemptSpec, Limits, ProxyAttempt
from .server import Proxy

__all__ = ["ProxyAttempt", "AttemptSpec", "Limits", "Proxy"]
