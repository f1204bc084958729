"""Small records of how a rollout went: times, failures, output, hooks, requests outside.

All are bounded: `MOST_TIMINGS`, `MOST_ATTEMPTS` and `MOST_PRINTED` limit what one rollout keeps.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from .errors import Blame
from .tasks import Json

MOST_TIMINGS: Final = 2000
"""Maximum number of timings of a rollout. Engine calls are kept first, then what began first."""
MOST_ATTEMPTS: Final = 20
"""Maximum number of failed attempts of a rollout, the latest ones."""
MOST_PRINTED: Final = 4096
"""Maximum characters that a rollout printed, the latest ones."""

TimingKind = Literal["engine", "tool", "sandbox", "scoring"]
Stream = Literal["stdout", "stderr", "log"]


class Timing(msgspec.Struct, frozen=True, kw_only=True, array_like=True, omit_defaults=True):
    """One thing that a rollout waited for. Seconds are wall clock, `started` since its start.

    Args:
        kind: a call of the model, a tool, a program in a sandbox (or its opening), or scoring.
        name: of the model, the tool, or the program.
        agent: the calling agent; None if there is only one.
        first: seconds to the first chunk of a streamed answer.
        call: number of the model call, see `Call.index`.
        row, start, end: where the call's tokens are: [start, end) of this row; None: in none.
    """

    kind: TimingKind
    started: float
    seconds: float
    name: str = ""
    agent: str | None = None
    first: float | None = None
    call: int | None = None
    row: int | None = None
    start: int | None = None
    end: int | None = None


class FailedAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt of a rollout that failed. `turns`, `tokens`: its calls, and what they sampled;
    `messages`: its main agent's conversation, if calls are kept."""

    attempt: int
    kind: str
    blame: Blame
    message: str
    seconds: float
    turns: int = 0
    tokens: int = 0
    messages: list[Json] = []


class Printed(msgspec.Struct, frozen=True, array_like=True):
    """A line that an agent printed or logged, `time` seconds after the rollout's start."""

    time: float
    stream: Stream
    text: str


def timing_as_json(timing: Timing) -> Json:
    """Returns a timing as an object, in which `start` and `end` are called `from` and `to`."""
    found = {name: getattr(timing, name) for name in Timing.__struct_fields__}
    found["from"], found["to"] = found.pop("start"), found.pop("end")
    return found


def compact_timing(timing: Timing) -> Json:
    """Returns the object of `timing_as_json` without what is unknown."""
    return {name: value for name, value in timing_as_json(timing).items() if value is not None}


def timing_from_json(given: Json) -> Timing:
    """Returns the timing of `timing_as_json` or `compact_timing`."""
    values = {**given, "start": given.get("from"), "end": given.get("to")}
    return msgspec.convert([values.get(name) for name in Timing.__struct_fields__], Timing)


class HookEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A change or refusal of a model call by an environment's hook.

    Args:
        at: the hook: of the request, or of the answer.
        reason: as the environment gave it.
        changed: names of what was changed (messages, tools, prompt, answer); empty: it refused.
        agent: name of the calling agent, None if there is only one.
        call: index of the call, None if none was made.
    """

    at: Literal["request", "answer"]
    reason: str
    changed: list[str] = []
    agent: str | None = None
    call: int | None = None


EgressEnd = Literal[
    "",
    "host",
    "port",
    "address",
    "name",
    "unknown_host",
    "unreachable",
    "requests",
    "bytes",
    "time",
    "cut",
]
"""Why it was refused or cut off; "": it was not.

host, port: not on the environment's list. address: the name leads to a private address.
name: a tunnel that does not begin with TLS for this very host.
unknown_host, unreachable: no such name, or no connection. requests, bytes, time: a bound. cut: the
rollout ended first, or a side broke the connection off.
"""


class EgressRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request of an agent to a host outside, as the egress proxy recorded it.

    Args:
        method: "CONNECT" for a tunnel, whose contents are not seen.
        path: of plain HTTP, without its query, which may hold keys.
        status: of the host's answer; 0: none, or not seen.
        sent_bytes, received_bytes: to and from the host.
    """

    method: str
    host: str
    port: int
    path: str = ""
    status: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    end: EgressEnd = ""
