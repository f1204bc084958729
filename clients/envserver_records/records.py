"""The data that flows through the server, in the order in which it is made.

Task -> (rollout) -> Call* -> Sequence* -> Trajectory -> Group: msgspec structs. Token data are
numpy arrays; what a worker needs has none and is in modules of its own, so that its process does
without numpy. `pack` and `unpack` (`packing`) convert to MessagePack and back.

Digests show that a group was changed, removed or moved. A packed group ends with the digest of all
bytes before it. A line of JSONL ends with `chain`: the digest of the line before it, and its own,
which covers its bytes and that of the line before. A digest is not a signature: a program that
rewrites a whole file can make new ones.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from .costs import Cost, JudgeUsage
from .errors import Failure
from .experts import RoutedExperts
from .images import ImageSpan
from .packing import pack as pack
from .packing import ready
from .packing import unpack as unpack
from .sampling import LogprobsKind, SamplingSpan
from .sandboxes import ExecResult as ExecResult
from .sandboxes import KilledBy as KilledBy
from .sandboxes import SandboxLimits as SandboxLimits
from .sandboxes import SandboxSpec as SandboxSpec
from .sandboxes import SandboxUsage as SandboxUsage
from .tasks import UNIT_RANGE, RewardRange, TurnReward
from .tasks import Json as Json
from .tasks import Message as Message
from .tasks import PublicTask as PublicTask
from .tasks import Result as Result
from .tasks import Score as Score
from .tasks import Split as Split
from .tasks import Task as Task
from .tasks import text_of as text_of
from .timings import EgressRequest, FailedAttempt, HookEvent, Printed, Timing

Tokens = NDArray[np.int32]
Mask = NDArray[np.uint8]
Logprobs = NDArray[np.float32]

Dialect = Literal["chat", "completions", "responses", "messages"]
"""An agent's API: OpenAI's chat, text completions or responses, or Anthropic's messages."""
Delivered = Literal["full", "none"]
Edge = Literal["root", "exact", "appended", "whitespace", "calls", "think_kept", "lossy_detok"]
"""How the prompt of a call continues an earlier one; root: it was rendered from scratch."""


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Policy `version` (-1: unknown) sampled the tokens [start, end) of a completion."""

    version: int
    start: int
    end: int


class Call(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One exchange with the model, as recorded by the proxy.

    Args:
        index: order of commit within the attempt, from 0.
        model: the requested model name.
        agent: name of the calling agent, None if there is only one.
        trained: whether that agent is trained.
        choice: index among `n` answers; each choice is a separate Call.
        prompt_ids: int32[P], as the engine echoed them (or as they were sent, if it accepts ids
            without echoing them); empty if unknown.
        completion_ids: int32[C], with the end-of-turn token if it was sampled.
        logprobs: float32[C], as the engine returned them.
        versions: partition of [0, C).
        exact: ids and logprobs are complete; only exact calls become training tokens.
        message: the assistant message as returned to the agent.
        sampled_message: that of the engine, if the agent got another; None: the same.
        messages, tools: the agent's request in OpenAI's chat format, whatever the dialect, as the
            engine got it.
        sampling: the sampling fields that were sent to the engine.
        logprobs_kind: whether the logprobs are from before the temperature (raw) or after it.
        stop_reason: the stop string or stop token id that ended it, None for the ordinary end.
        eot_sampled: the last id is a token that ends the model's turn.
        delivered: whether the agent received the whole answer.
        replayed: the recorded answer was sent again to a retry of the same request.
        body_digest: 16 bytes that identify the agent's request body.
        planned_parent: index of the call whose tokens the prompt continues, None: none.
        edge: how it continues that call.
        refusal: why the prompt was rendered from scratch although an earlier call matched, or None.
        served_model: the model name in the engine's answer.
        told_tokens: the engine's counts of prompt and completion tokens, if it returns no ids.
        started_at: `time.time()`; `seconds` from there to the commit, `seconds_to_first` to the
            first chunk of a stream.
        flags: see `tokens.flags`.
        hooks: what hooks of the environment did to it.
        images: those of the prompt, in order; empty if it has none, or if it is unknown where they
            are.
        experts: from `experts.start` on to the last token but one; None: not asked for, or unknown.
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
    tools: list[Json] = []
    sampling: Json = {}
    logprobs_kind: LogprobsKind = "unknown"
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
    flags: list[str] = []
    sampled_message: Message | None = None
    hooks: list[HookEvent] = []
    images: list[ImageSpan] = []
    experts: RoutedExperts | None = None

    @property
    def engine_message(self) -> Message:
        return self.message if self.sampled_message is None else self.sampled_message


class TracedCall(msgspec.Struct, frozen=True, array_like=True):
    """A call in a trace (`tokens.trace`) without what earlier calls already contain.

    Args:
        tokens_of: position in the trace of an earlier call, -1: none.
        kept_tokens: the prompt begins with this many tokens of that call's prompt and completion.
        messages_of: the same for messages.
        kept_messages: the messages begin with this many of that call's messages and its answer.
        tools_of: position of an earlier call with the same tools, -1: `new` has them.
        new: the rest of the call.
    """

    tokens_of: int
    kept_tokens: int
    messages_of: int
    kept_messages: int
    tools_of: int
    new: Call


class ServiceCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An agent's request to a service, and its answer (None if `refused` says why not)."""

    name: str
    arguments: Json
    answer: Any = None
    refused: str = ""


