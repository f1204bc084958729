"""What a group is known by, whoever has it: a digest of its rows' tokens and masks."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import orjson
import zstandard
from numpy.typing import NDArray

from envserver import Group, unpack

_ZSTD = b"\x28\xb5\x2f\xfd"
Rows = Iterable[tuple[Any, Any]]


def digest_of_rows(rows: Rows) -> str:
    """Of (tokens, trained mask) of each row, in their order."""
    made = hashlib.sha256()
    for tokens, mask in rows:
        made.update(np.asarray(tokens, np.int32).tobytes())
        made.update(b"|" + np.asarray(mask, np.uint8).tobytes() + b";")
    return made.hexdigest()[:24]


def id_and_digest_of_group(body: bytes) -> tuple[str, str]:
    group = unpack(body, Group)
    rows = [row for trajectory in group.trajectories for row in trajectory.sequences]
    return group.group_id, digest_of_rows((row.tokens, row.mask) for row in rows)


def ids_and_digests_of_groups(body: bytes) -> list[tuple[str, str]]:
    """Of several groups in one request, each packed, and compressed or not."""
    bodies = msgspec.msgpack.decode(body, type=list[bytes])
    packed = [zstandard.decompress(b) if b.startswith(_ZSTD) else b for b in bodies]
    return [id_and_digest_of_group(one) for one in packed]


def digest_of_post(body: bytes) -> str:
    """Of a group as it is posted over the Atropos API."""
    post = orjson.loads(body)
    masks = [np.asarray(row) != -100 for row in post["masks"]]
    return digest_of_rows(zip(post["tokens"], masks, strict=True))


def sampled_runs(tokens: NDArray[np.int32], mask: NDArray[np.uint8]) -> Iterator[str]:
    """A digest of each uninterrupted run of trained tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    for start, end in edges.reshape(-1, 2).tolist():
        yield digest_of_tokens(tokens[start:end].tolist())


def digest_of_tokens(tokens: list[int]) -> str:
    return hashlib.sha256(np.asarray(tokens, np.int32).tobytes()).hexdigest()[:24]
