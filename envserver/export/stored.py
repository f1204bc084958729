"""Reads delivered groups for offline work, one in memory at a time; nothing is leased or changed.

`StoredGroup.line` is what `process` writes for the group, wherever it came from. A foreign group in
Atropos's form has a rollout for each of its rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, get_type_hints

import msgspec
import numpy as np
from envserver_records.errors import Failure, InputError
from envserver_records.experts import Table, experts_from, experts_of_row, row_experts
from envserver_records.images import ImageSpan, RowImage, images_of_row
from envserver_records.packing import ready
from envserver_records.records import (
    Conversation,
    Group,
    Logprobs,
    Mask,
    Message,
    Score,
    Sequence,
    Tokens,
    Trajectory,
    Usage,
)
from envserver_records.tasks import RewardRange, Split, TurnReward, range_from_json
from envserver_records.timings import (
    EgressRequest,
    FailedAttempt,
    HookEvent,
    Printed,
    Timing,
    timing_from_json,
)

from ..formats.atropos import NOT_TRAINED
from .stored_sources import open_source

Json = dict[str, Any]
OnBad = Callable[[InputError], None]

_LARGEST_ID = 2**31 - 1


@dataclass(frozen=True, eq=False)
class StoredRow:
    """One training row of T tokens.

    Args:
        tokens: int32[T].
        mask: uint8[T], 1 where the token is trained.
        logprobs: float32[T], of the sampled token where the mask is 1, else 0.
        versions: runs of [policy version, start, end); -1 is context or unknown.
        images: those among the tokens, with their bytes.
        experts: those that its first tokens were routed to, if they were written; see `Row`.
    """

    tokens: Tokens
    mask: Mask
    logprobs: Logprobs
    agent: str | None
    flags: list[str]
    versions: list[list[int]]
    images: list[RowImage] = field(default_factory=list)
    experts: Table | None = None


class _Shared(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The fields that a rollout has in the same form in a line and when it is read."""

    rollout_id: str
    attempt: int = 0
    reward: float | None = None
    rewards: dict[str, float] = {}
    turn_rewards: list[TurnReward] = []
    logged_turn_rewards: list[TurnReward] = []
    agent_calls: dict[str, list[int]] = {}
    output: Any = None
    finish_reason: str | None = None
    truncated: bool = False
    limit: str | None = None
    turns: int = 0
    flags: list[str] = []
    tools: list[Json] = []
    actions: list[Json] | None = None
    others: list[Json] = []
    usage: Json = {}
    hooks: list[HookEvent] = []
    egress: list[EgressRequest] = []
    started_at: float = 0.0
    attempts: list[FailedAttempt] = []
    printed: list[Printed] = []
    follows: list[int | None] = []
    shares: list[float] = []


class StoredRollout(_Shared, frozen=True, kw_only=True, eq=False):
    """One rollout with its score. Fields as in `records.Result`, `Trajectory` and `Group`, and:

    Args:
        reward: None where unknown; rewards: by agent; turn_rewards: of single turns.
        logged_turn_rewards, agent_calls: `turn_rewards` and `calls` of Result.
        agent_metrics: logged by the agent; `metrics` are the score's.
        messages: empty, and actions: None, where they were not written.
        others: conversations of further agents that `messages` lacks.
        rows: empty where only text is known.
    """

    env: str
    task_id: str
    group_id: str
    index: int
    split: str
    seed: int
    model: str
    policy_version: int
    created_at: float
    reward_range: RewardRange
    components: dict[str, float]
    metrics: dict[str, float]
    agent_metrics: dict[str, float]
    messages: list[Message]
    timings: list[Timing]
    rows: list[StoredRow]

    @property
    def domain(self) -> str:
        """The environment's name as a domain: `my-env` is `my_env`."""
        return domain_of(self.env)

    @property
    def length(self) -> int:
        """Tokens of its longest row."""
        return max((len(row.tokens) for row in self.rows), default=0)

    @property
    def sampled(self) -> int:
        """Trained tokens of all rows."""
        return sum(int(np.count_nonzero(row.mask)) for row in self.rows)

    @property
    def failed(self) -> bool:
        """Whether it has no reward, or the lowest one (0 in most environments)."""
        return self.reward is None or self.reward_range.share(self.reward) <= 0