class Sequence(msgspec.Struct, kw_only=True):
    """One training row. All arrays have length T.

    Args:
        tokens: int32[T], the tokens that the model saw and sampled, in order.
        mask: uint8[T], 1 where the policy sampled the token and it is first trained here.
        logprobs: float32[T], the sampled token's logprob where mask is 1, else 0.
        calls: int32[T], index of the call that sampled the token, -1 for context.
        versions: int32[T], policy version that sampled the token, -1 for context or unknown.
        path: indices of the calls along this branch, root first.
        agent: see Call.
        flags: union over the path, and `mixed_versions` if several versions sampled it.
        sampling: how the trained tokens were sampled; empty in rows of older versions.
        images: those among the tokens, in order; their bytes are in `Group.images`.
        experts: of its first tokens, at least of all before the last trained one; None: unknown.
        follows: position in its trajectory of the row that it follows, because the agent started a
            new conversation with a summary (compaction); None: of none.
        share: part of its agent's advantage that it gets; 0: it is not trained. See
            `tasks.CompactionRewards`.
    """

    tokens: Tokens
    mask: Mask
    logprobs: Logprobs
    calls: Tokens
    versions: Tokens
    path: list[int]
    agent: str | None = None
    flags: list[str] = []
    sampling: list[SamplingSpan] = []
    images: list[ImageSpan] = []
    experts: RoutedExperts | None = None
    follows: int | None = None
    share: float = 1.0


class Usage(msgspec.Struct, kw_only=True):
    """Resources of one rollout. Seconds are wall clock.

    `sandbox`: resources of the agent's programs in sandboxes, None without sandboxes.
    `ended_by`: "agent" (by itself), or the limit that was reached, see `Result`.
    `worker_cpu_seconds`, `worker_peak_memory_mb`: those of the agent's process and its finished
    children, None if it shared the process with other rollouts. MB are 2**20 bytes.
    `scoring_seconds`, `judge`: of its score and of its share of `score_group`; `judge` is None
    without a judge. `cost`: None without known prices.
    """

    seconds: float = 0.0
    model_seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    sandbox: SandboxUsage | None = None
    ended_by: str = "agent"
    worker_cpu_seconds: float | None = None
    worker_peak_memory_mb: float | None = None
    scoring_seconds: float = 0.0
    judge: JudgeUsage | None = None
    cost: Cost | None = None


class Conversation(msgspec.Struct, kw_only=True):
    """The last conversation of one of several agents of a rollout.

    Args:
        model: the requested model name.
        turns, completion_tokens: this agent's.
        messages, tools: in OpenAI's chat format, with the last answer.
    """

    agent: str | None
    trained: bool
    model: str
    messages: list[Message]
    tools: list[Json]
    turns: int
    completion_tokens: int


class Trajectory(msgspec.Struct, kw_only=True):
    """A finished and scored rollout; fields as in Result.

    `sequences` are those of trained agents. `others` are the conversations of all agents except
    that of `messages` and `tools`. `calls` and `service_calls`: see `tokens.keep_calls`.
    `turn_rewards` (also in `score`) and `agent_calls`: see Result; for scoring it again. `hooks`:
    what hooks of the environment changed and refused. `egress`: requests to hosts outside.
    `started_at`: `time.time()` at the start of this attempt (0: unknown); `timings`: what it waited
    for, in order of start; `attempts`: the ones that failed before; `printed`: its last lines.
    `images`: the bytes of those in its rows, until they move to its group.
    """

    rollout_id: str
    attempt: int
    task_id: str
    env: str
    sequences: list[Sequence]
    messages: list[Message]
    tools: list[Json]
    output: Any
    score: Score
    finish_reason: str | None
    truncated: bool
    limit: str | None
    turns: int
    usage: Usage
    flags: list[str] = []
    metrics: dict[str, float] = {}
    calls: list[TracedCall] = []
    actions: list[Json] = []
    others: list[Conversation] = []
    service_calls: list[ServiceCall] = []
    turn_rewards: list[TurnReward] = []
    agent_calls: dict[str, list[int]] = {}
    hooks: list[HookEvent] = []
    egress: list[EgressRequest] = []
    started_at: float = 0.0
    timings: list[Timing] = []
    attempts: list[FailedAttempt] = []
    printed: list[Printed] = []
    images: dict[str, bytes] = {}

    def messages_of(self, agent: str | None) -> list[Message]:
        return next(
            (sibling.messages for sibling in self.others if sibling.agent == agent), self.messages
        )


