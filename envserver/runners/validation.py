"""Checks groups made on other machines, and refuses wrong ones with the place of the error. CPU
work: run it in a thread."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from operator import attrgetter
from typing import Any, Final, NoReturn

import msgspec
import numpy as np
import orjson
from envserver_records.errors import InputError, TooLargeError
from envserver_records.records import Group, Split, Tokens, Trajectory, is_intact, unpack
from envserver_records.records import Sequence as Row
from envserver_records.sampling import LEAST_LOGPROB, LOGPROB_ROUNDING
from numpy.typing import NDArray

from ..rollouts.stream import again_prefix, group_id
from ..store import packed
from ..store.demand import put_of
from ..store.groups import EncodedPut, encode_puts
from .messages import MOST_GROUPS

_PLACE: Final = re.compile(r"`(\$[^`]*)`")
COLUMNS: Final = {
    "tokens": np.dtype(np.int32),
    "mask": np.dtype(np.uint8),
    "logprobs": np.dtype(np.float32),
    "calls": np.dtype(np.int32),
    "versions": np.dtype(np.int32),
}


class Stream(msgspec.Struct, frozen=True):
    env: str
    split: Split
    seed: int
    prefix: str


def check_group(group: Group, stream: Stream) -> None:
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


def wrong_span(row: Row) -> int | None:
    """Returns the number of a sampling span that cannot be, or None."""
    end = 0
    for number, span in enumerate(row.sampling):
        fits = end <= span.start < span.end <= len(row.tokens)
        if not fits or not 0 <= span.temperature < math.inf:
            return number
        end = span.end
    return None


def _check_row(row: Row, place: str) -> None:
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


# Many groups at a time, quickly: a group that does not look right is checked again by itself.

ReadGroup = EncodedPut | InputError

_LIST: Final = msgspec.msgpack.Decoder(list[bytes])
_MOST_RUNS: Final = 64
"""Maximum number of token runs of one call per row for which the quick check counts them."""
_INLINE_BYTES: Final = 64 * 1024
"""Groups smaller than this are read on the event loop, which is faster than switching threads."""
_TOGETHER_BYTES: Final = 512 * 1024
_LAST_VERSION: Final = np.iinfo(np.int32).max
_columns_of: Final = attrgetter(*COLUMNS)
_COLUMN_TYPES: Final = tuple(COLUMNS.values())


async def read_group_async(body: bytes, stream: Stream) -> EncodedPut:
    """Like `read_posted_group`; large groups are read in a thread."""
    if len(body) < _INLINE_BYTES:
        return read_posted_group(body, stream)
    return await asyncio.to_thread(read_posted_group, body, stream)


async def read_batch_async(post: bytes, stream: Stream, most_bytes: int) -> list[ReadGroup]:
    """Like `read_batch`; posts that are large, also when decompressed, are read in a thread."""
    if len(post) < _INLINE_BYTES:
        with suppress(TooLargeError):
            return read_batch(post, stream, min(most_bytes, 2 * _INLINE_BYTES))
    return await asyncio.to_thread(read_batch, post, stream, most_bytes)


def read_posted_group(body: bytes, stream: Stream) -> EncodedPut:
    (read,) = _checked([_Body(body)], stream)
    if isinstance(read, InputError):
        raise read
    return read


def read_batch(post: bytes, stream: Stream, most_bytes: int) -> list[ReadGroup]:
    try:
        parts = _LIST.decode(post)
    except msgspec.DecodeError as error:
        raise InputError(f"No list of packed groups: {error}.", place="$") from None
    if len(parts) > MOST_GROUPS:
        raise TooLargeError(f"A request has at most {MOST_GROUPS} groups.", most_groups=MOST_GROUPS)
    bodies: list[_Body | InputError] = []
    for part in parts:
        body = _inflated(part, most_bytes)
        most_bytes -= len(body.plain) if isinstance(body, _Body) else 0
        bodies.append(body)
    return _checked(bodies, stream)


class _Body(msgspec.Struct):
    """A posted group. `plain`: packed; `stored`: as written to disk, None if not made yet."""

    plain: bytes
    stored: bytes | None = None


def _inflated(part: bytes, most: int) -> _Body | InputError:
    if not packed.is_frame(part):
        return _Body(part)
    try:
        plain = packed.inflate_frame(part, most)
    except packed.DamagedBody as error:
        return InputError(f"The group is refused: {error}.", place="$")
    return _Body(plain, part if packed.has_checksum(part) else None)


def _checked(bodies: Sequence[_Body | InputError], stream: Stream) -> list[ReadGroup]:
    read: list[ReadGroup] = []
    for part in _parts(bodies):
        found = [body if isinstance(body, InputError) else _decoded(body.plain) for body in part]
        groups = [one for one in found if isinstance(one, Group)]
        if not _are_all_right(groups, stream):
            found = [_refused(one, stream) or one for one in found]
        read += [
            one if isinstance(one, InputError) else _encoded(one, body)
            for one, body in zip(found, part, strict=True)
        ]
    return read


def _parts(bodies: Sequence[_Body | InputError]) -> Iterator[list[_Body | InputError]]:
    """Splits bodies into parts small enough for the processor's caches."""
    part: list[_Body | InputError] = []
    size = 0
    for body in bodies:
        size += len(body.plain) if isinstance(body, _Body) else 0
        if part and size > _TOGETHER_BYTES:
            yield part
            part, size = [], 0
        part.append(body)
    yield part


