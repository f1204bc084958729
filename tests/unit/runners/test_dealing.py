"""Groups dealt to runners elsewhere, each answered once; and several groups in one request."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from envserver_records.errors import ConflictError, InputError, StoreFull, TooLargeError
from envserver_records.records import pack
from envserver_records.tasks import RewardRange
from envserver_records.zstd import zstd
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.api import Api, join, native_group, registration, requested, stream_group
from support.clocks import Clock
from support.extent import examples
from support.waiting import settled

from envserver.http.server import serve_api
from envserver.rollouts.policy import Bounds
from envserver.rollouts.scheduler import CATCH_UP_GROUPS, Share
from envserver.rollouts.stream import GroupRequest
from envserver.runners import runner
from envserver.runners.dealing import Dealer, Made, Rules, Take, dealing_app
from envserver.runners.link import GroupPoster
from envserver.runners.messages import (
    GROUP_LIST_MSGPACK,
    MOST_GROUPS,
    Heartbeat,
    Registration,
    compressed,
    encode_batch,
)
from envserver.runners.news import LocalEnvironmentSink, fair_shares
from envserver.runners.registry import RunnerRegistry
from envserver.runners.runner import LONGEST_SECONDS, Stream
from envserver.runners.validation import decoded, read_groups
from envserver.store import Store, open_store
from envserver.store.demand import Demand

RUNNERS = ("a", "b", "c")
STEPS = st.lists(
    st.tuples(st.sampled_from(("take", "send", "send twice", "lose")), st.sampled_from(RUNNERS)),
    max_size=30,
)


async def asked(dealer: Dealer) -> asyncio.Task[Made]:
    """A group that somebody waits for."""
    making = asyncio.create_task(dealer.make(requested(0)))
    await settled()
    return making


async def taken(dealer: Dealer, *held: str) -> list[GroupRequest]:
    return (await dealer.take(Take("a", 1, list(held)))).requests


def made(group_id: str) -> Made:
    return Made(group_id=group_id, group=native_group(group_id))


@settings(max_examples=examples(60))
@given(steps=STEPS)
def test_each_group_is_answered_once_if_runners_are_lost(steps: list[tuple[str, str]]) -> None:
    asyncio.run(played(steps))


async def played(steps: list[tuple[str, str]]) -> None:
    dealer = Dealer(Rules(), poll_seconds=0)
    wanted = [f"g{number}" for number in range(6)]
    making = [asyncio.create_task(dealer.make(requested(number))) for number in range(6)]
    await settled()
    held: dict[str, list[str]] = {name: [] for name in RUNNERS}
    sent: list[str] = []
    for step, name in steps:
        if step == "take":
            dealt = await dealer.take(Take(name, 2, held[name]))
            held[name] = [one for one in held[name] if one not in dealt.cancelled]
            held[name] += [one.group_id for one in dealt.requests]
        elif step == "lose":
            held[name] = []
        elif held[name]:
            sent.append(held[name].pop())
            for _ in range(1 + (step == "send twice")):
                dealer.settle(made(sent[-1]))
        await settled()
    # One that stays makes the rest: what others still hold is theirs until they are silent.
    for name in RUNNERS:
        dealt = await dealer.take(Take(name, 9, []))
        while dealt.requests:
            for one in dealt.requests:
                dealer.settle(made(one.group_id))
            await settled()
            dealt = await dealer.take(Take(name, 9, []))
    answers = await asyncio.gather(*making)
    assert [one.group_id for one in answers] == wanted
    assert all((one.group is None) == (one.drop is not None) for one in answers)
    assert dealer.open_groups == 0


async def test_a_group_that_ends_its_runners_is_given_up() -> None:
    dealer = Dealer(Rules(), poll_seconds=0)
    making = await asked(dealer)
    for _ in range(3):
        assert await taken(dealer) == [requested(0)]
        await taken(dealer, "g0")
    assert not await taken(dealer)
    drop = (await making).drop
    assert drop is not None and drop.failed and "lost 3 times" in drop.message


async def test_a_runner_that_asks_anew_loses_nothing_to_its_earlier_questions() -> None:
    dealer = Dealer(Rules())
    questions = []
    for _ in range(4):
        questions.append(asyncio.create_task(taken(dealer)))
        await settled()
    making = await asked(dealer)
    assert [one.result() for one in questions] == [[], [], [], [requested(0)]]
    dealer.settle(made("g0"))
    assert (await making).group is not None


async def test_at_the_end_no_runner_waits_for_an_answer() -> None:
    dealer = Dealer(Rules())
    question = asyncio.create_task(dealer.take(Take("a", 1, [])))
    await settled()
    dealer.close()
    await settled()
    assert question.result().drain
    assert (await dealer.take(Take("a", 1, []))).drain


async def test_a_runner_that_leaves_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    server = await serve_api(dealing_app(Dealer(Rules()), "token"), "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(
        b"POST /v1/work/take HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer token\r\n"
        b"Content-Length: 9\r\n\r\n1"
    )
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    await server.close()
    assert not caplog.records


async def test_work_is_shared_and_what_nobody_wants_is_cancelled() -> None:
    dealer = Dealer(Rules(), poll_seconds=0, runners=lambda: 2)
    making = [asyncio.create_task(dealer.make(requested(number))) for number in range(4)]
    await settled()
    first = await dealer.take(Take("a", 9, []))
    assert [one.group_id for one in first.requests] == ["g0", "g1"]  # the other one gets the rest
    making[0].cancel()
    await settled()
    dealer.drain("a")
    after = await dealer.take(Take("a", 9, ["g0", "g1"]))
    assert (after.cancelled, after.requests, after.drain) == (["g0"], [], True)
    for task in making:
        task.cancel()


STREAM = Stream(env="math", split="train", seed=0)
MANY = 1 << 20


def long_group(index: int) -> bytes:
    """One that is worth compressing."""
    return pack(stream_group(index, output="word " * 2000))


async def test_of_several_groups_the_wrong_one_is_named_and_the_others_are_stored(api: Api) -> None:
    one = await join(api)
    bodies = [pack(one.group(0)), pack(one.group(1, trajectories=0)), compressed(long_group(2))]
    for _ in range(2):
        assert await one.post_all(bodies) == [(1, "$.trajectories")]
    assert (await api.get("/v1/status"))["groups"]["queued"] == 2
    (shown,) = (await api.get("/v1/environments"))["environments"]
    assert shown["stored"] == 2
    ids = [one.group(index).group_id for index in (0, 2)]
    assert await api.store.bodies(ids) == [bodies[0], long_group(2)]
    for wrong, status in ((b"", 422), (encode_batch([b"x"] * 99), 413)):
        headers = {"content-type": GROUP_LIST_MSGPACK}
        answer = await one.send("POST", "/groups", content=wrong, headers=headers)
        assert answer.status_code == status, answer.text


def test_frames_are_what_they_say_or_are_refused() -> None:
    plain = long_group(0)
    frame = compressed(plain)
    unchecked, unsized = zstd.compress(plain), zstd.ZstdCompressor()
    streamed = unsized.compress(plain) + unsized.flush()
    wrong = [frame[:-1], frame[:5], frame + frame, streamed, frame[:60] + b"\0\0\0" + frame[63:]]
    kept, again, *refused = read_groups(encode_batch([frame, unchecked, *wrong]), STREAM, MANY)
    assert not isinstance(kept, InputError) and kept.stored == frame
    assert not isinstance(again, InputError) and again.stored == frame, "with a checksum"
    assert all(isinstance(one, InputError) for one in refused)
    bomb = zstd.compress(bytes(MANY), level=1)
    with pytest.raises(TooLargeError):
        read_groups(encode_batch([bomb, bomb]), STREAM, MANY + 1)


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32))
def test_no_spoiled_bytes_come_through_together_or_alone(seed: int) -> None:
    """Both say the same; what is let through can be trained on."""
    rng = random.Random(seed)
    bodies = []
    for index in range(3):
        body = bytearray(pack(stream_group(index)))
        for _ in range(rng.choice((0, 1, 2, 3, 4))):
            value = rng.choice((0, 1, 2, 127, 128, 192, 255, rng.randrange(256)))
            body[rng.randrange(len(body))] = value
        if rng.random() < 0.1:
            del body[rng.randrange(len(body)) :]
        bodies.append(bytes(body))
    together = read_groups(encode_batch(bodies), STREAM, MANY)
    for body, read in zip(bodies, together, strict=True):
        (alone,) = read_groups(body, STREAM, MANY, is_list=False)
        if isinstance(read, InputError):
            assert str(read.detail["place"]).startswith("$")
            assert isinstance(alone, InputError) and alone.detail == read.detail
            continue
        group = decoded(body)
        assert (read.put.group_id, read.put.body) == (group.group_id, body)
        for trajectory in group.trajectories:
            assert trajectory.score.reward is not None
            assert RewardRange().holds(trajectory.score.reward)
            for row in trajectory.sequences:
                assert len(row.tokens) == len(row.mask) == len(row.logprobs) == len(row.versions)
                assert (row.logprobs <= 1e-5).all()


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
    later = [asyncio.create_task(posts.put(word)) for word in [b"a", b"wrong", b"b"]]
    await asyncio.sleep(0)
    answered.set()
    await first
    found = await asyncio.gather(*later, return_exceptions=True)
    assert sent == [[b"first"], [b"a", b"wrong", b"b"]]
    assert [type(one) for one in found] == [type(None), InputError, type(None)]
    await asyncio.gather(posts.put(b"c"), posts.put(b"all"))
    assert sent[2:] == [[b"c", b"all"], [b"c"], [b"all"]]
    await asyncio.gather(*[posts.put(b"%d" % number) for number in range(MOST_GROUPS + 1)])
    assert [len(bodies) for bodies in sent[5:]] == [MOST_GROUPS, 1]
    with pytest.raises(ConflictError):
        await posts.put(b"taken")
    await posts.close()


# What a server does for many joiners: registrations, polls, silence, and the room they get


def registry_of(store: Store) -> RunnerRegistry:
    return RunnerRegistry(store, Demand(store, Bounds(most_groups=1024, most_batches=3)))


@asynccontextmanager
async def started(folder: Path) -> AsyncIterator[tuple[Store, RunnerRegistry]]:
    async with open_store(folder / "store.db") as store:
        registry = registry_of(store)
        await registry.load()
        yield store, registry


def wanted(number: int) -> Registration:
    return Registration(**registration(f"math@{number}"))


async def test_registrations_at_once_have_each_its_stream(tmp_path: Path) -> None:
    async with started(tmp_path) as (_, registry):
        welcomes = await asyncio.gather(*[registry.register(wanted(n)) for n in range(100)])
        assert {one.seed for one in welcomes} == set(range(100)), "each has its own stream"
        again = await asyncio.gather(*[registry.register(wanted(7)) for _ in range(3)])
        assert {one.id for one in again} == {welcomes[7].id}
    async with started(tmp_path) as (_, registry):
        for one in welcomes[:7] + welcomes[8:]:
            assert registry.authenticate(one.id, one.key).registered.seed == one.seed


async def test_the_registrations_of_an_older_store_are_taken_over(tmp_path: Path) -> None:
    async with started(tmp_path) as (store, registry):
        welcomes = [await registry.register(wanted(n)) for n in range(2)]
        rows = await store.values_with_prefix("environment:")
        old = [{key: row[key] for key in row if key != "understands"} for row in rows.values()]
        await store.set_values(dict.fromkeys(rows) | {"environments": old})
    for _ in range(2):
        async with started(tmp_path) as (store, registry):
            assert await store.get_value("environments") is None
            for welcome in welcomes:
                known = registry.authenticate(welcome.id, welcome.key)
                assert known.registered.seed == welcome.seed


async def test_those_that_left_make_room_for_others(
    store: Store, silence: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_MOST_RUNNERS", 3)
    registry = registry_of(store)
    first = [await registry.register(wanted(n)) for n in range(3)]
    with pytest.raises(StoreFull):
        await registry.register(wanted(3))
    for one in (first[1], first[0]):
        await registry.goodbye(one.id, one.key)
    back = await registry.register(wanted(1))
    assert back.id == first[1].id
    await registry.register(wanted(3))
    again = registry_of(store)
    await again.load()
    for known in (registry, again):
        assert {one.name for one in known.table.known.values()} == {"math@1", "math@2", "math@3"}
    silence.ahead += 24 * 3600 + 1  # all were killed
    await registry.register(wanted(4))
    assert {one.name for one in registry.table.known.values()} == {"math@4"}


async def test_those_who_understand_it_poll_less_often_when_there_are_many(
    api: Api, silence: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envserver.runners.runner._BEATS_PER_SECOND", 0.01)
    old = await join(api, "math@old")
    assert "next_seconds" not in await old.beat()
    new = await join(api, "math@new", "?understands=next_seconds")
    assert (await new.beat())["next_seconds"] == LONGEST_SECONDS

    async def silent() -> list[bool]:
        shown = (await api.http.get("/v1/environments")).json()["environments"]
        return [one["silent"] for one in shown]

    silence.ahead += 31
    assert await silent() == [True, False], "it may say nothing for longer"
    silence.ahead += 30
    assert await silent() == [True, True]


@settings(max_examples=examples(60))
@given(
    free=st.integers(0, 60),
    wants=st.dictionaries(st.sampled_from("abcd"), st.integers(-2, 30), min_size=1),
    weights=st.lists(st.floats(0.1, 10), min_size=4, max_size=4),
    minimums=st.lists(st.floats(0, 1), min_size=4, max_size=4),
)
@example(free=2, wants={"a": 2, "d": 2}, weights=[1.0] * 4, minimums=[0, 0, 1, 5e-324])
def test_places_are_dealt_to_those_who_want_them(
    free: int, wants: dict[str, int], weights: list[float], minimums: list[float]
) -> None:
    dealt = fair_shares(map(Share, "abcd", weights, minimums)).upcoming(free, wants)
    wanted = {name: max(0, want) for name, want in wants.items()}
    assert all(0 <= dealt[name] <= wanted[name] for name in wants)
    assert sum(dealt.values()) == min(free, sum(wanted.values()))


async def test_one_that_begins_nothing_does_not_get_all_places(store: Store) -> None:
    demand = Demand(store, Bounds(most_groups=256, most_batches=3))
    registry = RunnerRegistry(store, demand, stretches=False)
    stuck, works = [
        await registry.register(Registration(**registration(f"math@{name}")))
        for name in ("stuck", "works")
    ]
    begun = held = room = 0
    for _ in range(40):
        beats = Heartbeat(capacity=400), Heartbeat(capacity=400, begun=begun)
        held, room = [
            (await registry.heartbeat(one.id, one.key, beat)).room
            for one, beat in zip((stuck, works), beats, strict=True)
        ]
        begun += room
    assert held <= 128 + CATCH_UP_GROUPS
    assert held + room == 256


async def test_what_was_begun_before_a_restart_of_the_server_counts_for_nothing(api: Api) -> None:
    one, two = await join(api), await join(api, "math@two")
    rooms = [
        (await joined.beat(capacity=400, begun=begun))["room"]
        for joined, begun in 2 * ((one, 100_000), (two, 3))
    ]
    assert rooms[2:] == [128, 128]


async def test_the_servers_own_environments_share_the_room(store: Store) -> None:
    demand = Demand(store, Bounds(most_groups=4, most_batches=3))
    elsewhere = RunnerRegistry(store, demand, stretches=False)
    own = LocalEnvironmentSink(
        store, demand, elsewhere.news, share=Share("math"), prefix="math-train-0-", capacity=9
    )
    with pytest.raises(ConflictError):
        await elsewhere.register(Registration(**registration("math")))
    one = await elsewhere.register(Registration(**registration()))
    assert one.seed == 1, "the server itself makes the stream of seed 0"
    news = await elsewhere.heartbeat(one.id, one.key, Heartbeat(capacity=9))
    assert news.room == 2
    for _ in range(2):
        await own.wait_for_capacity()
        own.opened(1)
    third = asyncio.create_task(own.wait_for_capacity())
    await settled()
    assert not third.done()
    await elsewhere.goodbye(one.id, one.key)
    await third
