"""Weights on their way to engines: the order of steps, the guards, and what each failure leaves."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import pytest
from envserver_clients.http import SyncEnvClient
from envserver_clients.weights import (
    LocalFull,
    Lora,
    PromptCheck,
    Timeouts,
    VllmFull,
    WeightsMismatch,
    WeightsNotSaved,
)
from support.api import running_api
from support.beside import beside
from support.commands import free_port
from support.waiting import PATIENCE
from support.weights_engine import ScriptedEngine, check, saver, scripted_engine

from envserver import (
    ConflictError,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    InputError,
)
from envserver.proxy import Gate

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

    def __init__(self, url: str, gate: Gate, client: SyncEnvClient) -> None:
        self.url, self.gate, self.client = url, gate, client

    @property
    def state(self) -> tuple[bool, int]:
        """Whether calls are paused, and the version."""
        return self.gate.paused, int(self.client.status()["policy_version"])


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    gate, urls = Gate(), list[str]()

    async def serve(started: threading.Event, ended: Any) -> None:
        async with running_api(tmp_path / "store.db", gate=gate) as api:
            urls.append(api.url)
            started.set()
            await ended.wait()

    with beside(serve), SyncEnvClient(urls[0], run=None) as client:
        yield House(urls[0], gate, client)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# All weights


@pytest.mark.parametrize("kind", [LocalFull, VllmFull])
def test_a_version_is_given_in_order_and_checked(
    engine: ScriptedEngine, tmp_path: Path, kind: type[LocalFull]
) -> None:
    push = kind(f"{engine.url}/v1", tmp_path / "weights")
    for version in range(1, 5):
        published = push.publish(version, saver(version), check(version))
        assert (engine.weights, engine.name) == (version, f"version-{version}")
        assert published.difference is not None
        assert published.difference < 1e-6
        assert not engine.paused
    assert engine.steps == [step.format(version) for version in range(1, 5) for step in FULL_PUSH]
    assert names(tmp_path / "weights") == ["version-3", "version-4"]


def test_the_same_version_again_is_given_anew(engine: ScriptedEngine, tmp_path: Path) -> None:
    push = LocalFull(engine.url, tmp_path)
    push.publish(3, saver(3), check(3))
    published = push.publish(3, saver(3), check(3))
    assert published.folder.name == "version-3.1"
    assert engine.steps == [step.format(3) for step in FULL_PUSH] * 2
    # A trainer that was started again goes on where it ended.
    assert LocalFull(engine.url, tmp_path).publish(3, saver(3)).folder.name == "version-3.2"


@pytest.mark.parametrize(
    ("in_flight", "mode"), [("drain", "wait"), ("keep", "keep"), ("abort", "abort")]
)
def test_the_server_holds_calls_meanwhile_and_knows_the_version_then(
    engine: ScriptedEngine, house: House, tmp_path: Path, in_flight: Any, mode: str
) -> None:
    seen = []
    engine.on["/collective_rpc"] = lambda: seen.append(house.state)
    push = LocalFull(engine.url, tmp_path / "w", server=house.client, in_flight=in_flight)
    push.publish(7, saver(7), check(7))
    assert engine.steps[0] == f"pause {mode}"
    assert seen == [(True, -1)]
    assert house.state == (False, 7)


def test_a_version_below_the_servers_is_refused_before_anything_is_done(
    engine: ScriptedEngine, house: House, tmp_path: Path
) -> None:
    house.client.publish_policy_version(9)
    with pytest.raises(ConflictError, match="version 9, above 8"):
        LocalFull(engine.url, tmp_path / "w", server=house.client).publish(8, saver(8))
    assert engine.steps == []
    assert not (tmp_path / "w").exists()


def test_a_mismatch_leaves_everything_paused_and_names_the_old_version(
    engine: ScriptedEngine, house: House, tmp_path: Path
) -> None:
    push = LocalFull(engine.url, tmp_path / "w", server=house.client)
    push.publish(1, saver(1), check(1))
    engine.stubborn = True
    with pytest.raises(WeightsMismatch, match=r"by 0\.1 at token 0") as caught:
        push.publish(2, saver(2), check(2))
    detail = caught.value.detail
    assert (detail["version"], detail["old_version"]) == (2, 1)
    assert detail["engines"] == [engine.url]
    assert engine.steps[-1] == "pause abort"
    assert house.state == (True, 1)
    engine.stubborn = False
    push.publish(2, saver(2), check(2))
    assert house.state == (False, 2)
    assert not engine.paused


def test_an_engine_that_is_started_again_within_a_push_is_noticed(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    push = LocalFull(engine.url, tmp_path)

    def restart() -> None:
        engine.on.clear()
        engine.start_again()

    engine.on["/resume"] = restart
    with pytest.raises(EngineUnavailable, match="restarted meanwhile"):
        push.publish(1, saver(1), check(1))
    assert engine.paused
    push.publish(1, saver(1), check(1))
    assert engine.weights == 1


def test_an_engine_that_is_started_again_later_gets_them_anew(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    push = LocalFull(engine.url, tmp_path)
    assert push.restore() == []
    push.publish(5, saver(5), check(5))
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


def test_an_engine_that_is_not_there_is_told_before_anything_is_done(
    engine: ScriptedEngine, house: House, tmp_path: Path
) -> None:
    away = f"http://127.0.0.1:{free_port()}"
    push = LocalFull([engine.url, away], tmp_path / "w", server=house.client)
    with pytest.raises(EngineUnavailable, match=f"1 of 2 engines failed at reach: {away}") as no:
        push.publish(1, saver(1))
    assert no.value.detail["engines"] == [away]
    assert engine.steps == []
    assert house.state == (False, -1)


def test_calls_go_on_where_an_engine_cannot_be_paused_and_nothing_was_changed(
    engines: list[ScriptedEngine], house: House, tmp_path: Path
) -> None:
    urls = [engine.url for engine in engines]
    push = LocalFull(urls, tmp_path / "w", server=house.client)
    push.publish(1, saver(1), check(1))
    engines[1].refuse["/pause"] = 503
    with pytest.raises(EngineUnavailable, match="at pause"):
        push.publish(2, saver(2), check(2))
    assert house.state == (False, 1)
    assert [(engine.weights, engine.paused) for engine in engines] == [(1, False)] * 3


@pytest.mark.parametrize("path", ["/collective_rpc", "/reset_prefix_cache", "/v1/completions"])
@pytest.mark.parametrize("status", [500, 503])
def test_all_engines_or_none(
    engines: list[ScriptedEngine], house: House, tmp_path: Path, path: str, status: int
) -> None:
    """One fails in the middle: nothing is sampled anywhere until all have the same again."""
    urls = [engine.url for engine in engines]
    push = LocalFull(urls, tmp_path / "w", server=house.client)
    push.publish(1, saver(1), check(1))
    engines[2].refuse = {path: status}
    with pytest.raises(Exception, match="1 of 3 engines failed") as caught:
        push.publish(2, saver(2), check(2))
    assert caught.value.detail["engines"] == [urls[2]]  # type: ignore[attr-defined]
    assert house.state == (True, 1)
    assert all(engine.paused for engine in engines)
    # Nor do calls go on when the next try fails early: two engines have other weights.
    engines[2].refuse = {"/pause": 503}
    with pytest.raises(EngineUnavailable):
        push.publish(2, saver(2), check(2))
    assert house.state == (True, 1)
    engines[2].start_again()
    engines[2].refuse = {}
    push.publish(2, saver(2), check(2))
    assert house.state == (False, 2)
    assert [(engine.weights, engine.paused) for engine in engines] == [(2, False)] * 3


@pytest.mark.parametrize("path", ["/weight_info", "/collective_rpc"])
def test_an_engine_without_what_is_needed_is_told_how_to_start_it(
    engine: ScriptedEngine, house: House, tmp_path: Path, path: str
) -> None:
    engine.refuse[path] = 404 if path == "/weight_info" else 500
    push = VllmFull(engine.url, tmp_path / "w", server=house.client)
    with pytest.raises(EngineRefused, match="--worker-extension-cls"):
        push.publish(1, saver(1))
    assert house.state == (False, -1)


def test_each_phase_has_its_own_time(engine: ScriptedEngine, tmp_path: Path) -> None:
    free = threading.Event()

    def hang() -> None:
        free.wait(PATIENCE)

    engine.on["/collective_rpc"] = hang
    push = LocalFull(engine.url, tmp_path, timeouts=Timeouts(load=0.05))
    with pytest.raises(EngineTimeout, match=r"load took longer than 0\.05 s"):
        push.publish(1, saver(1))
    free.set()


# Files


def full_disk(folder: Path) -> NoReturn:
    (folder / "half").write_text("x")
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("kind", [LocalFull, Lora])
def test_a_full_disk_is_told_and_leaves_nothing(
    engine: ScriptedEngine, house: House, tmp_path: Path, kind: type[LocalFull]
) -> None:
    push = kind(engine.url, tmp_path / "w", server=house.client)
    push.publish(1, saver(1))
    engine.steps.clear()
    with pytest.raises(WeightsNotSaved, match="The disk is full") as caught:
        push.publish(2, full_disk)
    assert caught.value.detail["full"]
    assert names(tmp_path / "w") == ["version-1"]
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


def test_a_folder_that_the_engine_sees_elsewhere(engine: ScriptedEngine, tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").symlink_to(tmp_path / "ours")
    paths: list[str] = []
    push = Lora(engine.url, tmp_path / "ours", engine_folder=tmp_path / "theirs")
    answer = engine.answer

    def spy(path: str, query: str, body: Any) -> Any:
        if body and "lora_path" in body:
            paths.append(body["lora_path"])
        return answer(path, query, body)

    engine.answer = spy  # type: ignore[method-assign]
    push.publish(1, saver(1), check(1))
    assert paths == [str(tmp_path / "theirs" / "version-1")]


# Adapters


def test_each_version_is_an_adapter_of_its_own_and_old_ones_go(
    engine: ScriptedEngine, house: House, tmp_path: Path
) -> None:
    push = Lora(engine.url, tmp_path / "w", keep=2, server=house.client)
    engine.adapters = {"other@1": 1}
    for version in range(1, 5):
        engine.busy = "policy@1" if version < 4 else ""
        published = push.publish(version, saver(version), check(version))
        assert published.model == f"policy@{version}"
        assert house.state == (False, version)
        # A call samples with the first one still: it stays until none does.
        assert ("policy@1" in engine.adapters) == (version < 4)
    assert engine.adapters == {"other@1": 1, "policy@3": 3, "policy@4": 4}
    assert names(tmp_path / "w") == ["version-3", "version-4"]
    assert not any(step.startswith("pause") for step in engine.steps)


def test_adapters_are_on_all_engines_or_on_none(
    engines: list[ScriptedEngine], house: House, tmp_path: Path
) -> None:
    push = Lora([engine.url for engine in engines], tmp_path / "w", server=house.client)
    push.publish(1, saver(1), check(1))
    engines[0].refuse = {"/v1/load_lora_adapter": 500}
    with pytest.raises(Exception, match="1 of 3 engines failed at load"):
        push.publish(2, saver(2), check(2))
    engines[0].refuse = {}
    with pytest.raises(WeightsMismatch, match="policy@1 is served as before"):
        push.publish(2, saver(3), check(2))
    assert [engine.adapters for engine in engines] == [{"policy@1": 1}] * 3
    assert house.state == (False, 1)
    push.publish(2, saver(2), check(2))
    engines[1].start_again()
    assert push.restore() == [engines[1].url]
    assert engines[1].adapters == {"policy@1": 1, "policy@2": 2}


def test_a_check_compares_something() -> None:
    with pytest.raises(InputError, match="at least one completion token"):
        PromptCheck([], [1], [0.0])
    with pytest.raises(InputError, match="2 tokens and 1 logprobs"):
        PromptCheck([1], [1, 2], [0.0])
    far, token = check(1).widest([-0.1, float("nan")])
    assert (far, token) == (float("inf"), 1)