def _decoded(body: bytes) -> Group | InputError:
    try:
        return decoded(body)
    except InputError as error:
        return error


def _refused(one: Group | InputError, stream: Stream) -> InputError | None:
    if isinstance(one, InputError):
        return one
    try:
        check_group(one, stream)
    except InputError as error:
        return error
    return None


def _encoded(group: Group, body: _Body | InputError) -> EncodedPut:
    assert isinstance(body, _Body)
    put = put_of(group, body.plain)
    if body.stored is None:
        return encode_puts([put])[0]
    return EncodedPut(put, packed.ZSTD, body.stored)


def _are_all_right(groups: Sequence[Group], stream: Stream) -> bool:
    """Returns whether all groups look right; False means that each must be checked closely."""
    rows: list[Row] = []
    begins: list[int] = []
    try:
        for group in groups:
            check_names(group, stream)
            begins.append(len(rows))
            if not _have_whole_rows(group, rows):
                return False
        orjson.dumps([_free_words(group) for group in groups])
    except (InputError, TypeError, orjson.JSONEncodeError, RecursionError):
        return False
    return not rows or _are_trainable(rows, begins, groups)


def _have_whole_rows(group: Group, rows: list[Row]) -> bool:
    """Returns whether the group's trajectories are complete; appends their rows to `rows`."""
    trajectories = group.trajectories
    if not trajectories or len({one.rollout_id for one in trajectories}) != len(trajectories):
        return False
    for one in trajectories:
        if one.env != group.env or one.task_id != group.task_id or not one.sequences:
            return False
        if wrong_reward(one, group) is not None:
            return False
        if not all(_is_whole(row) for row in one.sequences):
            return False
        rows += one.sequences
    return True


def _is_whole(row: Row) -> bool:
    length = row.tokens.size
    if not length or not row.path:
        return False
    for column, dtype in zip(_columns_of(row), _COLUMN_TYPES, strict=True):
        if column.size != length or column.dtype != dtype:
            return False
    return not row.sampling or wrong_span(row) is None


def _free_words(group: Group) -> list[object]:
    """Returns all values of a group whose types do not already guarantee valid JSON."""
    return [
        group.generation_params,
        group.rendering,
        group.services,
        [_free_words_of(one) for one in group.trajectories],
    ]


def _free_words_of(one: Trajectory) -> list[object]:
    others = msgspec.to_builtins(one.others) if one.others else None
    return [one.messages, one.tools, one.output, one.actions, others]


def _are_trainable(rows: Sequence[Row], begins: Sequence[int], groups: Sequence[Group]) -> bool:
    """Returns whether the rows can be trained on. `begins`: index of the first row of each group.

    Calls of numpy are what a small group costs here: `any`, `min` and `max` are Python around a
    ufunc's `reduce`, which is called itself."""
    lengths = [row.tokens.size for row in rows]
    starts = np.array([0, *accumulate(lengths[:-1])])
    tokens, mask, logprobs, calls, versions = map(
        np.concatenate, zip(*map(_columns_of, rows), strict=True)
    )
    most_trained = np.maximum.reduceat(mask, starts).tolist()
    if min(most_trained) != 1 or max(most_trained) != 1:
        return False
    # Comparisons with NaN are false.
    highest, lowest_logprob = np.maximum.reduce(logprobs), np.minimum.reduce(logprobs)
    if not (highest <= LOGPROB_ROUNDING and lowest_logprob >= LEAST_LOGPROB):
        return False
    trained, uncalled = mask.view(bool), calls < 0
    if np.count_nonzero(logprobs * (mask ^ 1)) or np.count_nonzero(uncalled & trained):
        return False
    if np.count_nonzero(uncalled & (versions != -1)):
        return False
    if np.minimum.reduce(versions) < -1 or np.minimum.reduce(tokens) < 0:
        return False
    sampled = np.where(trained, versions, _LAST_VERSION)
    lowest = np.minimum.reduceat(sampled, starts[list(begins)]).tolist()
    return lowest == [group.policy_version for group in groups] and _are_of_path(
        calls, starts, rows
    )


def _are_of_path(calls: Tokens, starts: NDArray[np.int64], rows: Sequence[Row]) -> bool:
    """Returns whether each call in a row is on the row's path. Works on runs of equal calls, of
    which there are few."""
    is_first = np.empty(len(calls), bool)
    np.not_equal(calls[1:], calls[:-1], out=is_first[1:])
    is_first[starts] = True
    firsts = np.flatnonzero(is_first)
    if len(firsts) > _MOST_RUNS * len(rows):
        return False
    of_row = (np.searchsorted(starts, firsts, "right") - 1).tolist()
    return all(
        call == -1 or call in rows[row].path
        for call, row in zip(calls[firsts].tolist(), of_row, strict=True)
    )
