"""The data that flows through the server, in the order in which it comes to be.

Task -> (rollout) -> Call* -> Sequence* -> Trajectory -> Group: msgspec structs. Token data are
numpy arrays throughout. `pack`/`unpack`: MessagePack and back, arrays as raw little-endian bytes.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from .errors import Failure

T = TypeVar("T")

Split = Literal["train", "validation", "test"]
Message = dict[str, Any]
"""One chat message in OpenAI's shape."""

Tokens = NDArray[np.int32]
Mask = NDArray[np.uint8]
Logprobs = NDArray[np.float32]


def text_of(message: Message) -> str:
    """The text of a message, whatever the form of its content."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


class PublicTask(msgspec.Struct, frozen=True):
    """The part of a task that the worker gets. `public` holds what running the rollout needs."""

    id: str
    public: dict[str, Any]


class Task(msgspec.Struct, frozen=True):
    """One thing to solve.

    Args:
        id: unique and stable within its environment and split.
        public: JSON-like; goes to the worker (the model sees only what the agent puts before it).
        hidden: JSON-like; only the server and the scorer ever hold it (answers, tests).
    """

    id: str
    public: dict[str, Any]
    hidden: dict[str, Any] = msgspec.field(default_factory=dict)

    def without_hidden(self) -> PublicTask:
        """The part that may leave the server process."""
        return PublicTask(self.id, self.public)


class Score(msgspec.Struct, kw_only=True):
    """What a scorer says of one rollout.

    Args:
        reward: in [0, 1]; None means not scorable: dropped, never trained on.
        components: named parts of the reward, for people.
        metrics: anything else worth averaging (numbers).
        error: set when scoring failed by our fault; then `reward` is ignored and the rollout is
            retried, then dropped.
    """

    reward: float | None
    components: dict[str, float] = msgspec.field(default_factory=dict)
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    error: str | None = None


class Result(msgspec.Struct, kw_only=True):
    """What the scorer sees of one finished rollout.

    Args:
        output: what the environment's `rollout` returned (JSON-like).
        messages: the conversation as the agent sent it last, plus the model's last answer.
        finish_reason: of the last call ("length" means cut off), None without a call.
        truncated: the model was cut off: its last call ended by length, or tokens, time or the
            context were used up (where turns were, its last answer is whole), or by "crash".
        limit: which limit ended the rollout: "turns", "tokens", "time", "context", "crash" (code of
            the model ended the process of its agent) or None.
        turns: model calls made.
        completion_tokens: tokens sampled over all calls.
        metrics: numbers the agent logged with `run.log_metric`.
        flags: words that services of the server put on the rollout (`Caller.flag`).
        actions: steps the agent logged with `run.log_action`, each {"step", "tool", "input",
            "output", "ts"} with `step` from 1 and `ts` in seconds. For readers: no reward may hang
            on them.

    Turns, tokens, messages and ends are those of the trained agents, where there are any.
    """

    output: Any = None
    messages: list[Message] = msgspec.field(default_factory=list)
    finish_reason: str | None = None
    truncated: bool = False
    limit: str | None = None
    turns: int = 0
    completion_tokens: int = 0
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    flags: list[str] = msgspec.field(default_factory=list)
    actions: list[dict[str, Any]] = msgspec.field(default_factory=list)


Dialect = Literal["chat", "completions", "responses", "messages"]
"""The API in which an agent asks: OpenAI's chat, text completions or responses, or Anthropic's."""
Delivered = Literal["full", "none"]
Edge = Literal["root", "exact", "appended", "whitespace", "calls", "think_kept", "lossy_detok"]
"""How the prompt of a call continues an earlier one; root: it was rendered anew."""


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of a completion were sampled by policy `version` (-1: unknown)."""

    version: int
    start: int
    end: int


