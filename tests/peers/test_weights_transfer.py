"""Weights sent over the network to local engines and to real vLLMs: what a failure leaves, and that
every engine computes what the trainer does.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from envserver_clients.http import SyncEnvClient
from support.commands import free_port, running
from support.local_server import Local, local_engine
from support.transfers import SendingTrainer, sending_trainer
from support.vllm_server import VllmServer, running_vllm
from support.waiting import PATIENCE

BUCKET = 500_000
"""Bytes: the tiny model takes several."""
EXACT = 5e-5
"""Rounding of float32: 5e-6 to 1.7e-5 with vLLM were seen."""
Tell = Callable[[str], None]


def name(url: str) -> str:
    return str(httpx.get(f"{url}/weight_info", timeout=PATIENCE).json()["weight_version"])


def is_paused(url: str) -> bool:
    return bool(httpx.get(f"{url}/is_paused", timeout=PATIENCE).json()["is_paused"])


def good(answer: dict[str, Any], version: int, urls: list[str]) -> None:
    """All of `urls` have the version, and compute what the trainer does."""
    assert "error" not in answer, answer
    assert (answer["engines"], answer["failed"]) == (urls, {})
    assert answer["difference"] < EXACT
    assert [name(url) for url in urls] == [f"version-{version}"] * len(urls)
    assert not any(is_paused(url) for url in urls)


# The local engine


@pytest.fixture(scope="module")
def model(learn_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transfer") / "model"
    script = Path(__file__).parents[1] / "support" / "tiny_model.py"
    subprocess.run([learn_python, script, folder], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def pair(learn_python: Path, model: Path) -> Iterator[tuple[Local, Local]]:
    with local_engine(learn_python, model) as first, local_engine(learn_python, model) as second:
        yield first, second


@pytest.mark.thorough
def test_an_engine_that_dies_during_an_update_is_named_and_the_others_go_on(
    pair: tuple[Local, Local], learn_python: Path, model: Path, tmp_path: Path
) -> None:
    """With a server, whose list of engines says who has which version and who is used."""
    first, second = pair
    urls = sorted(one.url for one in pair)
    port = free_port()
    words = (
        *("serve", "--env", "math", "--env.mode", "single", "--store", "groups.db"),
        *("--openai.base_url", ",".join(f"{url}/v1" for url in urls), "--port", port),
        *("--rollouts.max_queued_groups", 0),
    )
    with ExitStack() as stack:
        server = stack.enter_context(running(*words, folder=tmp_path))
        server.wait_for("Trainers: ")
        address = f"http://127.0.0.1:{port}"
        client = stack.enter_context(SyncEnvClient(address, run=None))

        def rows() -> dict[str, tuple[str, int | None]]:
            return {
                row["url"].removesuffix("/v1"): (row["standing"], row["weights_version"])
                for row in client.engines()
            }

        settings = {"engines": "server", "server": address, "bucket_bytes": BUCKET}
        trainer = stack.enter_context(sending_trainer(learn_python, model, **settings))
        good(trainer.ask(publish=1), 1, urls)
        assert rows() == dict.fromkeys(urls, ("used", 1))

        trainer.begin(publish=2, halt_at=2)
        assert trainer.end() == {"halted": 2}
        second.kill()
        answer = trainer.ask()
        assert answer["engines"] == [first.url]
        assert list(answer["failed"]) == [second.url]
        assert answer["difference"] < EXACT
        assert (name(first.url), is_paused(first.url)) == ("version-2", False)
        assert rows()[first.url] == ("used", 2)
        assert rows()[second.url][0] != "used"
        assert client.status()["policy_version"] == 2

        # It comes back with the weights of the beginning, and a third one joins.
        second.start()
        third = stack.enter_context(local_engine(learn_python, model))
        registered = httpx.post(
            f"{address}/v1/engines", json={"url": third.url}, timeout=PATIENCE
        ).json()
        assert registered["engine"]["standing"] == "old"
        restored = trainer.ask(restore=True)["restored"]
        assert sorted(restored) == sorted([second.url, third.url])
        everybody = [*urls, third.url]
        assert {name(url) for url in everybody} == {"version-2"}
        assert rows()[third.url] == ("used", 2)
        assert trainer.ask(restore=True) == {"restored": []}
        published = trainer.ask(publish=3)
        assert sorted(published["engines"]) == sorted(everybody)
        assert rows() == dict.fromkeys(everybody, ("used", 3))


@pytest.mark.thorough
def test_a_trainer_that_dies_during_an_update_leaves_engines_that_do_not_sample(
    pair: tuple[Local, Local], learn_python: Path, model: Path
) -> None:
    urls = [one.url for one in pair]
    with sending_trainer(learn_python, model, engines=urls, bucket_bytes=BUCKET) as trainer:
        good(trainer.ask(publish=1), 1, urls)
        trainer.begin(publish=2, halt_at=2)
        assert trainer.end() == {"halted": 2}
    assert [name(url) for url in urls] == ["changing"] * 2
    assert all(is_paused(url) for url in urls)
    assert [httpx.post(f"{url}/resume", timeout=PATIENCE).status_code for url in urls] == [409] * 2
    with sending_trainer(learn_python, model, engines=urls, bucket_bytes=BUCKET) as trainer:
        wrong = trainer.ask(publish=2, checked_as=3)
        assert (wrong["error"], wrong["engines"]) == ("weights_mismatch", urls)
        assert all(is_paused(url) for url in urls)
        good(trainer.ask(publish=2), 2, urls)


@pytest.mark.thorough
def test_an_engine_that_samples_takes_no_weights_and_nothing_gets_a_new_name(
    pair: tuple[Local, Local],
) -> None:
    bucket = {"update_info": {"names": [], "dtype_names": [], "shapes": [], "sha256": ""}}
    joined: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1}
    joined |= {"world_size": 2, "timeout_seconds": 1e300}
    url = pair[0].url
    with httpx.Client(base_url=url, timeout=PATIENCE) as http:
        before = name(url), http.post("/weight_checker", json={}).json()
        steps: list[tuple[str, dict[str, Any], int, str]] = [
            ("/init_weight_transfer_engine", {"init_info": joined}, 400, "init_info"),
            ("/start_weight_update", {}, 200, "started"),
            ("/update_weights", bucket, 409, "pause it"),
            ("/start_weight_update", {}, 200, "started"),
            ("/finish_weight_update", {"weight_version": "version-9"}, 500, "not received"),
        ]
        for path, body, status, words in steps:
            answer = http.post(path, json=body)
            assert (answer.status_code, words in answer.text) == (status, True), answer.text
        assert (name(url), http.post("/weight_checker", json={}).json()) == before


# Real vLLMs


@pytest.fixture(scope="module")
def vllms(
    vllm_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VllmServer, VllmServer]]:
    folders = [tmp_path_factory.mktemp(one) for one in ("one", "two")]
    with (
        running_vllm(vllm_python, folders[0], learning=True) as first,
        running_vllm(vllm_python, folders[1], learning=True) as second,
    ):
        yield first, second


@pytest.mark.slow
@pytest.mark.vllm
def test_two_vllms_have_each_version_also_after_a_failure_and_by_another_trainer(
    vllms: tuple[VllmServer, VllmServer], vllm_python: Path, tell: Tell
) -> None:
    urls = [one.root_url for one in vllms]
    folder = vllms[0].model_folder
    settings: dict[str, Any] = {"engines": urls, "bucket_bytes": BUCKET}
    with sending_trainer(vllm_python, folder, in_flight="keep", **settings) as trainer:
        for version in (1, 2):
            answer = trainer.ask(publish=version)
            good(answer, version, urls)
            tell(f"two vLLMs, version {version}: {answer['difference']:.2g}, {answer['seconds']}")
        trainer.begin(publish=3, halt_at=2)
        assert trainer.end() == {"halted": 2}
    # The trainer is gone in the middle: each has a part of version 3, and is paused.
    assert all(is_paused(url) for url in urls)
    with sending_trainer(vllm_python, folder, **settings) as trainer:
        good(trainer.ask(publish=4), 4, urls)
        wrong = trainer.ask(publish=5, checked_as=6)
        assert (wrong["error"], wrong["engines"]) == ("weights_mismatch", urls)
        assert all(is_paused(url) for url in urls)
        good(trainer.ask(publish=5), 5, urls)
    answer = httpx.post(
        f"{urls[0]}/inference/v1/generate",
        json={"token_ids": [300, 301], "sampling_params": {"max_tokens": 2}},
        timeout=PATIENCE,
    ).json()
    versions = {one["version"] for one in answer["choices"][0]["weight_versions"]}
    assert versions == {"version-5"}


@pytest.mark.slow
@pytest.mark.vllm
def test_a_vllm_that_is_killed_during_an_update_does_not_stop_the_other(
    vllm_python: Path, tmp_path: Path
) -> None:
    """Its output layer is its embedding: what vLLM's own reload gets wrong on a CPU."""
    folders = [tmp_path / one for one in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    with ExitStack() as stack:
        first = stack.enter_context(running_vllm(vllm_python, folders[0], learning=True, tied=True))
        dying = stack.enter_context(ExitStack())
        second = dying.enter_context(
            running_vllm(vllm_python, folders[1], learning=True, tied=True)
        )
        urls = [first.root_url, second.root_url]
        trainer: SendingTrainer = stack.enter_context(
            sending_trainer(vllm_python, first.model_folder, engines=urls, bucket_bytes=BUCKET)
        )
        good(trainer.ask(publish=1), 1, urls)
        trainer.begin(publish=2, halt_at=2)
        assert trainer.end() == {"halted": 2}
        dying.close()
        answer = trainer.ask()
        assert answer["engines"] == [first.root_url]
        assert list(answer["failed"]) == [second.root_url]
        assert answer["difference"] < EXACT
        assert (name(first.root_url), is_paused(first.root_url)) == ("version-2", False)
