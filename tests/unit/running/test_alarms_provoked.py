"""Alarms of a real server: environments misbehave, a trainer stops, an engine goes away.

Numbers are recorded four times a second here, and thresholds of minutes are 0: nothing waits for
minutes to pass.
"""

import asyncio
from pathlib import Path

import pytest
from envserver_local.simulated.server import serve_sim
from prometheus_client.parser import text_string_to_metric_families
from support.alarm_server import serving
from support.commands import envserver as command
from support.waiting import until

from envserver import SimConfig

pytestmark = pytest.mark.thorough


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    # Memory holds 720 records, here three minutes.
    monkeypatch.setattr("envserver.trainers.status.SECONDS", 0.25)


async def test_environments_that_misbehave_are_told_in_words(tmp_path: Path, quick: None) -> None:
    names = ("Zero", "Same", "Dies", "Masked")
    async with serving(tmp_path, *names) as alarms:
        await alarms.raised(
            reward_always_lowest__zero=r"reward of zero is always 0 \(\d+ groups in the last",
            equal_rewards__same=r"In 100 % of the groups of same .* all rewards are equal",
            same_answers__same="In 100 % of the groups of same .* all rollouts say the same",
            workers_die__dies=r"^\d+ workers of dies died in .* The worker exited with code 3",
            rollouts_lost__dies=r"^100 % of the rollouts of dies \(\d+ of \d+ .* to the workers",
            untrained_tokens__masked="% of the sampled tokens of masked .*structured_output",
            no_trainer=r"No trainer has leased for \d+ .*, while [\d,]+ groups? wait",
            store_slow=r"A commit of the store takes [\d.]+ seconds",
            disk_full=r"The disk of the store is almost full\. [\d.]+ GB are left",
        )
        metrics = (await alarms.http.get("/metrics")).text
        (family,) = [
            one for one in text_string_to_metric_families(metrics) if one.name == "envserver_alarms"
        ]
        counts = {sample.labels["name"]: sample.value for sample in family.samples}
        assert counts["same_answers"] == 1 and counts["engine_down"] == 0
        shown = await asyncio.to_thread(
            command, "top", str(alarms.http.base_url), "--once", folder=tmp_path
        )
        assert "No trainer has leased for" in " ".join(shown.stdout.split())
        # A trainer comes: one alarm ends, and the next one begins.
        await alarms.post("/v1/runs", {"name": "trainer", "batch_size": 1})

        async def is_gone() -> bool:
            await alarms.post("/v1/runs/trainer/lease", {})
            return "no_trainer" not in await alarms.texts()

        await until(is_gone)
        await alarms.post("/v1/policy/pause", {})
        await alarms.raised(calls_paused=r"Model calls have been paused for \d+ second")
        await alarms.post("/v1/policy/resume", {})
        await alarms.ended("calls_paused")


async def test_a_replica_of_the_engine_then_the_last_goes(tmp_path: Path, quick: None) -> None:
    stops = [asyncio.Event(), asyncio.Event()]
    found = [asyncio.get_running_loop().create_future() for _ in stops]
    sim = SimConfig(latency_seconds=0.05)
    engines = [
        asyncio.create_task(
            serve_sim(sim, "127.0.0.1", 0, None, listening=one.set_result, stop=stop)
        )
        for one, stop in zip(found, stops, strict=True)
    ]
    urls = await asyncio.gather(*found)
    openai = {"base_url": urls, "model_name": "sim"}
    async with serving(tmp_path, "Healthy", model=None, openai=openai) as alarms:

        async def is_working() -> bool:
            status = (await alarms.http.get("/v1/status")).json()
            return bool(status["server"]["groups_delivered"])

        await until(is_working)
        stops[0].set()
        await engines[0]
        await alarms.raised(engine_down=rf"The replica {urls[0][:-3]} of the engine is set aside")
        stops[1].set()
        await engines[1]
        await alarms.raised(engine_down="The engine does not answer")
