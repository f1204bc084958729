"""The audit of `serve` scores a share of the delivered groups again; nothing waits for it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from envserver_records.errors import EngineUnavailable
from envserver_records.records import Trajectory
from structlog.testing import capture_logs
from support.commands import free_port, running, until
from support.sampled import PROMPT, SAMPLED, Engine, group
from support.waiting import PATIENCE

from envserver.proxy import Gate
from envserver.proxy.gate import InFlight
from envserver.rollouts.auditor import Auditor


def trajectories(name: str, **changes: Any) -> list[Trajectory]:
    return group(name, **changes).trajectories


def auditing(engine: Engine | None = None, fraction: float = 1.0, **more: Any) -> Auditor:
    return Auditor(engine or Engine(), fraction, 0.05, **{"version": lambda: 7, **more})


async def test_an_audit_finds_what_is_wrong_and_logs_it() -> None:
    right, wrong = trajectories("a")
    wrong.sequences[1].logprobs[PROMPT + 3] -= 0.25
    with capture_logs() as logs:
        async with auditing() as auditor:
            assert auditor.offer(right)
            assert auditor.offer(wrong)
    report = auditor.report()
    assert (report["rollouts"], report["rows"], report["tokens"]) == (2, 3, 3 * SAMPLED)
    assert (report["rows_over_tolerance"], report["tokens_over_tolerance"]) == (1, 1)
    assert report["largest_difference"] == pytest.approx(0.25)
    (log,) = [entry for entry in logs if entry["event"] == "audit_mismatch"]
    assert (log["rollout_id"], log["row"], log["position"]) == ("a-1", 1, PROMPT + 3)
    assert "1 of 3 rows" in auditor.summary()


async def test_an_audit_never_waits_and_chooses_by_id() -> None:
    made = [one for name in "abcdefghij" for one in trajectories(name)]
    async with auditing(fraction=0.5, most_waiting=3) as auditor:
        assert sum([auditor.offer(one) for one in made]) == 3
    report = auditor.report()
    assert report["rollouts"] == 3
    wanted = 3 + report["rollouts_dropped"]
    assert 4 < wanted < 16
    async with auditing(fraction=0.5) as again:
        assert sum(map(again.offer, made)) == wanted


async def test_an_audit_leaves_out_what_another_version_sampled() -> None:
    old, new = trajectories("a", version=3)[0], trajectories("b")[0]
    engine = Engine()
    # The trainer publishes version 8 while the row of version 7 is being scored.
    async with auditing(engine, version=lambda: 7 + (engine.asked > 0)) as auditor:
        auditor.offer(old)
        auditor.offer(new)
    report = auditor.report()
    assert report["rows"] == 0
    assert report["rows_not_compared"] == {"other_version": 1, "weights_changed": 1}


@pytest.mark.parametrize("in_flight", ["keep", "abort"])
async def test_an_audit_waits_while_the_weights_change(in_flight: InFlight) -> None:
    engine, gate = Engine(), Gate()
    async with auditing(engine, gate=gate) as auditor:
        auditor.offer(trajectories("a")[0])
        while not engine.in_flight:
            await asyncio.sleep(0)
        await gate.pause(in_flight, 1)
        auditor.offer(trajectories("b")[0])
        await asyncio.sleep(0.05)
        asked = engine.asked
        assert auditor.report()["rows_not_compared"] == {"weights_changed": 1}
        gate.resume()
    assert (asked, engine.asked, auditor.report()["rows"]) == (1, 2, 1)


async def test_an_audit_outlives_an_engine_that_fails() -> None:
    first, second = trajectories("a")[0], trajectories("b")[0]
    first.sequences[0].tokens[0] = 13
    async with auditing(Engine(fails=EngineUnavailable("Gone."))) as auditor:
        auditor.offer(first)
        auditor.offer(second)
    report = auditor.report()
    assert (report["engine_failures"], report["rows"]) == ({"engine_unavailable": 1}, 1)


def test_serve_reports_its_audit(tmp_path: Path) -> None:
    port = free_port()
    words = (
        "serve", "--env", "math", "--model", "sim", "--sim.latency_seconds", 0,
        "--env.group_size", 2, "--env.ensure_scores_are_not_same", "false",
        "--env.total_steps", 4, "--tokens.audit_fraction", 1, "--port", port,
        "--store", "groups.db",
    )  # fmt: skip
    with running(*words, folder=tmp_path) as server:
        server.wait_for("Trainers: ")
        url = f"http://127.0.0.1:{port}/v1/status"

        def audited() -> dict[str, Any] | None:
            status = httpx.get(url, timeout=PATIENCE).json()["server"]["audit"]
            return status if status["rollouts"] == 8 else None

        report = until(audited, server.output, alive=server.process)
        assert report["tokens"] == report["tokens_exactly_equal"] > 0
        server.send(signal.SIGTERM)
        server.wait_for(f"Audit: 0 of {report['rows']} rows differ")
        assert server.end() == 0
