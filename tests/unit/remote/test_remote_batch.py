"""Several groups in one request: what the server makes of them, and what a joiner puts together."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from envserver_records.errors import ConflictError, InputError, TooLargeError
from envserver_records.records import pack
from envserver_records.zstd import zstd
from hypothesis import given, settings
from hypothesis import strategies as st
from support.api import running_api
from support.extent import examples
from support.joined import Joined, join, stream_group

from envserver.api import Stream
from envserver.api.runners.posted_groups import read_batch
from envserver.api.runners.validation import read_group
from envserver.remote import GROUP_LIST_MSGPACK
from envserver.remote.batch import MOST_GROUPS, compressed, encode_batch
from envserver.remote.posts import GroupPoster

STREAM = Stream(env="math", split="train", seed=0, prefix="math-train-0-")
MANY = 1 << 20


async def post(one: Joined, bodies: Sequence[bytes]) -> list[tuple[int, str]]:
    """The refused ones: index and place."""
    headers = {"content-type": GROUP_LIST_MSGPACK}
    answer = await one.send("POST", "/groups", content=encode_batch(bodies), headers=headers)
    assert answer.status_code == 200, answer.text
    return [(said["index"], said["place"]) for said in answer.json()["refused"]]


def long_group(index: int) -> bytes:
    """One that is worth compressing."""
    return pack(stream_group(index, output="word " * 2000))


async def test_of_several_groups_the_wrong_one_is_named_and_the_others_are_stored(
    tmp_path: Path,
) -> None:
    async with running_api(tmp_path / "store.db") as api:
        one = await join(api)
        bodies = [pack(one.group(0)), pack(one.group(1, trajectories=0)), compressed(long_group(2))]
        for _ in range(2):
            assert await post(one, bodies) == [(1, "$.trajectories")]
        assert (await api.get("/v1/status"))["groups"]["queued"] == 2
        (shown,) = (await api.get("/v1/environments"))["environments"]
        assert shown["stored"] == 2
        ids = [one.group(index).group_id for index in (0, 2)]
        assert await api.store.bodies(ids) == [bodies[0], long_group(2)]
        assert (await api.store.stored_bodies(ids))[1][1] == bodies[2], "as it came"
        assert await post(one, []) == []
        for wrong, status in (
            (b"", 422),
            (encode_batch(["words"]), 422),
            (encode_batch([b"x"] * 99), 413),
        ):  # type: ignore[list-item]
            headers = {"content-type": GROUP_LIST_MSGPACK}
            answer = await one.send("POST", "/groups", content=wrong, headers=headers)
            assert answer.status_code == status, answer.text


def test_frames_are_what_they_say_or_are_refused() -> None:
    plain = long_group(0)
    frame = compressed(plain)
    unchecked, unsized = zstd.compress(plain), zstd.ZstdCompressor()
    streamed = unsized.compress(plain) + unsized.flush()
    wrong = [frame[:-1], frame[:5], frame + frame, streamed, frame[:60] + b"\0\0\0" + frame[63:]]
    found = read_batch(encode_batch([frame, unchecked, *wrong]), STREAM, MANY)
    kept, again, *refused = found
    assert not isinstance(kept, InputError) and kept.stored == frame
    assert not isinstance(again, InputError) and again.stored == frame, "with a checksum"
    assert all(isinstance(one, InputError) for one in refused)
    bomb = zstd.compress(bytes(MANY), level=1)
    with pytest.raises(TooLargeError):
        read_batch(encode_batch([bomb, bomb]), STREAM, MANY + 1)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**32))
def test_a_look_at_all_and_a_look_at_each_say_the_same(seed: int) -> None:
    rng = random.Random(seed)
    bodies = []
    for index in range(3):
        body = bytearray(pack(stream_group(index)))
        if rng.random() < 0.5:
            for _ in range(rng.randint(1, 3)):
                body[rng.randrange(len(body))] = rng.choice((0, 1, 2, 127, 128, 192, 255))
        bodies.append(bytes(body))
    for body, read in zip(bodies, read_batch(encode_batch(bodies), STREAM, MANY), strict=True):
        try:
            group = read_group(body, STREAM)
        except InputError as error:
            assert isinstance(read, InputError), "only the careful look refuses it"
            assert read.detail == error.detail
        else:
            assert not isinstance(read, InputError), read
            assert (read.put.group_id, read.put.body) == (group.group_id, body)


async def test_what_is_ready_while_one_is_under_way_goes_together() -> None:
    sent: list[list[bytes]] = []
    answered = asyncio.Event()

    async def send(bodies: Sequence[bytes]) -> list[InputError | None]:
        sent.append(list(bodies))
        await answered.wait()
        if b"all" in bodies and len(bodies) > 1:
            raise InputError("too large together")
        if b"taken" in bodies:
            raise ConflictError("the name is taken")
        return [InputError("no") if body == b"wrong" else None for body in bodies]

    posts = GroupPoster(send)
    first = asyncio.create_task(posts.put(b"first"))
    while not sent:
        await asyncio.sleep(0)
    words = [b"a", b"wrong", b"b", b"gone"]
    later = [asyncio.create_task(posts.put(word)) for word in words]
    await asyncio.sleep(0)
    later[-1].cancel()
    await asyncio.sleep(0)
    answered.set()
    await first
    found = await asyncio.gather(*later, return_exceptions=True)
    assert sent == [[b"first"], [b"a", b"wrong", b"b"]]
    assert [type(one) for one in found[:3]] == [type(None), InputError, type(None)]
    await asyncio.gather(posts.put(b"c"), posts.put(b"all"))
    assert sent[2:] == [[b"c", b"all"], [b"c"], [b"all"]]
    many = [posts.put(b"%d" % number) for number in range(MOST_GROUPS + 1)]
    await asyncio.gather(*many)
    assert [len(bodies) for bodies in sent[5:]] == [MOST_GROUPS, 1]
    with pytest.raises(ConflictError):
        await posts.put(b"taken")
    answered.clear()
    last = asyncio.create_task(posts.put(b"last"))
    await asyncio.sleep(0)
    await posts.close()
    with pytest.raises(asyncio.CancelledError):
        await last


def test_a_list_travels_as_messagepack() -> None:
    assert msgspec.msgpack.decode(encode_batch([b"a", b"b"])) == [b"a", b"b"]
