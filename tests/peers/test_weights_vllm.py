"""New weights for a real vLLM, while agents sample: every delivered token is of the version that it
says, by the logprobs that the trainer's own forward pass gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import httpx
import pytest
from envserver_clients.weights import LocalFull, Lora, VllmFull, WeightsMismatch
from support.versions import ROUNDING, version_maker
from support.vllm_server import VllmServer, running_vllm
from support.waiting import PATIENCE
from support.weights_house import Proof, prove

pytestmark = pytest.mark.vllm

ONE_AT_A_TIME = ("--openai.num_max_requests_at_once", 1, "--sampling.max_tokens")
"""Calls that share a batch are added up in another order."""
WRONG = 0.05
"""A wrong version is this far away at least."""

Tell = Callable[[str], None]


@pytest.fixture(scope="module")
def untied(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    with running_vllm(vllm_python, tmp_path_factory.mktemp("untied"), learning=True) as server:
        yield server


def held(proof: Proof, versions: range, tolerance: float = ROUNDING) -> None:
    assert set(versions) <= set(proof.tokens)
    assert proof.furthest < tolerance
    assert proof.nearest_other > WRONG
    assert all(one.difference is not None for one in proof.published)


@pytest.mark.parametrize("count", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_each_token_is_of_the_adapter_that_it_names(
    learning_vllm: VllmServer, vllm_python: Path, tmp_path: Path, count: int, tell: Tell
) -> None:
    """Published while calls are in flight: they end with the adapter that they began with."""
    learning_vllm.begin_anew(tmp_path)  # adapters are made for these weights
    versions = range(1, count + 1)
    with version_maker(vllm_python, learning_vllm.model_folder, "lora") as maker:
        proof = prove(
            tmp_path,
            learning_vllm.base_url,
            maker,
            lambda client: Lora(
                learning_vllm.base_url, tmp_path / "weights", keep=3, server=client
            ),
            versions,
            ("--openai.model_name", "policy@{version}", *ONE_AT_A_TIME, 32),
        )
    tell(proof.table(f"vLLM, LoRA, {count} versions"))
    held(proof, versions)
    assert proof.mixed == 0
    served = httpx.get(f"{learning_vllm.base_url}/models", timeout=PATIENCE).json()["data"]
    names = {card["id"] for card in served} - {learning_vllm.model}
    assert {f"policy@{version}" for version in versions[-3:]} <= names
    assert len(names) <= 5


@pytest.mark.parametrize("in_flight", [pytest.param("drain", marks=pytest.mark.slow), "keep"])
def test_each_token_is_of_the_weights_that_it_names(
    learning_vllm: VllmServer,
    vllm_python: Path,
    tmp_path: Path,
    in_flight: Literal["drain", "keep"],
    tell: Tell,
) -> None:
    proof = full_weights(learning_vllm, vllm_python, tmp_path, in_flight, tell)
    assert (proof.mixed > 0) == (in_flight == "keep")


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", ["drain", "keep", "abort"])
def test_the_same_of_a_model_whose_output_layer_is_its_own(
    untied: VllmServer,
    vllm_python: Path,
    tmp_path: Path,
    in_flight: Literal["drain", "keep", "abort"],
    tell: Tell,
) -> None:
    proof = full_weights(untied, vllm_python, tmp_path, in_flight, tell)
    assert not proof.mixed or in_flight == "keep"  # its answers may all be too short for it


def full_weights(
    engine: VllmServer,
    python: Path,
    folder: Path,
    in_flight: Literal["drain", "keep", "abort"],
    tell: Tell,
) -> Proof:
    """Three versions; with keep, calls go on over the update, and their tokens are of both: more
    versions are published until one met a call at the engine.
    """
    versions = range(1, 21 if in_flight == "keep" else 4)
    with version_maker(python, engine.model_folder, "full") as maker:
        proof = prove(
            folder,
            engine.base_url,
            maker,
            lambda client: VllmFull(
                engine.base_url, folder / "weights", in_flight=in_flight, server=client
            ),
            versions,
            (*ONE_AT_A_TIME, 96 if in_flight == "keep" else 32),
            enough=lambda proof: len(proof.published) >= 3 and proof.mixed > 0,
        )
    tell(proof.table(f"vLLM, full weights, {in_flight}"))
    held(proof, versions[: len(proof.published)])
    return proof


def test_what_would_go_wrong_unseen_is_seen(
    learning_vllm: VllmServer, vllm_python: Path, tmp_path: Path
) -> None:
    with version_maker(vllm_python, learning_vllm.model_folder, "full") as maker:
        right = VllmFull(learning_vllm.base_url, tmp_path / "right")
        right.publish(1, maker.saver(1), maker.check(1))
        plain = LocalFull(learning_vllm.base_url, tmp_path / "plain")
        with pytest.raises(WeightsMismatch, match="version 2"):
            plain.publish(2, maker.saver(2), maker.check(2))  # vLLM's own reload
        assert httpx.get(f"{learning_vllm.root_url}/is_paused", timeout=PATIENCE).json()[
            "is_paused"
        ]
        right.publish(2, maker.saver(2), maker.check(2))
        # As after a restart: it names other weights than were published.
        httpx.post(
            f"{learning_vllm.root_url}/update_weight_version",
            json={"new_version": "default"},
            timeout=PATIENCE,
        )
        assert right.restore() == [learning_vllm.root_url]
        assert right.restore() == []


def test_an_adapter_that_is_not_the_trainers_is_not_published(
    learning_vllm: VllmServer, vllm_python: Path, tmp_path: Path
) -> None:
    learning_vllm.begin_anew(tmp_path)  # adapters are made for these weights
    with version_maker(vllm_python, learning_vllm.model_folder, "lora") as maker:
        push = Lora(learning_vllm.base_url, tmp_path / "weights", name="other")
        push.publish(1, maker.saver(1), maker.check(1))
        with pytest.raises(WeightsMismatch, match="other@1 is served as before"):
            push.publish(2, maker.saver(3), maker.check(2))
    served = {
        card["id"]
        for card in httpx.get(f"{learning_vllm.base_url}/models", timeout=PATIENCE).json()["data"]
    }
    assert "other@1" in served
    assert "other@2" not in served
