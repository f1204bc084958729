"""Reads and checks posted groups, one or several per request.

In: the bytes of a request, and the stream that its groups must belong to. Out: for each group,
what to store, or why it is refused; a wrong group does not affect the others. Groups are checked
together first; only if that finds something odd is each group checked alone, to report exactly
what is wrong. What holds: the quick check never accepts what `validation` refuses. Reading is CPU
work: the functions for the event loop move it to a thread unless it is small.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from operator import attrgetter
from typing import Final

import msgspec
import numpy as np
import orjson
from envserver_records.errors import InputError, TooLargeError
from envserver_records.records import Group, Tokens, Trajectory
from envserver_records.records import Sequence as Row
from envserver_records.sampling import LEAST_LOGPROB, LOGPROB_ROUNDING
from numpy.typing import NDArray

from ...remote.batch import MOST_GROUPS
from ...store import compression
from ...store.groups import EncodedPut, encode_puts
from ...store.sink import put_of
from .validation import (
    COLUMNS,
    Stream,
    check_group,
    check_names,
    decoded,
    wrong_reward,
    wrong_span,
)

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
    """Reads the group in `body`, as packed by `records.pack`."""
    (read,) = _checked([_Body(body)], stream)
    if isinstance(read, InputError):
        raise read
    return read


def read_batch(post: bytes, stream: Stream, most_bytes: int) -> list[ReadGroup]:
    """Reads the groups of a post that holds several, in order.

    Args:
        most_bytes: maximum total size of the groups when decompressed; memory use stays below it.
    """
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
    """Decompresses one part. Raises TooLargeError if it has more than `most` bytes."""
    if not compression.is_frame(part):
        return _Body(part)
    try:
        plain = compression.inflate_frame(part, most)
    except compression.DamagedBody as error:
        return InputError(f"The group is refused: {error}.", place="$")
    return _Body(plain, part if compression.has_checksum(part) else None)


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
    return EncodedPut(put, compression.ZSTD, body.stored)


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
    """Returns whether the rows can be trained on.

    Calls of numpy are what a small group costs here: `any`, `min` and `max` are Python around a
    ufunc's `reduce`, which is called itself.

    Args:
        begins: index of the first row of each group.
    """
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
    which there are few.
    """
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
