"""New weights for the local engine, while agents sample, and while the engine is killed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import httpx
import pytest
from envserver_clients.http import SyncEnvClient
from envserver_clients.weights import LocalFull, Lora, WeightPush
from support.local_server import Local, local_engine
from support.versions import ROUNDING, VersionMaker, version_maker
from support.waiting import PATIENCE
from support.weights_house import prove

from envserver import EngineUnavailable

WRONG = 0.05
Tell = Callable[[str], None]


@pytest.fixture(scope="module")
def model(learn_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local") / "model"
    script = Path(__file__).parents[1] / "support" / "tiny_model.py"
    subprocess.run([learn_python, script, folder], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def engine(learn_python: Path, model: Path) -> Iterator[Local]:
    with local_engine(learn_python, model) as made:
        yield made


def proven(
    engine: Local,
    folder: Path,
    maker: VersionMaker,
    make_push: Callable[[SyncEnvClient], WeightPush],
    tell: Tell,
    *words: object,
    count: int = 3,
) -> None:
    versions = range(1, count + 1)
    every = ("--openai.num_max_requests_at_once", 1, "--sampling.max_tokens", 32, *words)
    proof = prove(folder, f"{engine.url}/v1", maker, make_push, versions, every)
    tell(proof.table(f"local engine, {' '.join(map(str, words)) or 'full weights'}"))
    assert set(versions) <= set(proof.tokens)
    assert proof.furthest < ROUNDING
    assert proof.nearest_other > WRONG


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 20])
def test_each_token_is_of_the_adapter_that_it_names(
    engine: Local, learn_python: Path, tmp_path: Path, count: int, tell: Tell
) -> None:
    with version_maker(learn_python, engine.model, "lora") as maker:
        proven(
            engine,
            tmp_path,
            maker,
            lambda client: Lora(engine.url, tmp_path / "weights", keep=2, server=client),
            tell,
            *("--openai.model_name", "policy@{version}"),
            count=count,
        )


@pytest.mark.parametrize("in_flight", [pytest.param("drain", marks=pytest.mark.slow), "abort"])
def test_each_token_is_of_the_weights_that_it_names(
    engine: Local,
    learn_python: Path,
    tmp_path: Path,
    in_flight: Literal["drain", "abort"],
    tell: Tell,
) -> None:
    with version_maker(learn_python, engine.model, "full") as maker:
        proven(
            engine,
            tmp_path,
            maker,
            lambda client: LocalFull(
                engine.url, tmp_path / "weights", in_flight=in_flight, server=client
            ),
            tell,
        )


@pytest.mark.slow
def test_an_engine_that_is_killed_and_started_again_gets_its_weights_anew(
    learn_python: Path, model: Path, tmp_path: Path
) -> None:
    with (
        local_engine(learn_python, model) as engine,
        version_maker(learn_python, model, "full") as full,
        version_maker(learn_python, model, "lora") as lora,
    ):
        adapters = Lora(engine.url, tmp_path / "adapters")
        adapters.publish(1, lora.saver(1), lora.check(1))
        weights = LocalFull(engine.url, tmp_path / "weights")
        weights.publish(2, full.saver(2), full.check(2))
        engine.kill()
        assert weights.restore() == adapters.restore() == []
        with pytest.raises(EngineUnavailable, match="at reach"):
            weights.publish(3, full.saver(3), full.check(3))
        engine.start()
        # Before anything else is published: the last version, and every adapter that is kept.
        assert weights.restore() == adapters.restore() == [engine.url]
        assert httpx.get(f"{engine.url}/weight_info", timeout=PATIENCE).json() == {
            "weight_version": "version-2"
        }
        weights.publish(3, full.saver(3), full.check(3))
        served = {
            card["id"]
            for card in httpx.get(f"{engine.url}/v1/models", timeout=PATIENCE).json()["data"]
        }
        assert served == {"tiny", "policy@1"}