class Group(msgspec.Struct, kw_only=True):
    """Trajectories of one task whose rewards are compared with each other; the unit of delivery.

    Args:
        group_id: stable: the same task index of the same run has the same id, so that a group that
            is produced or posted twice is stored once.
        index: position in the run's stream of tasks, from 0.
        policy_version: the lowest version that sampled any of its tokens (-1: unknown).
        model: name of the model as the engine serves it.
        failures: failures of the rollouts that are missing or were retried.
        asked: number of rollouts that were started (0 in groups of older versions).
        lost: missing rollouts by the kind of the last failure ("straggler", "stale": cancelled).
        missing: the failed attempts of each missing rollout, by its number.
        generation_params: the sampling settings of all rollouts.
        rendering: how prompts were made: the engine's server and mode, whether calls were continued
            by tokens (or why not), the think policy, digests of template and tokenizer.
        services: what the environment's services report about what they showed (`Services.shown`).
        env_config: the environment's settings, if calls are kept.
        reward_range: the rewards that the environment can give.
        component_weights: the environment's weights of the scores' components.
        public: the task's public part; large values are left out, see `bounded_public`.
        provenance: what it was made with: environment, code, settings, engine, sampling, policy
            versions (see `envserver.rollouts.provenance`); {} in groups of older versions.
        images: the bytes of all images in its rows, by their SHA-256 in hex: each is here once.
        digest: of everything above (see `seals`); "" in groups of older versions. The last field,
            so that it ends the packed group.
    """

    group_id: str
    index: int
    env: str
    task_id: str
    split: Split
    trajectories: list[Trajectory]
    model: str = ""
    policy_version: int = -1
    generation_params: Json = {}
    rendering: Json = {}
    failures: list[Failure] = []
    created_at: float = 0.0
    seed: int = 0
    services: Json = {}
    asked: int = 0
    lost: dict[str, int] = {}
    env_config: Json = {}
    reward_range: RewardRange = UNIT_RANGE
    component_weights: dict[str, float] = {}
    public: Json = {}
    missing: dict[str, list[FailedAttempt]] = {}
    provenance: Json = {}
    images: dict[str, bytes] = {}
    digest: str = ""


ready(Group)


_HEX: Final = 64
_CHAIN: Final = b',"chain":{"previous":"%b","digest":"%b"}}\n'
_END: Final = re.compile(
    rb',"chain":\{"previous":"([0-9a-f]{64}|)","digest":"([0-9a-f]{64})"\}\}\n?\Z'
)
_LONGEST_END: Final = 256


def digest_of(*parts: bytes | memoryview) -> str:
    """Returns the BLAKE2b-256 digest of `parts` in hex."""
    digest = hashlib.blake2b(digest_size=_HEX // 2)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def sealed(group: Group) -> Group:
    body = pack(msgspec.structs.replace(group, digest="0" * _HEX))
    return msgspec.structs.replace(group, digest=digest_of(body[:-_HEX]))


def is_intact(body: bytes | memoryview) -> bool:
    """Returns whether a packed group that has a digest is as it was sealed."""
    view = memoryview(body)  # a slice of bytes is a copy
    return digest_of(view[:-_HEX]).encode() == view[-_HEX:]


class Link(NamedTuple):
    """A line's place in the chain of its file: digest of the line before ("": none), its own.

    `intact`: whether the line still has its digest.
    """

    previous: str
    digest: str
    intact: bool


def chained(line: bytes, previous: str) -> bytes:
    """Returns `line` (a JSON object and a newline) with its link; `previous`: see
    `digest_after`."""
    body = line.removesuffix(b"\n").removesuffix(b"}")
    said = previous.encode()
    return body + _CHAIN % (said, digest_of(said, body).encode())


def link_of(line: bytes) -> Link | None:
    """Returns the link at the end of `line`; None if it has none."""
    found = _END.search(line, max(0, len(line) - _LONGEST_END))
    if found is None:
        return None
    previous, digest = found[1], found[2].decode()
    intact = digest_of(previous, line[: found.start()]) == digest
    return Link(previous.decode(), digest, intact)


def digest_after(line: bytes) -> str:
    """Returns the `previous` of the line after `line`, whether or not it has a link itself."""
    link = link_of(line)
    return link.digest if link is not None else digest_of(line.removesuffix(b"\n"))
