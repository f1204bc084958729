"""Checks groups made on other machines, and refuses wrong ones with the place of the error.

In: the bytes of a posted group, and the stream it must belong to. Out: the group; a trainer can
rely on each of its rows as on one made in this process. CPU work: run it in a thread.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final, NoReturn

import msgspec
import numpy as np
import orjson
from envserver_records.errors import InputError
from envserver_records.records import Group, Sequence, Split, Trajectory, is_intact, unpack
from envserver_records.sampling import LEAST_LOGPROB, LOGPROB_ROUNDING

from ..rollouts.stream import again_prefix, group_id

_PLACE: Final = re.compile(r"`(\$[^`]*)`")
COLUMNS: Final = {
    "tokens": np.dtype(np.int32),
    "mask": np.dtype(np.uint8),
    "logprobs": np.dtype(np.float32),
    "calls": np.dtype(np.int32),
    "versions": np.dtype(np.int32),
}


class Stream(msgspec.Struct, frozen=True):
    """A stream of groups; the ids of its groups begin with `prefix`."""

    env: str
    split: Split
    seed: int
    prefix: str


def read_group(body: bytes, stream: Stream) -> Group:
    """Reads and checks the group in `body`."""
    group = decoded(body)
    check_group(group, stream)
    return group


def check_group(group: Group, stream: Stream) -> None:
    """Checks a group; raises InputError as `read_group` does."""
    check_names(group, stream)
    if not group.trajectories:
        _refuse("$.trajectories", "is empty")
    versions = []
    rollouts = set()
    for number, trajectory in enumerate(group.trajectories):
        place = f"$.trajectories[{number}]"
        if trajectory.rollout_id in rollouts:
            _refuse(f"{place}.rollout_id", "comes twice")
        rollouts.add(trajectory.rollout_id)
        versions += _check_trajectory(trajectory, group, place)
    if group.policy_version != min(versions, default=-1):
        _refuse("$.policy_version", "is not the lowest version that sampled a trained token")
    _check_words(group)


def decoded(body: bytes) -> Group:
    """Decodes a packed group. Raises InputError if `body` is not one, or not as it was sealed."""
    try:
        group: Group = unpack(body, Group)
    except msgspec.DecodeError as error:
        place = _PLACE.search(str(error))
        raise InputError(f"No packed group: {error}.", place=place[1] if place else "$") from None
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"Not a packed group: an array is malformed ({type(error).__name__}).", place="$"
        ) from None
    if group.digest and not is_intact(body):
        _refuse("$.digest", "is not that of the group: it was changed after it was made")
    return group


def check_names(group: Group, stream: Stream) -> None:
    """Raises InputError if the group is not of `stream`."""
    wanted = {"env": stream.env, "split": stream.split, "seed": stream.seed}
    for name, value in wanted.items():
        if getattr(group, name) != value:
            _refuse(f"$.{name}", f"is not {value!r}, as this environment registered")
    if not 0 <= group.index < 2**62:
        _refuse("$.index", "is not a position in a stream")
    own, again = (
        group_id(prefix, group.index, group.task_id)
        for prefix in (stream.prefix, again_prefix(stream.prefix))
    )
    if group.group_id not in (own, again):
        _refuse("$.group_id", "is not that of this position and task in the stream")
    if not math.isfinite(group.created_at):
        _refuse("$.created_at", "is not a time")


def _check_trajectory(trajectory: Trajectory, group: Group, place: str) -> list[int]:
    """Checks a trajectory and returns the lowest policy version that each row trains."""
    if trajectory.env != group.env or trajectory.task_id != group.task_id:
        _refuse(f"{place}.task_id", "is of another task or environment than its group")
    wrong = wrong_reward(trajectory, group)
    if wrong is not None:
        _refuse(f"{place}.score.{wrong}", "is not in the group's reward_range")
    if not trajectory.sequences:
        _refuse(f"{place}.sequences", "is empty: no token of it was recorded")
    for number, row in enumerate(trajectory.sequences):
        _check_row(row, f"{place}.sequences[{number}]")
    trained = [row.versions[row.mask == 1] for row in trajectory.sequences]
    return [int(versions.min()) for versions in trained if versions.size]


def wrong_reward(trajectory: Trajectory, group: Group) -> str | None:
    """Returns the place in its score of a reward that cannot be, or None."""
    score, bounds = trajectory.score, group.reward_range
    if not bounds.low < bounds.high or not bounds.low <= bounds.solved_at <= bounds.high:
        return "reward"
    if score.reward is None or not bounds.holds(score.reward):
        return "reward"
    for name, reward in score.rewards.items():
        if not bounds.holds(reward):
            return f"rewards[{name!r}]"
    for number, turn in enumerate(score.turns):
        if not math.isfinite(turn.value):
            return f"turns[{number}]"
    return None


def wrong_span(row: Sequence) -> int | None:
    """Returns the number of a sampling span that cannot be, or None."""
    end = 0
    for number, span in enumerate(row.sampling):
        fits = end <= span.start < span.end <= len(row.tokens)
        if not fits or not 0 <= span.temperature < math.inf:
            return number
        end = span.end
    return None


def _check_row(row: Sequence, place: str) -> None:
    length = len(row.tokens)
    for name, dtype in COLUMNS.items():
        column = getattr(row, name)
        if column.dtype != dtype:
            _refuse(f"{place}.{name}", f"is an array of {column.dtype}, not of {dtype}")
        if len(column) != length:
            _refuse(f"{place}.{name}", f"has {len(column)} entries for {length} tokens")
    if not length:
        _refuse(f"{place}.tokens", "is empty")
    if not row.path:
        _refuse(f"{place}.path", "is empty")
    wrong_at = wrong_span(row)
    if wrong_at is not None:
        _refuse(f"{place}.sampling[{wrong_at}]", "is not a span of the row, or overlaps another")
    trained = row.mask == 1
    logprobs = row.logprobs[trained]
    wrong = {
        "tokens": np.any(row.tokens < 0),
        "mask": np.any(row.mask > 1) or not np.any(trained),
        # Written so that NaN fails, too.
        "logprobs": np.any(row.logprobs[~trained] != 0)
        or not np.all((logprobs <= LOGPROB_ROUNDING) & (logprobs >= LEAST_LOGPROB)),
        "calls": np.any(row.calls[trained] < 0) or not np.all(np.isin(row.calls, [-1, *row.path])),
        "versions": np.any(row.versions < -1) or np.any(row.versions[row.calls < 0] != -1),
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            _refuse(f"{place}.{name}", "holds what cannot be")


def _check_words(group: Group) -> None:
    """Checks that all free-form values can be encoded as JSON."""
    checked: dict[str, Any] = {"trajectories": [], "failures": [], "reward_range": None}
    bare = msgspec.structs.asdict(group) | checked
    parts = [("$", bare)] + [
        (f"$.trajectories[{number}]", _words(one)) for number, one in enumerate(group.trajectories)
    ]
    for place, value in parts:
        try:
            orjson.dumps(value, default=_no_record)
        except (TypeError, orjson.JSONEncodeError, RecursionError) as error:
            _refuse(place, f"holds what is not JSON ({error})")


def _words(trajectory: Trajectory) -> dict[str, Any]:
    facts = msgspec.structs.asdict(trajectory) | {"sequences": [], "calls": []}
    return facts | {name: msgspec.to_builtins(facts[name]) for name in _STRUCTS}


_STRUCTS: Final = ("score", "usage", "others", "turn_rewards", "service_calls", "hooks", "egress")


def _no_record(value: object) -> NoReturn:
    raise TypeError(f"{type(value).__name__}")


def _refuse(place: str, what: str) -> NoReturn:
    raise InputError(f"The group is refused: {place} {what}.", place=place)
