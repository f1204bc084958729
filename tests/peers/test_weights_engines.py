"""New weights for the local engine and for real vLLMs, while agents sample, as files and over the
network: every delivered token is of the version that it says, by the logprobs that the trainer's
own forward pass gives; and what a failure leaves.
"""

import contextlib
import json
import subprocess
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import pytest
from envserver_clients.http import SyncEnvClient
from envserver_clients.records import Row
from envserver_clients.weights import (
    LocalFull,
    Lora,
    Published,
    VllmFull,
    WeightPush,
    WeightsMismatch,
)
from support.commands import free_port, running
from support.foreign_trainers import random_model
from support.learning import variables
from support.versions import ROUNDING, LineProcess, VersionMaker, line_process, version_maker
from support.vllm_server import VllmServer, running_vllm
from support.waiting import PATIENCE


@dataclass
class Local:
    """An engine of ours that can be killed and started again at its address."""

    python: Path
    model: Path
    port: int
    process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        words = (
            *("--model", self.model, "--served-model-name", "tiny", "--port", str(self.port)),
            *("--dtype", "float32", "--enable-lora", "--threads", "1"),
        )
        self.process = subprocess.Popen(
            [self.python, "-m", "envserver_local", *words],
            stdout=subprocess.PIPE,
            text=True,
            env=variables(),
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith(self.url)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(PATIENCE)


@contextlib.contextmanager
def local_engine(python: Path, model: Path) -> Iterator[Local]:
    engine = Local(python, model, free_port())
    engine.start()
    try:
        yield engine
    finally:
        engine.kill()


def sending_trainer(
    python: Path, model: Path, **settings: Any
) -> contextlib.AbstractContextManager[LineProcess]:
    """A trainer of the model in the folder `model`; `settings` are those of `Transfer`."""
    return line_process(LineProcess, python, "transfer_process.py", model, json.dumps(settings))


_SERVE = (
    "serve", "--env", "math", "--env.mode", "single", "--env.group_size", 2,
    "--env.ensure_scores_are_not_same", "false", "--workers.processes", 1, "--store", "groups.db",
    "--openai.mode", "tokens", "--rollouts.max_concurrent", 4,
)  # fmt: skip


@dataclass
class Proof:
    """
    Args:
        published: what each publish told.
        tokens: trained tokens by version.
        mixed: rows with tokens of more than one version.
        furthest: the greatest difference of a token's logprob from the trainer's own, with the
            weights of the version that the token carries.
        nearest_other: the least, over the rows, of how far the weights of the next version are from
            a row: what a wrong version would look like.
    """

    published: list[Published] = field(default_factory=list)
    tokens: Counter[int] = field(default_factory=Counter)
    rows: int = 0
    mixed: int = 0
    furthest: float = 0.0
    nearest_other: float = float("inf")

    def add(self, row: Row, maker: VersionMaker) -> None:
        """Scores a row with the weights of each version in it."""
        assert row.logprobs is not None
        trained = row.mask.astype(bool)
        versions = sorted(set(row.versions[trained].tolist()))
        self.rows += 1
        self.mixed += len(versions) > 1
        for version in versions:
            here = np.flatnonzero(trained & (row.versions == version))
            own, other = (_apart(row, here, maker, one) for one in (version, version + 1))
            self.tokens[version] += len(here)
            self.furthest = max(self.furthest, own)
            if len(versions) == 1 and len(here) > 3:
                self.nearest_other = min(self.nearest_other, other)

    def table(self, title: str) -> str:
        checked = max(one.difference or 0.0 for one in self.published)
        return (
            f"{title}: {len(self.published)} versions, {self.rows} rows ({self.mixed} of several "
            f"versions), {self.tokens.total()} tokens; furthest {self.furthest:.2g} from the "
            f"trainer (checks {checked:.2g}), a wrong version {self.nearest_other:.2g} at least"
        )


def _apart(row: Row, here: np.ndarray[Any, Any], maker: VersionMaker, version: int) -> float:
    assert row.logprobs is not None
    (scored,) = maker.score(version, [row.tokens.tolist()])
    return float(np.abs(np.asarray(scored)[here - 1] - row.logprobs[here]).max())


def prove(
    folder: Path,
    base_url: str,
    maker: VersionMaker,
    make_push: Callable[[SyncEnvClient], WeightPush],
    versions: Collection[int],
    words: Sequence[object] = (),
    enough: Callable[[Proof], bool] = lambda _: False,
) -> Proof:
    """Publishes `versions` while agents sample, and leases until tokens of each have come.

    Args:
        words: more settings of the server.
        enough: asked after each version; True leaves the rest out.
    """
    proof, port, made = Proof(), free_port(), set(versions)
    engine = ("--openai.base_url", base_url, "--port", port)
    with running(*_SERVE, *engine, *words, folder=folder) as server:
        server.wait_for("Trainers: ")
        with SyncEnvClient(f"http://127.0.0.1:{port}", run="trainer", batch_size=1) as client:
            push = make_push(client)
            for version in versions:
                check = maker.check(version)
                proof.published.append(push.publish(version, maker.saver(version), check))
                while not proof.tokens[version]:
                    batch = next(client.batches(idle_seconds=PATIENCE))
                    for row in batch.rows:
                        # Before the first publish the engine may have any weights.
                        if set(row.versions[row.mask.astype(bool)].tolist()) <= made:
                            proof.add(row, maker)
                    client.ack(batch)
                if enough(proof):
                    break
    return proof


# Sent over the network to local engines


BUCKET = 500_000
"""Bytes: the tiny model takes several."""
EXACT = 5e-5
"""Rounding of float32: 5e-6 to 1.7e-5 with vLLM were seen."""

Tell = Callable[[str], None]


def name(url: str) -> str:
    return str(httpx.get(f"{url}/weight_info", timeout=PATIENCE).json()["weight_version"])


def is_paused(url: str) -> bool:
    return bool(httpx.get(f"{url}/is_paused", timeout=PATIENCE).json()["is_paused"])


def served_by(base_url: str) -> set[str]:
    """Names of the models that an engine has."""
    return {card["id"] for card in httpx.get(f"{base_url}/models", timeout=PATIENCE).json()["data"]}


def good(answer: dict[str, Any], version: int, urls: list[str]) -> None:
    """All of `urls` have the version, and compute what the trainer does."""
    assert "error" not in answer, answer
    assert (answer["engines"], answer["failed"]) == (urls, {})
    assert answer["difference"] < EXACT
    assert [name(url) for url in urls] == [f"version-{version}"] * len(urls)
    assert not any(is_paused(url) for url in urls)


@pytest.fixture(scope="module")
def pair(learn_python: Path, model: Path) -> Iterator[tuple[Local, Local]]:
    with local_engine(learn_python, model) as first, local_engine(learn_python, model) as second:
        yield first, second


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
        stack.enter_context(running(*words, folder=tmp_path)).wait_for("Trainers: ")
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
        assert sorted(trainer.ask(restore=True)["restored"]) == sorted([second.url, third.url])
        everybody = [*urls, third.url]
        assert {name(url) for url in everybody} == {"version-2"}
        assert rows()[third.url] == ("used", 2)
        assert trainer.ask(restore=True) == {"restored": []}
        assert sorted(trainer.ask(publish=3)["engines"]) == sorted(everybody)
        assert rows() == dict.fromkeys(everybody, ("used", 3))


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


# Real vLLMs


@pytest.fixture(scope="module")
def vllms(
    vllm_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VllmServer, VllmServer]]:
    """Their output layer is their embedding: what vLLM's own reload gets wrong on a CPU."""
    folders = [tmp_path_factory.mktemp(one) for one in ("one", "two")]
    with (
        running_vllm(vllm_python, folders[0], learning=True, tied=True) as first,
        running_vllm(vllm_python, folders[1], learning=True, tied=True) as second,
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
    assert {one["version"] for one in answer["choices"][0]["weight_versions"]} == {"version-5"}


# For the local engine, as files


WRONG = 0.05
"""A wrong version is this far away at least."""


@pytest.fixture(scope="module")
def model(learn_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(learn_python, tmp_path_factory.mktemp("local") / "model")


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
) -> None:
    versions = range(1, 4)
    every = ("--openai.num_max_requests_at_once", 1, "--sampling.max_tokens", 32, *words)
    proof = prove(folder, f"{engine.url}/v1", maker, make_push, versions, every)
    tell(proof.table(f"local engine, {' '.join(map(str, words)) or 'full weights'}"))
    held(proof, versions)


@pytest.mark.slow
def test_each_token_is_of_the_adapter_that_it_names(
    engine: Local, learn_python: Path, tmp_path: Path, tell: Tell
) -> None:
    with version_maker(learn_python, engine.model, "lora") as maker:
        proven(
            engine,
            tmp_path,
            maker,
            lambda client: Lora(engine.url, tmp_path / "weights", keep=2, server=client),
            tell,
            *("--openai.model_name", "policy@{version}"),
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


# For a real vLLM, as files


ONE_AT_A_TIME = ("--openai.num_max_requests_at_once", 1, "--sampling.max_tokens")
"""Calls that share a batch are added up in another order."""


@pytest.fixture(scope="module")
def untied(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    with running_vllm(vllm_python, tmp_path_factory.mktemp("untied"), learning=True) as server:
        yield server


def held(proof: Proof, versions: range) -> None:
    assert set(versions) <= set(proof.tokens)
    assert proof.furthest < ROUNDING
    assert proof.nearest_other > WRONG
    assert all(one.difference is not None for one in proof.published)


@pytest.mark.vllm
@pytest.mark.parametrize("count", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_each_token_of_vllm_is_of_the_adapter_that_it_names(
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
    names = served_by(learning_vllm.base_url) - {learning_vllm.model}
    assert {f"policy@{version}" for version in versions[-3:]} <= names
    assert len(names) <= 5


@pytest.mark.vllm
@pytest.mark.parametrize("in_flight", [pytest.param("drain", marks=pytest.mark.slow), "keep"])
def test_each_token_of_vllm_is_of_the_weights_that_it_names(
    learning_vllm: VllmServer,
    vllm_python: Path,
    tmp_path: Path,
    in_flight: Literal["drain", "keep"],
    tell: Tell,
) -> None:
    proof = full_weights(learning_vllm, vllm_python, tmp_path, in_flight, tell)
    assert (proof.mixed > 0) == (in_flight == "keep")


@pytest.mark.vllm
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
    versions are published until one met a call at the engine."""
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


@pytest.mark.vllm
def test_faults_are_seen(learning_vllm: VllmServer, vllm_python: Path, tmp_path: Path) -> None:
    with version_maker(vllm_python, learning_vllm.model_folder, "full") as maker:
        right = VllmFull(learning_vllm.base_url, tmp_path / "right")
        right.publish(1, maker.saver(1), maker.check(1))
        plain = LocalFull(learning_vllm.base_url, tmp_path / "plain")
        with pytest.raises(WeightsMismatch, match="version 2"):
            plain.publish(2, maker.saver(2), maker.check(2))  # vLLM's own reload
        assert is_paused(learning_vllm.root_url)
        right.publish(2, maker.saver(2), maker.check(2))
        # As after a restart: it names other weights than were published.
        httpx.post(
            f"{learning_vllm.root_url}/update_weight_version",
            json={"new_version": "default"},
            timeout=PATIENCE,
        )
        assert right.restore() == [learning_vllm.root_url]
        assert right.restore() == []


@pytest.mark.vllm
def test_an_adapter_that_is_not_the_trainers_is_not_published(
    learning_vllm: VllmServer, vllm_python: Path, tmp_path: Path
) -> None:
    learning_vllm.begin_anew(tmp_path)  # adapters are made for these weights
    with version_maker(vllm_python, learning_vllm.model_folder, "lora") as maker:
        push = Lora(learning_vllm.base_url, tmp_path / "weights", name="other")
        push.publish(1, maker.saver(1), maker.check(1))
        with pytest.raises(WeightsMismatch, match="other@1 is served as before"):
            push.publish(2, maker.saver(3), maker.check(2))
    served = served_by(learning_vllm.base_url)
    assert "other@1" in served
    assert "other@2" not in served
