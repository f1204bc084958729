"""Checks groups made on other machines, and refuses wrong ones with the place of the error. CPU
work: long posts are read in a thread.

All groups of a post are checked together, which costs small ones much less; where a group is wrong,
each is checked by itself."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from operator import attrgetter
from typing import Final, NamedTuple, NoReturn

import msgspec
import numpy as np
import orjson
from envserver_records.errors import InputError, TooLargeError
from envserver_records.records import Group, Tokens, Trajectory, is_intact, unpack
from envserver_records.records import Sequence as Row
from envserver_records.sampling import LEAST_LOGPROB, LOGPROB_ROUNDING
from numpy.typing import NDArray

from ..rollouts.stream import again_prefix, group_id
from ..store import packed
from ..store.demand import put_of
from ..store.groups import EncodedPut, encode_puts
from .messages import MOST_GROUPS
from .runner import Stream

_PLACE: Final = re.compile(r"`(\$[^`]*)`")
COLUMNS: Final = {
    "tokens": np.dtype(np.int32),
    "mask": np.dtype(np.uint8),
    "logprobs": np.dtype(np.float32),
    "calls": np.dtype(np.int32),
    "versions": np.dtype(np.int32),
}
_columns_of: Final = attrgetter(*COLUMNS)
_LAST_VERSION: Final = np.iinfo(np.int32).max


def decoded(body: bytes) -> Group:
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


def check_groups(groups: Sequence[Group], stream: Stream) -> None:
    """Raises InputError with a place in the first wrong group."""
    rows: list[Row] = []
    begins: list[int] = []
    prefix = stream.prefix
    for group in groups:
        _check_names(group, stream, prefix)
        begins.append(len(rows))
        for number, trajectory in enumerate(group.trajectories):
            _check_trajectory(trajectory, group, f"$.trajectories[{number}]")
            rows += trajectory.sequences
        _check_json(group)
    if rows:
        _check_columns(rows, begins, groups)


def _check_names(group: Group, stream: Stream, prefix: str) -> None:
    wanted = {"env": stream.env, "split": stream.split, "seed": stream.seed}
    for name, value in wanted.items():
        if getattr(group, name) != value:
            _refuse(f"$.{name}", f"is not {value!r}, as this environment registered")
    if not 0 <= group.index < 2**62:
        _refuse("$.index", "is not a position in a stream")
    own, again = (
        group_id(start, group.index, group.task_id) for start in (prefix, again_prefix(prefix))
    )
    if group.group_id not in (own, again):
        _refuse("$.group_id", "is not that of this position and task in the stream")
    if not math.isfinite(group.created_at):
        _refuse("$.created_at", "is not a time")
    if not group.trajectories:
        _refuse("$.trajectories", "is empty")
    names = [trajectory.rollout_id for trajectory in group.trajectories]
    if len(set(names)) < len(names):
        twice = next(number for number, name in enumerate(names) if name in names[:number])
        _refuse(f"$.trajectories[{twice}].rollout_id", "comes twice")


def _check_trajectory(trajectory: Trajectory, group: Group, place: str) -> None:
    if trajectory.env != group.env or trajectory.task_id != group.task_id:
        _refuse(f"{place}.task_id", "is of another task or environment than its group")
    score, bounds = trajectory.score, group.reward_range
    is_range = bounds.low < bounds.high and bounds.low <= bounds.solved_at <= bounds.high
    wrong = []
    if not is_range or score.reward is None or not bounds.holds(score.reward):
        wrong.append("reward")
    elif score.rewards or score.turns:
        wrong += [f"rewards[{name!r}]" for name, r in score.rewards.items() if not bounds.holds(r)]
        wrong += [f"turns[{n}]" for n, t in enumerate(score.turns) if not math.isfinite(t.value)]
    if wrong:
        _refuse(f"{place}.score.{wrong[0]}", "is not in the group's reward_range")
    if not trajectory.sequences:
        _refuse(f"{place}.sequences", "is empty: no token of it was recorded")
    for number, row in enumerate(trajectory.sequences):
        _check_row(row, len(trajectory.sequences), f"{place}.sequences[{number}]")


def _check_json(group: Group) -> None:
    """Checks all values whose types do not already guarantee valid JSON."""
    values: list[list[object]] = [[group.generation_params, group.rendering, group.services]]
    for trajectory in group.trajectories:
        others = msgspec.to_builtins(trajectory.others) if trajectory.others else None
        values.append(
            [trajectory.messages, trajectory.tools, trajectory.output, trajectory.actions, others]
        )
    for number, value in enumerate(values, -1):
        try:
            orjson.dumps(value)
        except (TypeError, orjson.JSONEncodeError, RecursionError) as error:
            place = "$" if number < 0 else f"$.trajectories[{number}]"
            _refuse(place, f"holds what is not JSON ({error})")


def _check_row(row: Row, rows: int, place: str) -> None:
    length = row.tokens.size
    for (name, dtype), column in zip(COLUMNS.items(), _columns_of(row), strict=True):
        if column.dtype != dtype:
            _refuse(f"{place}.{name}", f"is an array of {column.dtype}, not of {dtype}")
        if column.size != length:
            _refuse(f"{place}.{name}", f"has {column.size} entries for {length} tokens")
    if not length:
        _refuse(f"{place}.tokens", "is empty")
    if not row.path:
        _refuse(f"{place}.path", "is empty")
    if not 0 <= row.share <= 1:
        _refuse(f"{place}.share", "is not from 0 to 1")
    if not 0 <= (row.follows or 0) < rows:
        _refuse(f"{place}.follows", "is not the number of a row")
    end = 0
    for number, span in enumerate(row.sampling):
        fits = end <= span.start < span.end <= length
        if not fits or not 0 <= span.temperature < math.inf:
            place = f"{place}.sampling[{number}]"
            _refuse(place, "is not a span of the row, or overlaps another")
        end = span.end


def _check_columns(rows: Sequence[Row], begins: Sequence[int], groups: Sequence[Group]) -> None:
    """Checks the values of all rows together. `begins`: index of the first row of each group.

    Calls of numpy are what a small group costs here: `min` and `max` are Python around a ufunc's
    `reduce`, which is called itself."""
    starts = np.array([0, *accumulate(row.tokens.size for row in rows[:-1])])
    tokens, mask, logprobs, calls, versions = map(
        np.concatenate, zip(*map(_columns_of, rows), strict=True)
    )
    trained, uncalled = mask == 1, calls < 0
    # Written so that NaN fails, too.
    can_be = (logprobs <= LOGPROB_ROUNDING) & (logprobs >= LEAST_LOGPROB)
    wrong = {
        "tokens": (tokens < 0).nonzero()[0],
        "mask": starts[np.maximum.reduceat(mask, starts) != 1],
        "logprobs": (~can_be | ((logprobs != 0) & ~trained)).nonzero()[0],
        "calls": (uncalled & trained).nonzero()[0].tolist() or _off_path(calls, starts, rows),
        "versions": ((versions < -1) | (uncalled & (versions != -1))).nonzero()[0],
    }
    for name, positions in wrong.items():
        if len(positions):
            row = np.searchsorted(starts, positions[0], "right") - 1
            _refuse(f"{_places(groups)[row]}.{name}", "holds what cannot be")
    sampled = np.where(trained, versions, _LAST_VERSION)
    lowest = np.minimum.reduceat(sampled, starts[list(begins)]).tolist()
    if lowest != [group.policy_version for group in groups]:
        _refuse("$.policy_version", "is not the lowest version that sampled a trained token")


def _off_path(calls: Tokens, starts: NDArray[np.int64], rows: Sequence[Row]) -> list[int]:
    """Returns where calls begin that are not on their row's path: of runs of equal calls, of which
    there are few, the first."""
    is_first = np.empty(len(calls), bool)
    np.not_equal(calls[1:], calls[:-1], out=is_first[1:])
    is_first[starts] = True
    firsts = is_first.nonzero()[0]
    of_row = np.searchsorted(starts, firsts, "right") - 1
    allowed = [{-1, *row.path} for row in rows]
    return [
        first
        for first, row, call in zip(
            firsts.tolist(), of_row.tolist(), calls[firsts].tolist(), strict=True
        )
        if call not in allowed[row]
    ]


def _places(groups: Sequence[Group]) -> list[str]:
    return [
        f"$.trajectories[{number}].sequences[{row}]"
        for group in groups
        for number, trajectory in enumerate(group.trajectories)
        for row in range(len(trajectory.sequences))
    ]


def _refuse(place: str, what: str) -> NoReturn:
    raise InputError(f"The group is refused: {place} {what}.", place=place)


ReadGroup = EncodedPut | InputError

_LIST: Final = msgspec.msgpack.Decoder(list[bytes])
_INLINE_BYTES: Final = 64 * 1024
"""Posts smaller than this are read on the event loop, which is faster than switching threads."""
_TOGETHER_BYTES: Final = 512 * 1024


async def read_post(
    post: bytes, stream: Stream, most_bytes: int, *, is_list: bool = True
) -> list[ReadGroup]:
    """Reads a group, or a list of some; what is large, also when decompressed, in a thread."""
    if len(post) < _INLINE_BYTES:
        with suppress(TooLargeError):
            return read_groups(post, stream, min(most_bytes, 2 * _INLINE_BYTES), is_list=is_list)
    return await asyncio.to_thread(read_groups, post, stream, most_bytes, is_list=is_list)


def read_groups(
    post: bytes, stream: Stream, most_bytes: int, *, is_list: bool = True
) -> list[ReadGroup]:
    try:
        parts = _LIST.decode(post) if is_list else [post]
    except msgspec.DecodeError as error:
        raise InputError(f"No list of packed groups: {error}.", place="$") from None
    if len(parts) > MOST_GROUPS:
        raise TooLargeError(f"A request has at most {MOST_GROUPS} groups.", most_groups=MOST_GROUPS)
    read: list[ReadGroup] = []
    together: list[_Posted] = []
    size = 0
    for part in parts:
        posted = _posted(part, most_bytes)
        together.append(posted)
        most_bytes -= len(posted.body)
        size += len(posted.body)
        if size > _TOGETHER_BYTES:  # more would not fit the processor's caches
            read += _checked(together, stream)
            together, size = [], 0
    return read + _checked(together, stream)


class _Posted(NamedTuple):
    """A posted group with its packed `body`. `frame`: as written to disk; None: not made yet."""

    group: Group | InputError
    body: bytes
    frame: bytes | None


def _posted(part: bytes, most_bytes: int) -> _Posted:
    body, frame = part, None
    try:
        if packed.is_frame(part):
            body = packed.inflate_frame(part, most_bytes)
            frame = part if packed.has_checksum(part) else None
        return _Posted(decoded(body), body, frame)
    except packed.DamagedBody as error:
        return _Posted(InputError(f"The group is refused: {error}.", place="$"), b"", None)
    except InputError as error:
        return _Posted(error, body, None)


def _checked(posted: Sequence[_Posted], stream: Stream) -> list[ReadGroup]:
    groups = [group for group, _, _ in posted if isinstance(group, Group)]
    are_right = _error(groups, stream) is None
    read: list[ReadGroup] = []
    for group, body, frame in posted:
        if isinstance(group, InputError):
            read.append(group)
        elif not are_right and (error := _error([group], stream)):
            read.append(error)
        else:
            put = put_of(group, body)
            read.append(EncodedPut(put, packed.ZSTD, frame) if frame else encode_puts([put])[0])
    return read


def _error(groups: Sequence[Group], stream: Stream) -> InputError | None:
    try:
        check_groups(groups, stream)
    except InputError as error:
        return error
    return None
