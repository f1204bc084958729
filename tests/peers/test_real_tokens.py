"""Agents of all manners before a real vLLM: no prompt drifts, every token is recorded once as it
was sampled, and scores again the same. Beside it: what rendering their conversations as text gives.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.token_proof import Proof, bench
from support.vllm_server import VllmServer, running_vllm

from envserver.config import Mode

pytestmark = pytest.mark.vllm

ROUNDING = 5e-5
"""Calls that share a batch come in other sums than when they are re-scored."""

Tell = Callable[[str], None]
Record = Callable[[str, Any], None]


def report(title: str, proof: Proof, tell: Tell, record_property: Record) -> None:
    """For people and for machines."""
    tell(proof.table(title))
    for name, value in proof.facts().items():
        record_property(f"{title}: {name}", value)


@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.slow)])
async def test_hundreds_of_rollouts_without_drift(
    vllm_server: VllmServer, count: int, tell: Tell, record_property: Record
) -> None:
    proof = Proof()
    async with bench(vllm_server) as agents:
        await agents.run(proof, range(count), at_once=32)
    report(f"{count} rollouts on a real vLLM, by tokens", proof, tell, record_property)
    assert proof.drifted == 0
    assert proof.furthest < ROUNDING
    assert not proof.refused
    assert proof.stitched.keys() == {"exact", "appended", "whitespace", "calls", "lossy_detok"}
    assert proof.dialects.keys() == {"chat", "completions", "responses", "messages"}
    assert proof.branched.keys() >= {"edited", "rewritten", "compacted", "other_settings"}
    assert proof.stitched.total() > 2 * proof.branched.total()
    # What the engine samples hangs on how calls fall into batches: 49 to 63 % in runs so far.
    assert proof.text_drifted > proof.stitched.total() / 4
    assert min(proof.own_ids, proof.rendered, proof.rescored) > 0


async def test_one_request_at_a_time_scores_again_the_very_same(
    vllm_server: VllmServer, tell: Tell, record_property: Record
) -> None:
    proof = Proof()
    async with bench(vllm_server, requests_at_once=1) as agents:
        await agents.run(proof, range(1000, 1028), at_once=4, rows_at_once=1)
    report("28 rollouts, one request at a time", proof, tell, record_property)
    assert (proof.drifted, proof.unequal) == (0, 0)
    assert proof.rescored > 500


@pytest.mark.parametrize("mode", ["completions", "chat"])
async def test_other_ways_of_asking_are_exact_too(
    vllm_server: VllmServer, mode: Mode, tell: Tell, record_property: Record
) -> None:
    proof = Proof(must_stitch=False)
    async with bench(vllm_server, mode=mode) as agents:
        await agents.run(proof, range(2000, 2040), at_once=16)
    report(f"40 rollouts, by {mode}", proof, tell, record_property)
    assert proof.drifted == 0
    assert proof.furthest < ROUNDING
    assert not proof.refused
    assert (proof.stitched.total() > 50) == (mode == "completions")


@pytest.mark.slow
async def test_tokens_know_the_weights_that_sampled_them(
    vllm_python: Path, tmp_path: Path, tell: Tell, record_property: Record
) -> None:
    """The versions change while calls are at the engine; frozen, they go on in the next one."""
    proof, done = Proof(), asyncio.Event()
    with running_vllm(vllm_python, tmp_path, developing=True) as server:
        async with bench(server) as agents, aiohttp.ClientSession(server.root_url) as trainer:

            async def train() -> None:
                for version in itertools.count(1):
                    await agents.proxy.gate.pause("keep", 5.0)
                    for path, body in (
                        ("/pause?mode=keep", {}),
                        ("/update_weight_version", {"new_version": f"step-{version}"}),
                        ("/resume", {}),
                    ):
                        async with trainer.post(path, json=body) as answer:
                            assert answer.status == 200, await answer.text()
                    agents.proxy.publish_version(version)
                    agents.proxy.gate.resume()
                    if done.is_set():
                        return
                    await asyncio.sleep(0.1)

            training = asyncio.create_task(train())
            calls = await agents.run(proof, range(3000, 3100), at_once=16)
            done.set()
            await training
    mixed = [call for call in calls if len(call.versions) > 1]
    title = f"100 rollouts while the version changes, within {len(mixed)} calls too"
    report(title, proof, tell, record_property)
    assert len(mixed) > 10
    assert all("mixed_versions" in call.flags for call in mixed)
    assert (proof.drifted, proof.refused) == (0, {})
    assert proof.furthest < ROUNDING


@pytest.mark.slow
async def test_ten_thousand_rollouts_without_drift(
    vllm_server: VllmServer,
    tell: Tell,
    record_property: Record,
    capsys: pytest.CaptureFixture[str],
) -> None:
    proof = Proof()
    async with asyncio.timeout(7200), bench(vllm_server) as agents:
        for first in range(10_000, 20_000, 500):
            await agents.run(proof, range(first, first + 500), at_once=32)
            with capsys.disabled():
                print(f"\n{proof.table('so far')}", flush=True)
    report("10,000 rollouts on a real vLLM, by tokens", proof, tell, record_property)
    assert proof.drifted == 0
    assert proof.furthest < ROUNDING
    assert not proof.refused
