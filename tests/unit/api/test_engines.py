"""Engines that are registered while a server runs: checked, routed, versioned, kept, removed."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from envserver_local.simulated import ASSETS
from envserver_records.errors import EngineRefused, InputError
from envserver_records.records import Call
from support.api import registration
from support.cases import cases_of
from support.engine_stand_in import Bytes, FakeVllm, Words, fake_vllm
from support.fleets import FleetHouse, attributed, fleet_house, sampled_by, says, versioned_vllm
from support.waiting import until

from envserver.models.connections import EngineAddresses
from envserver.models.fleet import read_list
from envserver.models.replicas import Registration as KnownEngine
from envserver.proxy.attempts import ProxyAttempt
from envserver.runners.link import Link, RunnerGate
from envserver.runners.messages import Registration
from envserver.tokens.chat_format import ChatFormat

CASES = cases_of(__file__)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[FleetHouse]:
    async with fleet_house(tmp_path / "s.db") as made:
        yield made


async def an_engine() -> AsyncIterator[FakeVllm]:
    async with fake_vllm() as fake:
        yield fake


one, two = pytest.fixture(an_engine, name="one"), pytest.fixture(an_engine, name="two")


async def asked(house: FleetHouse, count: int, name: str = "r") -> list[Call]:
    """The calls of as many new rollouts."""
    return [await house.ask(house.open(f"{name}{number}")) for number in range(count)]


async def test_a_call_waits_for_an_engine_a_restart_keeps(one: FakeVllm, tmp_path: Path) -> None:
    async with fleet_house(tmp_path / "s.db") as house:
        assert await house.rows() == []
        first = asyncio.create_task(house.ask(house.open("first")))
        row = await house.register(one.url + "/v1", ttl_seconds=60, model="tiny")
        assert (row["url"], row["standing"], row["origin"]) == (one.url, "used", "registered")
        assert 0 < row["expires_in_seconds"] <= 60
        assert (await first).exact
        again = await house.register(one.url, status=200, ttl_seconds=600)
        assert again["id"] == row["id"]
        assert again["expires_in_seconds"] > 60
    async with fleet_house(tmp_path / "s.db") as house:
        await house.until(one.url, "used")
        assert (await house.ask(house.open("second"))).exact
        assert await house.api.status("DELETE", f"/v1/engines/{row['id']}") == 204
        assert await house.rows() == []
    async with fleet_house(tmp_path / "s.db") as house:
        assert await house.rows() == []


async def are_gone(house: FleetHouse) -> bool:
    return await house.rows() == []


@pytest.mark.thorough
async def test_an_engine_without_heartbeats_is_removed(house: FleetHouse, one: FakeVllm) -> None:
    await house.register(one.url, ttl_seconds=1)
    await until(lambda: are_gone(house))


async def test_an_engine_that_differs_is_refused_in_words_and_gets_no_call(
    house: FleetHouse, one: FakeVllm
) -> None:
    async with fake_vllm(omit=frozenset({"token_ids"})) as other:
        problem = await house.register(other.url, status=409)
        assert "token ids" in problem["detail"]
        await house.register(one.url)
        problem = await house.register(other.url, status=409)
        assert "It returns no token ids" in problem["detail"]
        assert "sk-secret" not in str(problem)
        wrong = await house.register(one.url.replace("127.0.0.1", "localhost"), 409, model="x")
        assert "serve 'tiny', not 'x'" in wrong["detail"]
        before = len(other.requests)
        await asked(house, 8)
        assert len(other.requests) == before


async def test_a_drained_engine_keeps_its_rollouts_and_a_new_one_takes_none_of_them(
    house: FleetHouse, one: FakeVllm, two: FakeVllm
) -> None:
    async def ask(attempts: list[ProxyAttempt]) -> None:
        for attempt in attempts:
            await house.ask(attempt)

    await house.register(one.url)
    old = [house.open(f"old-{number}") for number in range(6)]
    await ask(old)
    await house.register(two.url)
    before = len(two.requests)
    await ask(old)
    assert len(two.requests) == before
    row = (await house.tell(one.url, "drain"))["engine"]
    assert (row["standing"], row["rollouts"]) == ("draining", 6)
    before = len(one.requests)
    await ask([*old, *(house.open(f"new-{number}") for number in range(6))])
    assert len(one.requests) == before + len(old)
    for attempt in old:
        house.proxy.seal(attempt)
    await house.until(one.url, "drained")
    await house.tell(one.url, "resume")
    await house.until(one.url, "used")


async def test_the_least_loaded_one_is_next(one: FakeVllm, two: FakeVllm, tmp_path: Path) -> None:
    async with fleet_house(tmp_path / "s.db", routing="least") as house:
        for fake in (one, two):
            await house.register(fake.url)
        await asked(house, 10)
        assert [row["rollouts"] for row in await house.rows()] == [5, 5]


async def test_old_weights_get_no_calls_and_tokens_have_engine_versions(house: FleetHouse) -> None:
    async with versioned_vllm(3) as one, versioned_vllm(2) as late:
        await house.publish(3)
        await house.register(one.url, version=3)
        row = await house.register(late.url, version=2)
        assert (row["standing"], row["weights_version"]) == ("old", 2)
        assert row["reason"] == "it has version 2, and 3 is published"
        for call in await asked(house, 8):
            assert attributed(call) == [sampled_by(call)] == [3]
        late.text = says(4)
        await house.tell(late.url, "version", version=4)
        calls = await asked(house, 12, "s")
        assert {sampled_by(call) for call in calls} == {3, 4}
        assert all(attributed(call) == [sampled_by(call)] for call in calls)
        await house.publish(4)
        assert (await house.row(one.url))["standing"] == "old"
        one.text = says(4)
        await house.publish(4, engines=[one.url])
        assert await house.standings() == ["used", "used"]


async def test_an_engine_that_tells_no_version_follows_publications_only_from_the_first(
    house: FleetHouse, one: FakeVllm, two: FakeVllm
) -> None:
    await house.register(one.url)
    await house.publish(1)
    assert attributed(*await asked(house, 1)) == [1]
    row = await house.register(two.url)
    assert (row["standing"], row["weights_version"]) == ("old", None)
    assert row["reason"] == "its policy version is not known"
    await house.publish(2)
    assert (await house.row(one.url))["weights_version"] == 2
    assert (await house.row(two.url))["standing"] == "old"


async def test_an_allowed_lag_lets_old_weights_sample_as_what_they_are(tmp_path: Path) -> None:
    async with (
        versioned_vllm(2) as late,
        fleet_house(tmp_path / "s.db", max_version_lag=1) as house,
    ):
        await house.publish(3)
        await house.register(late.url, version=2)
        (call,) = await asked(house, 1)
        assert attributed(call) == [sampled_by(call)] == [2]
        await house.publish(4)
        assert await house.standings() == ["old"]


async def test_a_paused_engine_is_idle_and_the_others_take_its_calls(
    house: FleetHouse, one: FakeVllm, two: FakeVllm
) -> None:
    await house.register(one.url)
    attempt = house.open("r")
    await house.ask(attempt)
    await house.register(two.url)
    one.held = asyncio.Event()
    asking = asyncio.create_task(house.ask(attempt))
    await until(lambda: len(one.requests) and house.fleet.replicas[0].slots.used == 1)
    answer = await house.tell(one.url, "pause", timeout_seconds=0.05)
    assert (answer["idle"], answer["engine"]["standing"]) == (False, "paused")
    assert (await house.tell(one.url, "pause", in_flight="abort"))["idle"]
    assert (await asking).exact
    await house.tell(one.url, "resume", version=7)
    assert (await house.row(one.url))["weights_version"] == 7


@pytest.mark.thorough
async def test_engines_come_drain_die_and_return_with_old_weights_in_use(house: FleetHouse) -> None:
    """No call fails, and each carries the version of the weights that sampled it."""
    done = asyncio.Event()
    calls = []

    async with versioned_vllm(1) as steady:

        async def rollouts(lane: int) -> None:
            number = 0
            while not done.is_set():
                attempt = house.open(f"rollout-{lane}-{number}")
                for _ in range(4):
                    calls.append(await house.ask(attempt))
                house.proxy.seal(attempt)
                number += 1

        async def more() -> None:
            goal = len(calls) + 40
            await until(lambda: len(calls) >= goal or any(lane.done() for lane in lanes))

        await house.publish(1)
        await house.register(steady.url, version=1)
        lanes = [asyncio.create_task(rollouts(lane)) for lane in range(8)]
        await more()
        async with versioned_vllm(1, slow_seconds=0.005) as mortal:
            port = int(mortal.url.rpartition(":")[2])
            await house.register(mortal.url, version=1, ttl_seconds=600)
            await more()
            await mortal.kill()
            await more()
        async with versioned_vllm(0, port) as back, versioned_vllm(1) as drained:
            await house.register(drained.url, version=1)
            await until(lambda: back.requests)  # it is checked again ...
            await more()
            row = await house.row(back.url)
            assert (row["standing"], row["weights_version"]) in [
                ("checking", None), ("unreachable", None), ("old", None),
            ]  # fmt: skip
            await house.register(back.url, status=200, version=0, ttl_seconds=600)
            await house.until(back.url, "old")
            await house.tell(drained.url, "drain")
            await house.until(drained.url, "drained")
            await house.api.http.delete(f"/v1/engines/{(await house.row(drained.url))['id']}")
            await more()
            # One after the other gets version 2.
            for fake in (back, steady):
                answer = await house.tell(fake.url, "pause")
                assert answer["idle"]
                fake.text = says(2)
                await house.tell(fake.url, "resume", version=2)
                await more()
            await house.publish(2)
            await more()
            assert await house.standings() == ["used", "used"]
            done.set()
            await asyncio.gather(*lanes)
    assert all(attributed(call) == [sampled_by(call)] for call in calls)
    assert {sampled_by(call) for call in calls} == {1, 2}


class OtherWords(Bytes):
    """Another tokenizer, or another chat template."""

    def prompt(self, body: dict[str, Any]) -> list[int]:
        return [7, *super().prompt(body)]


class OtherModel(Bytes):
    def prompt(self, body: dict[str, Any]) -> list[int]:
        raise EngineRefused("The model `tiny` does not exist.", status=404)


# What changes, what is said of it, and whether the answer streams.
CHANGES: dict[str, tuple[dict[str, Any], str, bool]] = {
    "name": ({"served": "other"}, "it answers as the model other, they as tiny", True),
    "words": ({"words": OtherWords()}, "it renders the same messages to other token ids", False),
    "weights": ({"text": "Other."}, "its weights differ", True),
    "model": ({"words": OtherModel()}, "does not exist", False),
}


@pytest.mark.parametrize("origin", ["setting", "registered"])
@pytest.mark.parametrize("what", CHANGES)
async def test_an_engine_that_changes_in_a_restart_gets_no_call_until_it_is_itself_again(
    tmp_path: Path, origin: str, what: str
) -> None:
    (change, why, streams), is_registered = CHANGES[what], origin == "registered"
    async with fake_vllm() as one:
        port, base_url = int(one.url.rpartition(":")[2]), "none" if is_registered else one.url
        async with fleet_house(tmp_path / "s.db", base_url=base_url, trained=False) as house:
            if is_registered:
                await house.register(one.url)
            attempt = house.open("r")
            await house.ask(attempt)
            await one.kill()
            async with fake_vllm(port) as same:
                await house.ask(attempt)
                await same.kill()
            async with fake_vllm(port, **change) as other:
                # Another engine may be registered meanwhile; one of the settings is all there is.
                status = 200 if is_registered else 503
                asking = asyncio.create_task(house.send(attempt, status, stream=streams))
                await house.until(one.url, "refused")
                assert why in (await house.row(one.url))["reason"]
                assert len(attempt.calls) == 2
                await other.kill()
            async with fake_vllm(port):
                await house.until(one.url, "used")
                await asking
                await house.ask(attempt)
            texts = {call.message["content"] for call in attempt.calls}
            assert texts == {one.text}


class StrangeWords(Words):
    def prompt(self, body: dict[str, Any]) -> list[int]:
        return [7, *super().prompt(body)]


@pytest.mark.parametrize("what", ["name", "words", "weights"])
async def test_an_engine_that_changes_behind_a_router_is_noticed_by_its_first_answer(
    tmp_path: Path, what: str
) -> None:
    format = ChatFormat.load(ASSETS)
    store = tmp_path / "s.db"
    async with (
        fake_vllm(words=Words(format)) as router,
        fleet_house(
            store, base_url=router.url, tokenizer=ASSETS, trained=what != "weights"
        ) as house,
    ):
        router.spoil = lambda path, answer: answer.update(system_fingerprint=router.text)
        assert not any("render_mismatch" in call.flags for call in await asked(house, 2))
        if what == "name":
            router.served = "other"
        elif what == "words":
            router.words = StrangeWords(format)
        else:
            router.text = "Other."
        late = house.open("late")
        await house.send(late, 503)
        assert await house.standings() == ["refused"]
        assert late.engine_failures == 1
        assert all("other_model_served" in call.flags for call in late.calls)
        await house.send(house.open("later"), 503)


async def test_a_runner_calls_the_engines_of_its_server_with_their_versions(
    house: FleetHouse, tmp_path: Path
) -> None:
    async with versioned_vllm(3) as fake, fleet_house(tmp_path / "runner.db") as runner:
        link = Link(
            house.api.url,
            Registration(**registration("math@one")),
            gate=RunnerGate(),
            publish=runner.proxy.publish_version,
            on_engines=lambda engines: runner.fleet.sync(
                "server", [KnownEngine(**one.model_dump()) for one in engines]
            ),
        )
        link.engines_in_doubt = lambda: runner.fleet.doubts
        runner.fleet.changed = link.hurry

        async def samples(version: int, name: str) -> None:
            (call,) = await asked(runner, 1, name)
            assert attributed(call) == [sampled_by(call)] == [version]

        async with link.open():
            living = asyncio.create_task(link.live())
            await house.publish(3)
            await house.register(fake.url, version=3)
            await samples(3, "r")
            assert (await runner.row(fake.url))["origin"] == "server"
            runner.fleet.at(fake.url).lost()  # only its own connection broke
            await samples(3, "s")
            await house.tell(fake.url, "pause")
            fake.text = says(4)
            await runner.until(fake.url, "paused")
            await house.tell(fake.url, "resume", version=4)
            await samples(4, "t")
            await house.api.http.delete(f"/v1/engines/{(await house.row(fake.url))['id']}")
            await until(lambda: are_gone(runner))
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)


async def test_an_address_that_may_be_no_engines_is_refused(house: FleetHouse) -> None:
    refused = CASES["refused"]
    for url, words in refused.items():
        assert words in (await house.register(url, status=422))["detail"]
    assert await house.rows() == []


async def test_where_others_may_register_this_machine_is_no_engine() -> None:
    addresses = EngineAddresses([], ["http://localhost:9001/v1"], this_machine=False)
    await addresses.check("http://localhost:9001")
    for url in ("http://localhost:6379", "http://127.0.0.1:9001", "http://[::1]:9001"):
        with pytest.raises(InputError, match="No engine may be registered"):
            await addresses.check(url)
    await addresses.check("http://10.1.2.3:8000")
    await EngineAddresses(["*.local"], this_machine=False).check("http://gpu.local:8000")


async def test_only_hosts_that_the_settings_name_get_the_key(one: FakeVllm, tmp_path: Path) -> None:
    async with fleet_house(tmp_path / "s.db", key="sk-secret") as house:
        await house.register(one.url)
        await asked(house, 1)
    assert not [key for sent in one.headers for key in sent if key.lower() == "authorization"]
    allow = ["10.0.0.0/8", "127.0.0.0/8"]
    async with fleet_house(tmp_path / "t.db", key="sk-secret", allow=allow) as house:
        problem = await house.register("http://192.168.1.1:8000", status=422)
        said = "--engines.allow lists the hosts at which engines may be registered."
        assert problem["hint"] == said
        await house.register(one.url)
        await asked(house, 1)
        assert "sk-secret" not in str(await house.rows())
    assert "Bearer sk-secret" in one.headers[-1].values()


async def test_a_file_lists_engines_versions(one: FakeVllm, two: FakeVllm, tmp_path: Path) -> None:
    listed = tmp_path / "engines.txt"
    listed.write_text(f"# ours\n{one.url}/v1\n")
    async with fleet_house(tmp_path / "s.db", file=listed, poll_seconds=0.02) as house:

        async def is_two() -> bool:
            return [row["url"] for row in await house.rows()] == [two.url]

        assert (await house.row(one.url))["origin"] == "file"
        await asked(house, 1)
        listed.write_text(json.dumps({"url": two.url, "version": 5}))
        await until(is_two)
        assert (await house.row(two.url))["weights_version"] == 5
        listed.write_text("nonsense")
        assert attributed(*await asked(house, 1, "s")) == [5]
        assert await is_two()
    for line in ("nonsense", "http://me:secret@gpu7:8000", "http://gpu7\\x:8000", "http://é..com"):
        listed.write_text(f"http://gpu6:8000\n{line}")
        with pytest.raises(InputError, match="line 2") as refusal:
            read_list(listed)
        assert "secret" not in str(refusal.value)


async def test_a_list_that_is_read_while_it_is_written_removes_no_engine(
    one: FakeVllm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    looks = 0

    def read(path: Path) -> list[KnownEngine]:
        nonlocal looks
        looks += 1
        return [] if looks == 3 else [KnownEngine(url=one.url)]

    monkeypatch.setattr("envserver.models.fleet.read_list", read)
    async with fleet_house(tmp_path / "s.db", file=tmp_path / "list", poll_seconds=0.01):
        await until(lambda: looks > 5)
    assert "engine_gone" not in capsys.readouterr().out