class Call(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One exchange with the model, as recorded by the proxy.

    Args:
        index: order of commit within the attempt, from 0.
        model: the name that was asked for.
        agent: name of the agent of the rollout that called, None for the only one.
        trained: whether that agent is.
        choice: which of `n` answers; each choice is its own Call.
        prompt_ids: int32[P], as the engine echoed them (or as it was sent them, where it echoes
            none but takes ids); empty when they are not known.
        completion_ids: int32[C], with the end-of-turn token where it was sampled.
        logprobs: float32[C], as the engine returned them.
        versions: partition of [0, C).
        exact: ids and logprobs are all there; only exact calls become training tokens.
        message: the assistant message as returned to the agent.
        messages, tools: what the agent sent, in OpenAI's chat shape whatever the dialect.
        sampling: the sampling fields that were sent to the engine.
        stop_reason: the stop string or stop token id that ended it, None for the ordinary end.
        eot_sampled: the last id is a token that ends the model's turn.
        delivered: whether the agent has the whole answer; a part of it counts as none.
        replayed: an answer that had been recorded was given again to a retry of the same request.
        body_digest: BLAKE2b-128 of the agent's request body.
        planned_parent: index of the call whose tokens the prompt was continued from, None for none.
        edge: how it continues that one.
        refusal: why the prompt was rendered anew although an earlier call matched, None where none
            did.
        served_model: the model as named in the engine's answer.
        told_tokens: of prompt and completion, as the engine counts them, where it gives no ids.
        started_at: `time.time()`; `seconds` from there to the commit, `seconds_to_first` to the
            first chunk of a stream.
        flags: see `tokens.flags`.
    """

    index: int
    model: str
    prompt_ids: Tokens
    completion_ids: Tokens
    logprobs: Logprobs
    versions: list[VersionSpan]
    exact: bool
    finish_reason: str
    message: Message
    messages: list[Message]
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    sampling: dict[str, Any] = msgspec.field(default_factory=dict)
    agent: str | None = None
    trained: bool = True
    choice: int = 0
    stop_reason: int | str | None = None
    eot_sampled: bool = False
    dialect: Dialect = "chat"
    streamed: bool = False
    delivered: Delivered = "full"
    replayed: bool = False
    body_digest: bytes = b""
    planned_parent: int | None = None
    edge: Edge = "root"
    refusal: str | None = None
    served_model: str = ""
    told_tokens: tuple[int, int] = (0, 0)
    started_at: float = 0.0
    seconds: float = 0.0
    seconds_to_first: float | None = None
    flags: list[str] = msgspec.field(default_factory=list)


class TracedCall(msgspec.Struct, frozen=True, array_like=True):
    """A call in a trace (`tokens.trace`): what is new in it, so it grows as what was said does.

    Args:
        tokens_of: position in the trace of an earlier call, -1 for none.
        kept_tokens: the prompt begins with as many tokens of that call's prompt and completion.
        messages_of: likewise.
        kept_messages: the messages begin with as many of that call's messages and its answer.
        tools_of: position of an earlier call that had the same tools, -1: they are its own.
        new: the call without what is kept.
    """

    tokens_of: int
    kept_tokens: int
    messages_of: int
    kept_messages: int
    tools_of: int
    new: Call


class ServiceCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an agent asked a service, and its answer (None where `refused` says why)."""

    name: str
    arguments: dict[str, Any]
    answer: Any = None
    refused: str = ""


class Sequence(msgspec.Struct, kw_only=True):
    """One training row. All arrays have length T.

    Args:
        tokens: int32[T], what the model saw and sampled, in order.
        mask: uint8[T], 1 where the token was sampled by the policy and is first trained here.
        logprobs: float32[T], the sampled token's logprob where mask is 1, else 0.
        calls: int32[T], index of the call that sampled the token, -1 for context.
        versions: int32[T], policy version that sampled the token, -1 for context or unknown.
        path: indices of the calls along this branch, root first.
        agent: see Call.
        flags: union over the path; `mixed_versions` too where its trained tokens are of several.
    """

    tokens: Tokens
    mask: Mask
    logprobs: Logprobs
    calls: Tokens
    versions: Tokens
    path: list[int]
    agent: str | None = None
    flags: list[str] = msgspec.field(default_factory=list)


KilledBy = Literal[
    "", "wall", "cpu", "memory", "disk", "inodes", "processes", "output", "cancelled", "lost"
]
"""What ended a program in a sandbox: a limit, the caller ("cancelled"), a failure of ours ("lost"),
or "": it ended by itself (or was ended by a signal of its own doing)."""


class SandboxLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one program in a sandbox may use; disk and inodes are of the sandbox as a whole.

    MB are 2**20 bytes, KB 2**10. `output_kb` holds for stdout and stderr each: more is cut off (and
    marked), and past eight times as much the program is killed.
    """

    wall_seconds: float = 10.0
    cpu_seconds: float = 10.0
    memory_mb: int = 512
    disk_mb: int = 64
    inodes: int = 4096
    processes: int = 32
    open_files: int = 256
    output_kb: int = 64
    input_kb: int = 1024


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox to be made: an empty `/work` with `files`, a read-only system, no network.

    Args:
        files: by path below /work; parents are made.
        archive: a tar file that is unpacked into /work first.
        env: the programs' environment variables beside PATH, HOME, LANG and TMPDIR.
        preload: modules that are imported before the walls are closed, shared by all sandboxes with
            the same list: `run_python` has them at no cost. Only trusted code may name any.
        limits: of every program, unless `exec` is told otherwise (never more than these).
        image: of a container, for the backend `docker` ("": `--sandbox.docker_image`); other walls
            refuse it with SandboxUnavailable.
        image_hides: directories of the image that are empty in this sandbox.
    """

    files: dict[str, bytes] = msgspec.field(default_factory=dict)
    archive: bytes | None = None
    env: dict[str, str] = msgspec.field(default_factory=dict)
    preload: tuple[str, ...] = ()
    limits: SandboxLimits = SandboxLimits()
    image: str = ""
    image_hides: tuple[str, ...] = ()


class SandboxUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What programs in a sandbox used; of several (`Sandbox.total`): sums, and the highest peaks.

    Args:
        cpu_exact: whether programs could not hide CPU time from the count.
        memory_exact: whether the peak is the kernel's own, or sampled.
        executions: programs run.
        killed: how often each KilledBy but "" ended one.
    """

    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    cpu_exact: bool = False
    peak_memory_mb: float = 0.0
    memory_exact: bool = False
    read_bytes: int = 0
    written_bytes: int = 0
    output_bytes: int = 0
    disk_mb: float = 0.0
    peak_processes: int = 0
    executions: int = 1
    killed: dict[str, int] = msgspec.field(default_factory=dict)


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """How one program in a sandbox ended.

    Args:
        exit: its exit status, None where a signal ended it.
        signal: the number of the signal that ended it.
        killed_by: see KilledBy; where it is not "", exit and signal say nothing about the program.
        truncated: stdout or stderr were longer than they stand here.
    """

    exit: int | None
    signal: int | None = None
    killed_by: KilledBy = ""
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    usage: SandboxUsage = SandboxUsage()

    @property
    def ok(self) -> bool:
        """It ended by itself with status 0."""
        return self.exit == 0 and not self.killed_by


class Usage(msgspec.Struct, kw_only=True):
    """Resources of one rollout. Seconds are wall clock.

    `sandbox`: what the programs used that its agent ran in sandboxes, None where it had none.
    `ended_by`: "agent" (by itself), or the limit that was reached, see `Result`.
    `worker_cpu_seconds`, `worker_peak_memory_mb`: of the agent's own process and all that it waited
    for, None where it shared one with others. MB are 2**20 bytes.
    """

    seconds: float = 0.0
    model_seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    sandbox: SandboxUsage | None = None
    ended_by: str = "agent"
    worker_cpu_seconds: float | None = None
    worker_peak_memory_mb: float | None = None


class Conversation(msgspec.Struct, kw_only=True):
    """What one of several agents of a rollout and its model said, as it stood last.

    Args:
        model: the name that was asked for; turns, completion_tokens: of this agent.
        messages, tools: in OpenAI's chat shape, with the last answer.
    """

    agent: str | None
    trained: bool
    model: str
    messages: list[Message]
    tools: list[dict[str, Any]]
    turns: int
    completion_tokens: int


class Trajectory(msgspec.Struct, kw_only=True):
    """A finished and scored rollout. `metrics` are what the agent logged; fields as in Result.

    `sequences` are of trained agents alone. `others`: the conversations of all agents but the one
    whose `messages` and `tools` these are, also of those that are not trained. `calls` and
    `service_calls` are all that was recorded, where that is kept (`tokens.keep_calls`).
    """

    rollout_id: str
    attempt: int
    task_id: str
    env: str
    sequences: list[Sequence]
    messages: list[Message]
    tools: list[dict[str, Any]]
    output: Any
    score: Score
    finish_reason: str | None
    truncated: bool
    limit: str | None
    turns: int
    usage: Usage
    flags: list[str] = msgspec.field(default_factory=list)
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    calls: list[TracedCall] = msgspec.field(default_factory=list)
    actions: list[dict[str, Any]] = msgspec.field(default_factory=list)
    others: list[Conversation] = msgspec.field(default_factory=list)
    service_calls: list[ServiceCall] = msgspec.field(default_factory=list)


class Group(msgspec.Struct, kw_only=True):
    """The trajectories of one task that are compared with each other; the unit of delivery.

    Args:
        group_id: stable: the same task index of the same run gives the same id, so that a group
            that is produced or posted twice is stored once.
        index: position in the run's stream of tasks, from 0.
        policy_version: the lowest version that sampled any of its tokens (-1: unknown).
        model: name of the model as the engine serves it.
        failures: of the rollouts that are missing or were retried.
        asked: rollouts that were begun for it (0: it was made before that was noted).
        lost: those of them that are missing, by the kind of their last failure ("straggler" and
            "stale" are those that were cancelled).
        generation_params: the sampling settings that all rollouts shared.
        rendering: how their prompts came to be: the engine's server and mode, whether calls were
            continued by tokens (or why not), the think policy, digests of template and tokenizer.
        services: what its environment's services say of what they showed it (`Services.shown`).
        env_config: the environment's settings, where calls are kept.
    """

    group_id: str
    index: int
    env: str
    task_id: str
    split: Split
    trajectories: list[Trajectory]
    model: str = ""
    policy_version: int = -1
    generation_params: dict[str, Any] = msgspec.field(default_factory=dict)
    rendering: dict[str, Any] = msgspec.field(default_factory=dict)
    failures: list[Failure] = msgspec.field(default_factory=list)
    created_at: float = 0.0
    seed: int = 0
    services: dict[str, Any] = msgspec.field(default_factory=dict)
    asked: int = 0
    lost: dict[str, int] = msgspec.field(default_factory=dict)
    env_config: dict[str, Any] = msgspec.field(default_factory=dict)


_CODES = {"i4": 1, "f4": 2, "u1": 3}
"""Numbers of the MessagePack extension types, by which arrays come out as views."""
_DTYPES = {1: np.int32, 2: np.float32, 3: np.uint8}


def _encode_array(value: object) -> object:
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        code = array.dtype.str[1:]
        if code not in _CODES or array.dtype.byteorder == ">":
            raise TypeError(f"arrays of {array.dtype} do not travel; use int32, float32 or uint8")
        raw = array.data.cast("B") if array.size else b""
        return msgspec.msgpack.Ext(_CODES[code], raw)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no record")


def _decode_array(code: int, raw: memoryview) -> Any:
    if code not in _DTYPES:
        raise msgspec.DecodeError(f"there is no array of type {code}")
    try:
        return np.frombuffer(raw, dtype=_DTYPES[code])
    except ValueError as error:
        raise msgspec.DecodeError(f"an array is cut off: {error}") from error


def _decode_hook(kind: type, value: Any) -> Any:
    if getattr(kind, "__origin__", kind) is not np.ndarray:
        raise TypeError(f"no decoder for {kind}")
    if isinstance(value, np.ndarray):
        return value
    code, raw = value  # as arrays were packed before they were extensions
    return _decode_array(_CODES.get(code, 0), raw)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def pack(record: Any) -> bytes:
    """`record` (a struct of this module, or a list of them) as MessagePack."""
    return _encoder.encode(record)


def unpack(data: bytes | memoryview, kind: type[T]) -> T:
    """The inverse of `pack`. Arrays are read-only views of `data`.

    Raises:
        msgspec.DecodeError: `data` is no `kind`.
    """
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_hook, ext_hook=_decode_array)
