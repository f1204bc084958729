"""Evaluations of a held-out split while a server trains, over HTTP with the simulated engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from envserver_records.errors import ConfigError
from support.cases import cases_of
from support.commands import envserver as command
from support.waiting import PATIENCE, until

import envserver

CASES = cases_of(__file__)

WAITS = CASES["waits"]
"""Two calls; between them, the rollouts of the split test wait for a file."""


class Served:
    """A server that trains and evaluates, over HTTP."""

    def __init__(self, http: httpx.AsyncClient, folder: Path) -> None:
        self.http, self.folder = http, folder

    async def publish(self, version: int) -> None:
        answer = await self.http.post("/v1/policy-version", json={"version": version})
        answer.raise_for_status()

    async def evaluations(self) -> list[dict[str, Any]]:
        answer = (await self.http.get("/v1/evaluations")).raise_for_status()
        return list(answer.json()["evaluations"])

    async def until(self, *wanted: tuple[int, str]) -> None:
        """Waits until there are these evaluations: version and state."""

        async def holds() -> bool:
            return [(one["version"], one["state"]) for one in await self.evaluations()] == [*wanted]

        await until(holds)

    async def until_asked(self) -> None:
        """Waits until all rollouts of an evaluation are between their two calls."""
        await until(lambda: len([*self.folder.glob("asked-*")]) == 2)

    async def metric(self, line: str) -> float:
        text = (await self.http.get("/metrics")).text
        (found,) = [one for one in text.splitlines() if one.startswith(f"{line} ")]
        return float(found.rpartition(" ")[2])


@asynccontextmanager
async def serving(
    folder: Path, environment: str = "math", own: dict[str, Any] | None = None, **evaluate: Any
) -> AsyncIterator[Served]:
    async with (
        envserver.aio.serve(
            environment,
            model="sim",
            sim={"latency_seconds": 0},
            env={"group_size": 2, "ensure_scores_are_not_same": False, **(own or {})},
            rollouts={"max_queued_groups": 2, "max_concurrent": 2},
            workers={"processes": 1},
            store=str(folder / "groups.db"),
            server={"port": 0, "drain_seconds": 0},
            track=["jsonl"],
            tracking={"folder": folder, "name": "track", "seconds": 0.1},
            evaluate={"total_steps": 3, "max_concurrent": 4, **evaluate},
        ) as server,
        httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as http,
    ):
        yield Served(http, folder)


def waits(folder: Path) -> tuple[str, dict[str, Any]]:
    """Returns the environment whose evaluations wait, and its settings."""
    path = folder / "waits.py"
    path.write_text(WAITS)
    return str(path), {"folder": str(folder)}


@pytest.mark.thorough
async def test_versions_are_evaluated_beside_training_and_compared(tmp_path: Path) -> None:
    async with serving(tmp_path, every=2) as served:
        for version in (0, 1):
            await served.publish(version)
            await served.until((0, "complete"))
        await served.publish(2)
        await served.until((0, "complete"), (2, "complete"))
        first, second = await served.evaluations()
        assert first["rollouts"] == 6 and first["sampled_by"] == {"0": 6}
        assert second["other_versions"] == 0 and second["sampled_by"] == {"2": 6}
        mean = second["results"]["evaluate/math/mean_reward"]
        shown = 'envserver_evaluation{environment="math",measure="mean_reward"}'
        assert await served.metric(shown) == mean
        assert await served.metric("envserver_evaluation_policy_version") == 2
        # Asked for: the same version, in a folder of its own.
        answers = [await served.http.post("/v1/evaluations") for _ in range(2)]
        assert [one.status_code for one in answers] == [202, 409]
        await served.until((0, "complete"), (2, "complete"), (2, "complete"))
        assert (await served.evaluations())[2]["folder"] == f"{second['folder']}-2"
        # None of it is for trainers.
        groups = (await served.http.get("/v1/groups")).json()["groups"]
        assert groups and {one["group_id"].split("-")[1] for one in groups} == {"train"}
    lines = [orjson.loads(line) for line in (tmp_path / "track.jsonl").read_bytes().splitlines()]
    assert mean in [line.get("evaluate/math/mean_reward") for line in lines]
    compared = command("evaluate", "compare", first["folder"], second["folder"], folder=tmp_path)
    assert "│ math │     3 │" in compared.stdout, compared.stdout


@pytest.mark.thorough
async def test_rollouts_of_two_versions_are_said_and_restarts_go_on_anew(tmp_path: Path) -> None:
    environment, own = waits(tmp_path)
    async with serving(tmp_path, environment, own, every=1) as served:
        await served.publish(0)
        await served.until_asked()
        await served.publish(1)
        assert await served.metric('envserver_evaluations_total{end="skipped"}') == 1
        (tmp_path / "go").touch()
        await served.until((0, "complete"))
        (mixed,) = await served.evaluations()
        assert (mixed["rollouts"], mixed["other_versions"]) == (4, 4)
        assert mixed["sampled_by"] == {"several": 4}
        for path in ("go", "asked-test-0", "asked-test-1"):
            (tmp_path / path).unlink()
        await served.publish(2)
        await served.until_asked()
    async with serving(tmp_path, environment, own, every=1) as served:
        await served.until((0, "complete"), (2, "running"))  # goes on, in the same folder
        await served.publish(3)
    (tmp_path / "go").touch()
    async with serving(tmp_path, environment, own, every=1) as served:
        await served.until((0, "complete"), (2, "interrupted"), (3, "complete"))
        assert (await served.evaluations())[2]["other_versions"] == 0


@pytest.mark.thorough
async def test_a_pause_for_new_weights_waits_for_an_evaluation(tmp_path: Path) -> None:
    environment, own = waits(tmp_path)
    async with serving(tmp_path, environment, own, every=1, hold_seconds=1000) as served:
        await served.publish(0)
        await served.until_asked()
        pausing = asyncio.create_task(
            served.http.post("/v1/policy/pause", json={"timeout_seconds": 3000}, timeout=None)
        )
        state = (await served.http.get("/v1/policy")).json()
        assert not pausing.done() and not state["paused"]
        (tmp_path / "go").touch()
        assert (await pausing).json()["idle"]
        await served.http.post("/v1/policy/resume", json={"version": 1})
        (first, _) = await served.evaluations()
        assert (first["state"], first["sampled_by"]) == ("complete", {"0": 4})


@pytest.mark.thorough
async def test_an_evaluation_that_breaks_is_told_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*words: Any) -> Any:
        raise RuntimeError("a fault of ours")

    async with serving(tmp_path, split="test") as served:
        with monkeypatch.context() as patched:
            patched.setattr("envserver.running.held_out_run.evaluate_on", broken)
            await served.http.post("/v1/evaluations")
            await served.until((-1, "failed"))
        (told,) = await served.evaluations()
        assert "a fault of ours" in told["error"]

        async def is_taken() -> bool:  # not while the failure is stored
            return (await served.http.post("/v1/evaluations")).status_code == 202

        await until(is_taken)
        await served.until((-1, "complete"))


async def test_the_split_of_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--evaluate.split train is the split that 'math' trains"
    ):
        async with serving(tmp_path, every=1, split="train"):
            pass
