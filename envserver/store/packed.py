"""Encodes bodies for the database: as they are, zstd-compressed where that makes them smaller, or
in the gzip form in which they were posted.

Token ids and logprobs shrink by a factor of two to four, which saves more time in the database's
writes than compression takes. All forms have a checksum, because SQLite does not notice when a disk
damages data. `encode` and `decode` are pure, inverse to each other, and release the GIL."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
from envserver_records.errors import TooLargeError
from envserver_records.records import Group
from envserver_records.tasks import RewardRange
from envserver_records.zstd import zstd
from isal import isal_zlib

RAW: Final = 0
ZSTD: Final = 1
"""A zstd frame, which may have its own checksum; decompression verifies it."""
CHECKED: Final = 2
"""Four bytes of CRC-32, then the body as it is. RAW bodies come from older stores."""
POSTED: Final = 3
"""Two gzip members: a JSON object as it was posted; what the body has instead of its last brace."""

_MIN_BYTES: Final = 4096
_OPTIONS: Final[dict[int, int]] = {
    zstd.CompressionParameter.compression_level: 1,
    zstd.CompressionParameter.checksum_flag: 1,
}
_SUM_BYTES: Final = 4
_GZIP: Final = 16 + zlib.MAX_WBITS
# The library's type stubs declare this class as an instance.
_NOT_GZIP: Final[type[Exception]] = isal_zlib.IsalError  # type: ignore[assignment]
_FRAME: Final = b"\x28\xb5\x2f\xfd"
_CHECKSUM_BIT: Final = 0x04
"""A bit of the byte after the four bytes of `_FRAME`."""


class DamagedBody(Exception):
    """The stored bytes are not those that were written."""


def encode(body: bytes) -> tuple[int, bytes]:
    """Returns (encoding, bytes to store). Small or incompressible bodies are not compressed."""
    if (frame := smaller(body)) is not None:
        return ZSTD, frame
    return CHECKED, zlib.crc32(body).to_bytes(_SUM_BYTES, "little") + body


def smaller(body: bytes) -> bytes | None:
    """Returns `body` as a zstd frame with a checksum; None if that is hardly smaller."""
    if len(body) < _MIN_BYTES:
        return None
    frame = zstd.compress(body, options=_OPTIONS)
    return frame if len(frame) <= 0.9 * len(body) else None


def as_posted(gzipped: bytes, posted: bytes, end: bytes) -> tuple[tuple[int, bytes], bytes]:
    """Stores `gzipped`, one gzip member of the JSON object `posted`, as it came; in the body `end`
    replaces the object's last brace. Returns (encoding, bytes to store), and the body."""
    body = posted[: posted.rindex(b"}")] + end
    if len(gzipped) > 0.6 * len(body):
        return encode(body), body
    return (POSTED, gzipped + _gzip_member(end)), body


@lru_cache(maxsize=64)
def _gzip_member(content: bytes) -> bytes:
    return isal_zlib.compress(content, wbits=_GZIP)


def _posted_body(stored: bytes) -> bytes:
    parts: list[bytes] = []
    for _ in range(2):
        member = isal_zlib.decompressobj(_GZIP)
        try:
            parts.append(member.decompress(stored))
        except _NOT_GZIP as error:
            raise DamagedBody(str(error)) from error
        if not member.eof:
            raise DamagedBody("the gzip form is not whole")
        stored = member.unused_data
    if stored:
        raise DamagedBody("the gzip form has more than two members")
    posted, end = parts
    return posted[: posted.rindex(b"}")] + end


def is_frame(body: bytes) -> bool:
    """Returns whether `body` begins like a zstd frame; no packed record does."""
    return body.startswith(_FRAME)


def has_checksum(frame: bytes) -> bool:
    """Returns whether a zstd frame has a checksum; only such a frame may be stored as it is."""
    return bool(frame[len(_FRAME)] & _CHECKSUM_BIT)


