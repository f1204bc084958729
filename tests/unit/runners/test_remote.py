"""Environments on other machines, as the server sees them and as a joiner sees the server."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from envserver_records.costs import Cost, JudgeUsage
from envserver_records.errors import ConfigError, ConflictError
from envserver_records.records import Group, ServiceCall, pack, sealed, unpack
from envserver_records.sampling import SamplingSpan
from envserver_records.tasks import Score
from envserver_records.timings import EgressRequest, HookEvent
from envserver_records.waiting import cancel_and_wait
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.api import (
    Api,
    join,
    registration,
    requested,
    running_api,
    sampled,
    spoiled,
    stream_group,
)
from support.cases import cases_of
from support.clocks import Clock
from support.commands import free_port
from support.doors import doors
from support.extent import examples
from support.waiting import settled, until

from envserver.http.access import create_token
from envserver.proxy.gate import Aborted
from envserver.runners.link import Link, RunnerGate, held_identity, missing_requests
from envserver.runners.messages import Heartbeat, Registration, Welcome
from envserver.runners.runner import Stream
from envserver.runners.validation import check_groups, decoded

STREAM = Stream(env="math", split="train", seed=0)


def linked(url: str, **more: Any) -> Link:
    return Link(url, Registration(**registration()), **{"gate": RunnerGate(), **more})


@asynccontextmanager
async def living(link: Link) -> AsyncIterator[tuple[Welcome, asyncio.Task[None]]]:
    """An open session that asks for news."""
    async with link.open() as welcome:
        task = asyncio.create_task(link.live())
        try:
            yield welcome, task
        finally:
            await cancel_and_wait(task)


async def environments(api: Api) -> list[dict[str, Any]]:
    return list((await api.get("/v1/environments"))["environments"])


# Who is who


async def test_each_name_has_a_stream_of_its_own_that_outlives_the_server(tmp_path: Path) -> None:
    async def stored() -> int:
        known = {shown["name"]: shown["stored"] for shown in await environments(api)}
        return int(known["math@one"])

    async with running_api(tmp_path / "store.db") as api:
        one, two = await join(api), await join(api, "math@two")
        other = await join(api, "other", env="code")
        assert (one.seed, two.seed, other.seed) == (0, 1, 0)
        await one.put(0)
        one = await join(api)
        await one.put(1)
        assert await stored() == 2
    async with running_api(tmp_path / "store.db") as api:
        one.api = api
        await one.put(2)  # the session goes on
        assert await stored() == 3
        again = await join(api)
        assert (again.id, again.seed, again.stored) == (one.id, 0, 3)
        await one.put(3, status=401)
        assert (await join(api, "math@three")).seed == 2
        taken = await api.http.post("/v1/environments", json=registration(instance="another one"))
        assert taken.status_code == 409
        await again.send("DELETE", "")
        assert (await join(api, instance="another one")).seed == 0


async def test_a_stream_that_the_server_made_itself_is_nobody_elses(tmp_path: Path) -> None:
    async with running_api(tmp_path / "store.db") as api:
        first = await join(api)
        await first.put(0)
        await api.store.set_values({f"environment:{first.id}": None})
    async with running_api(tmp_path / "store.db") as api:
        assert (await join(api, "math@two")).seed == 1


async def test_a_wrong_key_does_nothing(api: Api) -> None:
    one, two = await join(api), await join(api, "math@two")
    for key in ({}, {"x-environment-key": ""}, {"x-environment-key": "guess"}, two.key):
        one.key = key
        for ask in (
            one.post(pack(one.group(0))),
            one.send("POST", "/heartbeat", json={}),
            one.send("POST", "/known", json={"group_ids": []}),
            one.send("DELETE", ""),
        ):
            answer = await ask
            assert answer.status_code == 401, answer.text
            assert answer.json()["type"].endswith("wrong_key")
    assert (await api.get("/v1/status"))["groups"]["queued"] == 0
    assert not any(shown["gone"] for shown in await environments(api))


def test_a_name_is_held_by_one_process_and_kept_for_the_next(tmp_path: Path) -> None:
    with held_identity(tmp_path, name=None, default="math@here") as first:
        with held_identity(tmp_path, name=None, default="math@here") as second:
            assert (first.name, second.name) == ("math@here", "math@here-2")
        with (
            pytest.raises(ConfigError, match="--name"),
            held_identity(tmp_path, name="math@here", default=""),
        ):
            pass
    (tmp_path / "math@here-2.json").write_bytes(b'{"inst')
    with held_identity(tmp_path, name="math@here", default="") as again:
        assert again == first
    with held_identity(tmp_path, name="math@here-2", default="") as mended:
        assert mended.instance != second.instance


# Groups


COLUMNS = cases_of(__file__, "refused.toml")
GOOD = pack(stream_group(0))
REFUSED = {
    "$": [b"", GOOD[:-9], b"\x91" * 5000],
    "$.trajectories": [pack(stream_group(0, trajectories=0))],
    "$.trajectories[0].score.reward": [
        pack(stream_group(0, score=Score(reward=reward))) for reward in (float("nan"), -1.0)
    ],
    "$.trajectories[0].sequences": [pack(stream_group(0, sequences=[]))],
    "$.trajectories[0]": [pack(stream_group(0, output=b"bytes"))],
    "$.trajectories[0].task_id": [pack(stream_group(0, env="gaia"))],
    "$.policy_version": [spoiled(versions=[-1, -1, 6, 7, 7])],
    "$.trajectories[0].sequences[0].mask": [
        spoiled(mask=[0] * 5, logprobs=[0] * 5), spoiled(tokens=[1]),
    ],
}  # fmt: skip
CHANGED: dict[str, list[dict[str, Any]]] = {
    "$.group_id": [{"group_id": "math-train-0-000001-0"}, {"group_id": "../../etc/passwd\0"}],
    "$.index": [{"index": 2**62}],
    "$.seed": [{"seed": 1}],
    "$.created_at": [{"created_at": float("nan")}],
    "$.digest": [{"digest": "0" * 64}],
}


def spoiled_rows() -> Iterator[tuple[str, bytes]]:
    """Places, and what is refused there."""
    for place, bodies in REFUSED.items():
        yield from ((place, body) for body in bodies)
    yield "$", pack([stream_group(0)])
    yield "$.digest", pack(replace(sealed(stream_group(0)), created_at=1.0))
    for place, changes in CHANGED.items():
        yield from ((place, pack(replace(stream_group(0), **change))) for change in changes)
    for name, rows in COLUMNS.items():
        for row in rows:
            is_span = name.startswith("sampling")
            body = sampled(*(SamplingSpan(*s) for s in row)) if is_span else spoiled(**{name: row})
            yield f"$.trajectories[0].sequences[0].{name}", body


async def test_malformed_groups_are_refused_with_their_place(tmp_path: Path) -> None:
    async with running_api(tmp_path / "store.db", server={"max_body_bytes": 100_000}) as api:
        one = await join(api)
        for place, body in spoiled_rows():
            answer = await one.post(body)
            assert answer.status_code == 422, (place, answer.text)
            assert answer.json()["place"] == place
            assert await one.post_all([body]) == [(0, place)]
        assert (await one.post(bytes(200_000))).status_code == 413
        plain = await one.send("POST", "/groups", content=pack(one.group(0)))
        assert plain.status_code == 415
        assert (await api.get("/v1/status"))["groups"]["queued"] == 0
        whole = sealed(unpack(sampled(SamplingSpan(2, 4, 0.7), SamplingSpan(4, 5)), Group))
        assert (await one.post(pack(whole))).status_code == 200
        assert (await api.get("/v1/status"))["groups"]["queued"] == 1


def test_what_was_asked_changed_and_fetched_comes_with_a_group() -> None:
    group = stream_group(0)
    trajectory = group.trajectories[0]
    trajectory.service_calls = [ServiceCall(name="guess", arguments={"number": 7})]
    trajectory.hooks = [HookEvent(at="answer", reason="a guard", changed=["answer"], call=0)]
    trajectory.egress = [EgressRequest(method="GET", host="api.example.com", port=80, status=200)]
    trajectory.usage.judge = JudgeUsage(calls=1)
    trajectory.usage.cost = Cost(currency="USD", models={"": 0.5})
    read = decoded(pack(sealed(group)))
    check_groups([read], STREAM)
    assert read.trajectories[0].hooks == trajectory.hooks


# News


async def test_a_pause_waits_for_joiners_but_not_silent_ones(api: Api, silence: Clock) -> None:
    one = await join(api)
    await one.beat()
    pausing = asyncio.create_task(api.post("/v1/policy/pause", {"timeout_seconds": 20}))
    pause = (await one.beat(wait_seconds=10))["pause"]
    assert pause["in_flight"] == "drain"
    assert not pausing.done()
    await one.beat(quiet=pause["id"])
    assert (await pausing)["idle"]
    await api.post("/v1/policy/resume", {"version": 4})
    news = await one.beat()
    assert (news["pause"], news["policy_version"]) == (None, 4)
    # It says nothing from now on: first the pause waits for it, then no longer.
    impatient = await api.post("/v1/policy/pause", {"timeout_seconds": 0.1})
    assert not impatient["idle"]
    silence.ahead += 31
    assert (await api.post("/v1/policy/pause", {"timeout_seconds": 20}))["idle"]


async def test_a_silent_one_gives_its_room_and_share_to_others(api: Api, silence: Clock) -> None:
    # A batch is four sequences, two groups, a half of which must be code's while it is there.
    await api.start(batch_size=4)
    one = await join(api, "math@one")
    code = await join(api, "code@two", env="code", minimum_share=0.5)
    rooms = {(await joined.beat(capacity=400))["room"] for joined in (one, code)}
    await one.put(0, 1)
    await code.beat(capacity=400)
    assert await api.batch_marks() is None, "half a batch is code's"
    silence.ahead += 31
    assert (await environments(api))[1]["silent"]
    await one.beat()
    assert await api.batch_marks() is not None
    assert (await one.beat(capacity=400))["room"] > max(rooms) // 2
    back = await code.beat(capacity=400)
    assert back["room"] >= 0
    assert not (await environments(api))[1]["silent"]


async def test_one_that_is_to_leave_is_told_and_people_see_how_all_are(api: Api) -> None:
    one = await join(api)
    assert not (await one.beat())["drain"]
    assert (await one.send("POST", "/drain")).status_code == 204
    assert (await one.beat())["drain"]
    assert (await one.send("DELETE", "")).status_code == 204
    (shown,) = await environments(api)
    assert (shown["gone"], shown["open"]) == (True, 0)
    await join(api, "math@two")
    status = (await api.http.get("/v1/status")).json()
    assert status["joined"] == {"present": 1, "silent": 0, "gone": 1}
    lines = (await api.http.get("/metrics")).text
    for standing in ("present", "gone"):
        labels = f'environment="math",standing="{standing}"'
        assert f"envserver_joined_environments{{{labels}}} 1.0" in lines
    assert 'envserver_joined_wanted_groups{environment="math"} 256.0' in lines


# The joiner's half


@settings(max_examples=examples(50))
@given(has=st.sets(st.integers(0, 40)), asked_at_once=st.integers(1, 7))
def test_a_stream_goes_on_with_what_the_server_lacks(has: set[int], asked_at_once: int) -> None:
    ids = {f"g{n}" for n in has}
    asked: list[str] = []

    def known(group_ids: list[str]) -> set[str]:
        asked.extend(group_ids)
        return ids & set(group_ids)

    with mock.patch("envserver.runners.link._ASKED_AT_ONCE", asked_at_once):
        missing = missing_requests(map(requested, range(40)), known, len(has))
        left = [request.index for request in missing]
    assert left == [n for n in range(40) if n not in has]
    assert len(asked) == len(set(asked))


async def test_a_link_registers_again_with_a_server_that_has_forgotten_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A server that ends waits for the heartbeat that it is holding.
    monkeypatch.setattr("envserver.runners.link._POLL_SECONDS", 0.5)
    server = {"port": free_port()}
    session = AsyncExitStack()
    async with running_api(tmp_path / "store.db", server=server) as api:
        link = linked(api.url)
        link.facts = lambda: Heartbeat(capacity=9)
        await session.enter_async_context(living(link))
        await link.wait_for_capacity()
    posting = asyncio.create_task(link.post(pack(stream_group(0))))
    await asyncio.sleep(0.3)
    assert not posting.done()
    async with running_api(tmp_path / "new.db", server=server) as api:
        await posting
        assert (await api.get("/v1/status"))["groups"]["queued"] == 1
        await session.aclose()
        assert [shown["gone"] for shown in await environments(api)] == [True]


@pytest.mark.parametrize("in_flight", ["drain", "abort"])
async def test_no_call_spans_an_update_of_a_shared_engine(api: Api, in_flight: str) -> None:
    gate, weights, known = RunnerGate(), -1, -1
    sampled: list[tuple[int, int, int]] = []

    def publish(version: int) -> None:
        nonlocal known
        known = version

    async def calls() -> None:
        while True:
            with suppress(Aborted):
                async with gate.passing():
                    told, before = known, weights
                    await asyncio.sleep(random.random() * 0.1)
                    sampled.append((told, before, weights))
            await asyncio.sleep(0)

    link = linked(api.url, gate=gate, publish=publish)
    async with living(link):
        work = [asyncio.create_task(calls()) for _ in range(4)]
        await until(lambda: sampled)
        for version in range(4):
            paused = await api.post("/v1/policy/pause", {"in_flight": in_flight})
            assert paused["idle"]
            weights = version
            await api.post("/v1/policy/resume", {"version": version})
            await until(lambda: sampled[-1][0] == version)  # noqa: B023
        await cancel_and_wait(*work)
    assert {told for told, _, _ in sampled} == set(range(-1, 4))
    assert all(told == before == after for told, before, after in sampled)


async def test_a_link_needs_a_token_where_the_server_has_some(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    token, _ = create_token(path, "machine", "environment")
    wrong, _ = create_token(path, "trainer", "trainer")
    async with running_api(tmp_path / "store.db", server={"tokens_file": path}) as api:
        for bad in ("", "guess", wrong):
            link = linked(api.url, token=bad)
            with pytest.raises(ConfigError):
                await link.open().__aenter__()
        link = linked(api.url, token=token)
        async with link.open():
            await link.post(pack(stream_group(0)))
        assert (await api.store.counts())["queued"] == 1


async def test_what_is_sampled_unheard_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("envserver.runners.link.time", clock)
    gate = RunnerGate()
    gate.longest_silence_seconds = 15.0

    async def call(seconds: float) -> str:
        async with gate.passing():
            clock.ahead += seconds
        return "sampled"

    waiting = asyncio.create_task(call(0))
    await settled()
    assert not waiting.done(), "nothing was heard yet"
    gate.hear(clock.monotonic())
    assert await waiting == "sampled"
    with pytest.raises(Aborted):
        await call(16)


async def test_a_session_goes_on_at_another_server_and_late_copies_do_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envserver.runners.link._POLL_SECONDS", 0.2)
    versions: list[int] = []
    async with running_api(tmp_path / "store.db") as api, doors(api.url) as (first, second):
        first.shut("loses answers")
        link = linked(f"{first.url},{second.url}")
        link.publish, link.facts = versions.append, lambda: Heartbeat(capacity=9)
        async with living(link) as (welcome, task):
            asked = [line.split()[1].partition("?")[0] for line in first.came + second.came]
            assert asked == ["/v1/environments"] * 2
            for index, (here, other) in enumerate(((second, first), (first, second))):
                here.shut("loses answers")
                here.losing = b"/groups"
                other.shut("open")
                await link.post(pack(stream_group(index, welcome.seed)))
                await api.post("/v1/policy-version", {"version": index})
                await until(lambda: versions[-1:] == [index])  # noqa: B023
            here.shut("open")
            await first.come_late()
            await second.come_late()
            await link.post(pack(stream_group(2, welcome.seed)))
            assert not task.done()
        assert (await api.store.counts())["queued"] == 3
        assert [shown["gone"] for shown in await environments(api)] == [True]


async def test_another_process_of_the_same_name_ends_a_session(api: Api) -> None:
    link = linked(api.url)
    async with link.open(), linked(api.url).open():
        for ended in (link.live(), link.post(b"")):
            with pytest.raises(ConflictError, match="Another process"):
                await ended