@dataclass(frozen=True, eq=False)
class StoredGroup:
    """One group.

    Args:
        line: the JSON of its line: the keys of Atropos, and "envserver".
        place: where it was read: "file.jsonl, line 7" or "group g-1 of http://...".
        failures: failures of missing or retried rollouts; lost: missing rollouts by kind.
        asked: number of rollouts started for it, 0: unknown.
    """

    line: Json
    place: str
    rollouts: list[StoredRollout]
    failures: list[Json]
    asked: int
    lost: dict[str, int]
    public: Json


def read_groups(
    sources: Iterable[str],
    on_bad: OnBad | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Iterator[StoredGroup]:
    """Yields the groups of `sources`, read on demand, without an unfinished last line.

    Args:
        on_bad: called for each line or body that is not a group, which is then skipped; unset: the
            first one ends the reading.
        on_bytes: called now and then with the number of further bytes read.

    Raises:
        NotFoundError: there is no such file, or no server answers.
        InputError: something is not a group; its place is named.
        ConfigError, StoreError: a store cannot be read.
    """
    for source in sources:
        for raw in open_source(source, on_bytes):
            try:
                yield group_of(raw.decoded(), raw.place)
            except InputError as error:
                if on_bad is None:
                    raise
                on_bad(error)


def group_of(line: Any, place: str) -> StoredGroup:
    try:
        facts = msgspec.convert(line, _Line)
        if facts.envserver is None:
            line = _adopted(line, facts, place)
            facts = msgspec.convert(line, _Line)
        assert facts.envserver is not None
        return _group(line, facts, facts.envserver, place)
    except (msgspec.ValidationError, ValueError, OverflowError) as error:
        raise InputError(
            f"{place} is not a group: {error}.",
            hint="Files of `envserver process` hold one group per line; --skip_bad skips this one.",
            place=place,
        ) from error


def domain_of(env: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "_", env.lower()).strip("_")
    return name if name[:1].isalpha() else f"env_{name}".rstrip("_")


def names_of_foreign(env_id: Any, group_id: Any, place: str) -> tuple[str, str]:
    """Returns environment and id of a group that only has Atropos's keys."""
    here = re.sub(r"[^A-Za-z0-9_.-]+", "-", place.rpartition("/")[2])
    return str(env_id or "atropos"), str(group_id or here)


class _Rollout(_Shared, frozen=True, kw_only=True, eq=False):
    rows: list[int]
    components: dict[str, float] | None = None
    metrics: dict[str, float] | None = None
    agent_metrics: dict[str, float] | None = None
    messages: list[Message] | None = None
    timings: list[Json] = []
    versions: list[list[list[int]]] = []
    agents: list[str | None] = []
    row_flags: list[list[str]] = []


class _Facts(msgspec.Struct):
    group_id: str
    env: str
    task_id: str
    rollouts: list[_Rollout]
    index: int = 0
    split: Split = "train"
    seed: int = 0
    model: str = ""
    policy_version: int = -1
    created_at: float = 0.0
    failures: list[Json] = []
    asked: int = 0
    lost: dict[str, int] = {}
    reward_range: dict[str, float | None] = {}
    public: Json = {}
    images: dict[str, bytes] = {}
    experts: Any = None


class _Line(msgspec.Struct):
    """Columns are kept as arrays, where their numbers are checked."""

    tokens: list[list[Any]]
    masks: list[list[Any]]
    scores: list[float]
    inference_logprobs: list[list[Any]] | None = None
    messages: list[list[Message]] | None = None
    images: Any = None
    envserver: _Facts | None = None


ready(_Line)


def _adopted(line: Json, facts: _Line, place: str) -> Json:
    """Adds a rollout for each row to a group that only has Atropos's keys."""
    name, group_id = names_of_foreign(line.get("env_id"), line.get("group_id"), place)
    rollouts = [
        {"rollout_id": f"{group_id}-{row}", "rows": [row], "reward": score, "turns": 1}
        for row, score in enumerate(facts.scores)
    ]
    columns = {key: value for key, value in line.items() if key != "group_id"}
    known = {"group_id": group_id, "env": name, "task_id": group_id, "split": "train", "seed": 0}
    return {**columns, "envserver": {**known, "index": 0, "rollouts": rollouts}}


def _group(line: Json, columns: _Line, facts: _Facts, place: str) -> StoredGroup:
    _check_columns(columns, facts)
    rollouts = [_stored(columns, facts, rollout) for rollout in facts.rollouts]
    lost, public = facts.lost, facts.public
    return StoredGroup(line, place, rollouts, facts.failures, facts.asked, lost, public)


def _check_columns(columns: _Line, facts: _Facts) -> None:
    number = len(columns.tokens)
    lists = (columns.masks, columns.scores, columns.inference_logprobs, columns.messages)
    if any(values is not None and len(values) != number for values in lists):
        raise ValueError("its lists differ in their rows")
    owned = [row for rollout in facts.rollouts for row in rollout.rows]
    if sorted(owned) != list(range(number)):
        raise ValueError(f"its rollouts' rows are not its {number} rows, each once")


def _conversation(columns: _Line, parsed: _Rollout) -> list[Message]:
    if parsed.messages is not None:
        return parsed.messages
    if not columns.messages or not parsed.rows:
        return []
    others = {other.get("agent") for other in parsed.others}
    rows = (
        row for row, agent in zip(parsed.rows, parsed.agents, strict=False) if agent not in others
    )
    return columns.messages[next(rows, parsed.rows[0])]


_OF_GROUP: Final = (
    *("env", "task_id", "group_id", "index", "split", "seed", "model", "policy_version"),
    "created_at",
)


def _stored(columns: _Line, facts: _Facts, parsed: _Rollout) -> StoredRollout:
    return StoredRollout(
        **{name: getattr(facts, name) for name in _OF_GROUP},
        **{name: getattr(parsed, name) for name in _Shared.__struct_fields__},
        reward_range=range_from_json(facts.reward_range),
        components=parsed.components or {},
        metrics=parsed.metrics or {},
        agent_metrics=parsed.agent_metrics or {},
        messages=_conversation(columns, parsed),
        timings=[timing_from_json(timing) for timing in parsed.timings],
        rows=[
            _row(columns, facts, row, parsed, number)
            for number, row in enumerate(parsed.rows)
            if columns.tokens[row]
        ],
    )


def _images(columns: _Line, facts: _Facts, row: int) -> list[RowImage]:
    """Returns the images of a row; none where only a foreign program knows their form."""
    if not facts.images or not columns.images:
        return []
    return images_of_row(columns.images, row, facts.images, len(columns.tokens[row]))


def _row(columns: _Line, facts: _Facts, row: int, parsed: _Rollout, number: int) -> StoredRow:
    tokens = _integers(columns.tokens[row], row, "tokens")
    masks = _integers(columns.masks[row], row, "masks")
    if len(masks) != len(tokens):
        raise ValueError(f"its row {row} has {len(tokens)} tokens and {len(masks)} masks")
    trained = masks != NOT_TRAINED
    logprobs = np.zeros(len(tokens), np.float32)
    if columns.inference_logprobs is not None:
        said = _numbers(columns.inference_logprobs[row], row)
        if len(said) != len(tokens):
            raise ValueError(f"its row {row} has {len(tokens)} tokens and {len(said)} logprobs")
        logprobs = np.where(trained, said, np.float32(0.0)).astype(np.float32)
    mask = trained.astype(np.uint8)
    return StoredRow(
        tokens=tokens.astype(np.int32),
        mask=mask,
        logprobs=logprobs,
        agent=parsed.agents[number] if number < len(parsed.agents) else None,
        flags=parsed.row_flags[number] if number < len(parsed.row_flags) else parsed.flags,
        versions=parsed.versions[number] if number < len(parsed.versions) else [],
        images=_images(columns, facts, row),
        experts=row_experts(experts_of_row(facts.experts, row), mask),
    )


def _integers(values: list[Any], row: int, name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    try:
        numbers = np.asarray(values)
    except (ValueError, OverflowError):
        numbers = np.empty(0, np.object_)
    if len(values) and (numbers.dtype.kind != "i" or numbers.ndim != 1):
        raise ValueError(f"the {name} of its row {row} are not whole numbers")
    if len(values) and (int(numbers.max()) > _LARGEST_ID or int(numbers.min()) < NOT_TRAINED):
        raise ValueError(f"the {name} of its row {row} hold values that are not token ids")
    return numbers.astype(np.int64)


def _numbers(values: list[Any], row: int) -> Logprobs:
    """Returns float32 values; a missing one (null) is 0."""
    try:
        return np.array([0.0 if value is None else value for value in values], np.float32)
    except (TypeError, ValueError):
        raise ValueError(f"the logprobs of its row {row} are not numbers") from None


# What a line lacks is empty: how tokens were sampled, and, in files of older versions, which call
# sampled each (-1).

_LEFT_OUT: Final = {"trajectories", "failures", "reward_range", "digest"}


def group_record(stored: StoredGroup) -> Group:
    line = stored.line["envserver"]
    facts = {key: line[key] for key in Group.__struct_fields__ if key in line}
    try:
        known = _converted(Group, facts, _LEFT_OUT)
        failures = msgspec.convert(stored.failures, list[Failure])
        rollouts = [
            trajectory_of(rollout, raw)
            for rollout, raw in zip(stored.rollouts, line["rollouts"], strict=True)
        ]
    except msgspec.ValidationError as error:
        raise InputError(f"{stored.place} is not a group: {error}.", place=stored.place) from error
    known = {"index": 0, "split": "train", **known}
    return Group(
        trajectories=rollouts,
        failures=failures,
        reward_range=range_from_json(line.get("reward_range") or {}),
        digest=str(line.get("group_digest") or ""),
        generation_params=stored.line.get("generation_params") or {},
        **known,
    )


_SAME: Final = set(Trajectory.__struct_fields__) & set(StoredRollout.__struct_fields__)


def trajectory_of(rollout: StoredRollout, raw: Mapping[str, Any] | None = None) -> Trajectory:
    known = {name: getattr(rollout, name) for name in _SAME} | {
        "sequences": [_sequence(number, row, rollout) for number, row in enumerate(rollout.rows)],
        "score": Score(
            reward=rollout.reward,
            components=rollout.components,
            metrics=rollout.metrics,
            rewards=rollout.rewards,
            turns=rollout.turn_rewards,
        ),
        "usage": msgspec.convert(rollout.usage, Usage, strict=False),
        "metrics": rollout.agent_metrics,
        "actions": rollout.actions or [],
        "others": msgspec.convert(rollout.others, list[Conversation]),
        "turn_rewards": rollout.logged_turn_rewards,
    }
    more = {key: raw[key] for key in Trajectory.__struct_fields__ if key in raw} if raw else {}
    return Trajectory(**known, **_converted(Trajectory, more, {*known, "calls", "service_calls"}))


def _converted(
    record: type[msgspec.Struct], values: Mapping[str, Any], but: set[str]
) -> dict[str, Any]:
    hints = get_type_hints(record)
    return {
        key: msgspec.convert(value, hints[key], strict=False)
        for key, value in values.items()
        if key not in but
    }


def _sequence(number: int, row: StoredRow, rollout: StoredRollout) -> Sequence:
    length = len(row.tokens)
    calls = np.full(length, -1, np.int32)
    for timing in rollout.timings:
        if timing.row == number and timing.call is not None:
            calls[timing.start : timing.end] = timing.call
    return Sequence(
        tokens=row.tokens,
        mask=row.mask,
        logprobs=row.logprobs,
        calls=calls,
        versions=_versions(row, length),
        path=[],
        agent=row.agent,
        flags=row.flags,
        images=[
            ImageSpan(image.sha256, image.offset, image.length, image.grid) for image in row.images
        ],
        experts=None if row.experts is None else experts_from(row.experts),
        follows=dict(enumerate(rollout.follows)).get(number),
        share=dict(enumerate(rollout.shares)).get(number, 1.0),
    )


def _versions(row: StoredRow, length: int) -> Tokens:
    """Returns the policy version of each token, from runs of [version, start, end)."""
    versions = np.full(length, -1, np.int32)
    for version, start, end in row.versions:
        versions[start:end] = version
    return versions