def inflate_frame(frame: bytes, most: int) -> bytes:
    """Decompresses a zstd frame that a client sent; its header must give the content size."""
    try:
        size = zstd.get_frame_info(frame).decompressed_size
        if size is None:
            raise DamagedBody("the zstd frame's header does not give the content size")
        if size > most:
            raise TooLargeError(f"It inflates to more than {most} bytes.", max_body_bytes=most)
        stream = zstd.ZstdDecompressor()
        content = stream.decompress(frame, max_length=size + 1)
    except zstd.ZstdError as error:
        raise DamagedBody(str(error)) from error
    if not stream.eof or stream.unused_data or len(content) != size:
        raise DamagedBody("it is not a single zstd frame")
    return content


def decode(encoding: int, stored: bytes) -> bytes:
    if encoding == RAW:
        return stored
    if encoding == ZSTD:
        try:
            return zstd.decompress(stored)
        except zstd.ZstdError as error:
            raise DamagedBody(str(error)) from error
    if encoding == POSTED:
        return _posted_body(stored)
    body = stored[_SUM_BYTES:]
    if zlib.crc32(body) != int.from_bytes(stored[:_SUM_BYTES], "little"):
        raise DamagedBody("its checksum is wrong")
    return body


# Bodies are never read for a list. Groups of older versions have no facts.

MOST_REWARDS: Final = 64
"""Rewards that are kept of a group; its mean and bounds are of all."""


class GroupFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a group.

    Args:
        task_id, split, model: as in `records.Group`; "" if unknown.
        rewards: of its rollouts in order, `MOST_REWARDS` at most; None: not scorable.
        reward_mean, reward_min, reward_max: over all rollouts with a reward; None if there is none.
        turns: of its longest rollout.
        completion_tokens: over all rollouts.
        truncated: number of rollouts that a limit of tokens cut off.
        seconds: of its longest rollout.
        flags: those of any rollout, sorted.
        ends: number of rollouts by how they ended: "agent" (by itself), or the limit.
        rated: number of rollouts with a reward.
        solved: number of those that solved the task; None if unknown.
    """

    task_id: str = ""
    split: str = ""
    model: str = ""
    rewards: list[float | None] = []
    reward_mean: float | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    turns: int | None = None
    completion_tokens: int | None = None
    truncated: int = 0
    seconds: float | None = None
    flags: list[str] = []
    ends: dict[str, int] = {}
    rated: int = 0
    solved: int | None = None


def facts_of(group: Group) -> GroupFacts:
    rewards = [rollout.score.reward for rollout in group.trajectories]
    facts = facts_of_rewards(rewards, group.task_id, group.reward_range)
    return with_use(facts, group, group.trajectories)


def with_use(facts: GroupFacts, group: Any, rollouts: Sequence[Any]) -> GroupFacts:
    """Adds what has the same names in a `Group` and in a line of a file."""
    return msgspec.structs.replace(
        facts,
        split=group.split,
        model=group.model,
        turns=max((rollout.turns for rollout in rollouts), default=0),
        completion_tokens=sum(rollout.usage.completion_tokens for rollout in rollouts),
        truncated=sum(rollout.truncated for rollout in rollouts),
        seconds=max((rollout.usage.seconds for rollout in rollouts), default=0.0),
        flags=sorted({flag for rollout in rollouts for flag in rollout.flags}),
        ends=dict(Counter(rollout.usage.ended_by for rollout in rollouts)),
    )


def facts_of_rewards(
    rewards: Iterable[float | None],
    task_id: str | None,
    reward_range: RewardRange | None = None,
) -> GroupFacts:
    listed = list(rewards)
    given = [reward for reward in listed if reward is not None]
    return GroupFacts(
        task_id=task_id or "",
        rewards=listed[:MOST_REWARDS],
        reward_mean=sum(given) / len(given) if given else None,
        reward_min=min(given, default=None),
        reward_max=max(given, default=None),
        rated=len(given),
        solved=sum(map(reward_range.is_solved, given)) if reward_range is not None else None,
    )


def facts_row(seq: int, env: str, facts: GroupFacts) -> tuple[object, ...]:
    """Returns a row of `group_facts`: its columns are the facts in this order, lists as JSON."""
    row = msgspec.structs.astuple(facts)
    rewards, flags, ends = map(_json_text, (facts.rewards, facts.flags, facts.ends))
    return (seq, *row[:3], rewards, *row[4:11], flags, ends, *row[13:], env)


def _json_text(value: object) -> str:
    return msgspec.json.encode(value).decode()
