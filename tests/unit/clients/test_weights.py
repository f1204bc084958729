"""Weights on their way to engines: the order of steps, the guards, and what each failure leaves."""

import asyncio
import errno
import itertools
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import pytest
from envserver_clients.adapters.trainers_engines import TrainersEngines
from envserver_clients.http import SyncEnvClient
from envserver_clients.weights import (
    LocalFull,
    Lora,
    PromptCheck,
    VllmFull,
    WeightsMismatch,
    WeightsNotSaved,
)
from support.api import running_api
from support.beside import beside
from support.fleets import attributed, fleet_house, sampled_by, says, versioned_vllm
from support.waiting import PATIENCE
from support.weights_engine import ScriptedEngine, check, saver, scripted_engine

from envserver import ConflictError, EngineRefused, EngineUnavailable, InputError
from envserver.proxy.gate import Gate

FULL_PUSH = ["pause wait", "reload", "reset_prefix_cache", "name version-{}", "resume"]


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with scripted_engine() as made:
        yield made


@pytest.fixture
def engines() -> Iterator[list[ScriptedEngine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(scripted_engine()) for _ in range(3)]


class House:
    """A server's API with a gate that calls pass, and a client of it."""

    def __init__(self, folder: Path, gate: Gate, client: SyncEnvClient) -> None:
        self.folder, self.gate, self.client = folder, gate, client

    @property
    def state(self) -> tuple[bool, int]:
        """Whether calls are paused, and the version."""
        return self.gate.paused, int(self.client.status()["policy_version"])

    def push(self, *engines: ScriptedEngine, kind: Any = LocalFull, **how: Any) -> Any:
        """What gives weights to engines of this server."""
        return kind([one.url for one in engines], self.folder, server=self.client, **how)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    gate, urls = Gate(), list[str]()

    async def serve(started: threading.Event, ended: Any) -> None:
        async with running_api(tmp_path / "store.db", gate=gate) as api:
            urls.append(api.url)
            started.set()
            await ended.wait()

    with beside(serve), SyncEnvClient(urls[0], run=None) as client:
        yield House(tmp_path / "w", gate, client)


def give(push: Any, version: int) -> Any:
    """Publishes the weights `version`, checked."""
    return push.publish(version, saver(version), check(version))


def states(engines: list[ScriptedEngine]) -> list[tuple[int, bool]]:
    return [(engine.weights, engine.paused) for engine in engines]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# All weights


@pytest.mark.parametrize("kind", [LocalFull, VllmFull])
def test_a_version_is_given_in_order_and_checked(
    engine: ScriptedEngine, tmp_path: Path, kind: type[LocalFull]
) -> None:
    push = kind(f"{engine.url}/v1", tmp_path / "weights")
    for version in range(1, 5):
        published = give(push, version)
        assert (engine.weights, engine.name) == (version, f"version-{version}")
        assert published.difference is not None
        assert published.difference < 1e-6
        assert not engine.paused
    assert engine.steps == [step.format(version) for version in range(1, 5) for step in FULL_PUSH]
    assert names(tmp_path / "weights") == ["version-3", "version-4"]
    again = give(push, 4)  # the same version is given anew
    assert again.folder.name == "version-4.1"
    assert engine.steps[-5:] == [step.format(4) for step in FULL_PUSH]
    # A trainer that was started again goes on where it ended.
    assert kind(engine.url, tmp_path / "weights").publish(4, saver(4)).folder.name == "version-4.2"


@pytest.mark.parametrize(
    ("in_flight", "mode"), [("drain", "wait"), ("keep", "keep"), ("abort", "abort")]
)
def test_the_server_holds_calls_meanwhile_and_knows_the_version_then(
    engine: ScriptedEngine, house: House, in_flight: str, mode: str
) -> None:
    seen = []
    engine.on["/collective_rpc"] = lambda: seen.append(house.state)
    give(house.push(engine, in_flight=in_flight), 7)
    assert engine.steps[0] == f"pause {mode}"
    assert seen == [(True, -1)]
    assert house.state == (False, 7)
    engine.steps.clear()
    with pytest.raises(ConflictError, match="version 7, above 6"):  # before anything is done
        house.push(engine).publish(6, saver(6))
    assert engine.steps == []
    assert names(house.folder) == ["version-7"]


def test_a_restarted_engine_is_noticed_and_updated(engine: ScriptedEngine, tmp_path: Path) -> None:
    push = LocalFull(engine.url, tmp_path)
    assert push.restore() == []

    def restart() -> None:
        engine.on.clear()
        engine.start_again()

    engine.on["/resume"] = restart
    with pytest.raises(EngineUnavailable, match="restarted meanwhile"):
        give(push, 5)
    assert engine.paused
    give(push, 5)
    assert engine.weights == 5
    assert push.restore() == []
    engine.start_again()
    mended = threading.Event()
    engine.on["/resume"] = mended.set
    with push.watched(0.02):
        assert mended.wait(PATIENCE)
    assert (engine.weights, engine.name, engine.paused) == (5, "version-5", False)
    engine.start_again()
    engine.stubborn = True
    with pytest.raises(WeightsMismatch):
        push.restore()
    assert engine.paused


# Engines that fail


def test_calls_go_on_where_an_engine_cannot_be_paused_and_nothing_was_changed(
    engines: list[ScriptedEngine], house: House
) -> None:
    push = house.push(*engines)
    give(push, 1)
    engines[1].refuse["/pause"] = 503
    with pytest.raises(EngineUnavailable, match="at pause"):
        give(push, 2)
    assert house.state == (False, 1)
    assert states(engines) == [(1, False)] * 3


def test_all_or_none(engines: list[ScriptedEngine], house: House) -> None:
    """One fails in the middle: nothing is sampled anywhere until all have the same again."""
    push = house.push(*engines)
    give(push, 0)
    paths = ("/collective_rpc", "/reset_prefix_cache", "/v1/completions")
    for version, (path, status) in enumerate(itertools.product(paths, (500, 503)), 1):
        engines[2].refuse = {path: status}
        with pytest.raises(Exception, match="1 of 3 engines failed") as caught:
            give(push, version)
        assert caught.value.detail["engines"] == [engines[2].url]  # type: ignore[attr-defined]
        assert house.state == (True, version - 1)
        assert all(engine.paused for engine in engines)
        # Nor do calls go on when the next try fails early: two engines have other weights.
        engines[2].refuse = {"/pause": 503}
        with pytest.raises(EngineUnavailable):
            give(push, version)
        assert house.state == (True, version - 1)
        engines[2].start_again()
        engines[2].refuse = {}
        give(push, version)
        assert house.state == (False, version)
        assert states(engines) == [(version, False)] * 3


@pytest.mark.parametrize(("path", "status"), [("/weight_info", 404), ("/collective_rpc", 500)])
def test_an_engine_without_what_is_needed_is_told_how_to_start_it(
    engine: ScriptedEngine, house: House, path: str, status: int
) -> None:
    engine.refuse[path] = status
    with pytest.raises(EngineRefused, match="--worker-extension-cls"):
        house.push(engine, kind=VllmFull).publish(1, saver(1))
    assert house.state == (False, -1)


# Files


def full_disk(folder: Path) -> NoReturn:
    (folder / "half").write_text("x")
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("kind", [LocalFull, Lora])
def test_a_full_disk_is_told_and_leaves_nothing(
    engine: ScriptedEngine, house: House, kind: type[LocalFull]
) -> None:
    push = house.push(engine, kind=kind)
    push.publish(1, saver(1))
    engine.steps.clear()
    with pytest.raises(WeightsNotSaved, match="The disk is full") as caught:
        push.publish(2, full_disk)
    assert caught.value.detail["full"]
    assert names(house.folder) == ["version-1"]
    assert engine.steps == []
    assert house.state == (False, 1)


def test_what_a_killed_trainer_left_goes_and_what_is_no_model_is_refused(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    (tmp_path / ".unfinished-4-1").mkdir()
    push = LocalFull(engine.url, tmp_path)
    push.publish(1, saver(1))
    with pytest.raises(InputError, match=r"has no config\.json and no \*\.safetensors"):
        push.publish(2, lambda folder: None)
    assert names(tmp_path) == ["version-1"]


# Adapters


def test_adapters_are_on_all_engines_or_none(engines: list[ScriptedEngine], house: House) -> None:
    push = house.push(*engines, kind=Lora)
    give(push, 1)
    engines[0].refuse = {"/v1/load_lora_adapter": 500}
    with pytest.raises(Exception, match="1 of 3 engines failed at load"):
        give(push, 2)
    engines[0].refuse = {}
    with pytest.raises(WeightsMismatch, match="policy@1 is served as before"):
        push.publish(2, saver(3), check(2))
    assert [engine.adapters for engine in engines] == [{"policy@1": 1}] * 3
    assert house.state == (False, 1)
    give(push, 2)
    engines[1].start_again()
    assert push.restore() == [engines[1].url]
    assert engines[1].adapters == {"policy@1": 1, "policy@2": 2}
    Lora(engines[2].url, house.folder).publish(3, saver(3))  # which no server is told
    assert (engines[2].adapters["policy@3"], house.state) == (3, (False, 2))


def test_a_check_compares_something() -> None:
    with pytest.raises(InputError, match="at least one completion token"):
        PromptCheck([], [1], [0.0])
    with pytest.raises(InputError, match="2 tokens and 1 logprobs"):
        PromptCheck([1], [1, 2], [0.0])
    far, token = check(1).widest([-0.1, float("nan")])
    assert (far, token) == (float("inf"), 1)


# A trainer's own engines behind a server: registered, paused, published with their versions.


async def test_engines_get_calls_with_weights_and_tokens_carry_the_version(tmp_path: Path) -> None:
    async with versioned_vllm(3) as one, fleet_house(tmp_path / "s.db") as house:
        engines = TrainersEngines(house.api.url)
        await engines.pause()
        await engines.pause()
        waits = asyncio.create_task(house.ask(house.open("first")))
        await engines.publish([one.url.removeprefix("http://")], 3)
        call = await waits
        assert sampled_by(call) == 3 and set(attributed(call)) == {3}
        await engines.pause()
        second = asyncio.create_task(house.ask(house.open("second")))
        one.text = says(4)
        await engines.publish([one.url], 4)
        call = await second
        assert sampled_by(call) == 4 and set(attributed(call)) == {4}
        await engines.publish([one.url], None)  # the same weights
        assert (await house.api.get("/v1/policy"))["version"] == 4
        again = TrainersEngines(house.api.url, counts_on=True)  # a trainer that was restarted
        await again.publish([one.url], 1)
        assert (await house.api.get("/v1/policy"))["version"] == 5
        with pytest.raises(EngineRefused, match="version 2, and 5 is published"):
            await engines.publish([one.url], 2)
