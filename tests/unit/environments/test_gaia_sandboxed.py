"""The agents of `gaia` behind the wall, beside what test_gaia_hostile.py tries: a disk that is
full, and a run without code."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs
from support.gaia_standin import ZOO, Scripted, scripted

from envserver import WorkersConfig
from envserver.workers import LocalPool, WorkerSandbox

pytestmark = pytest.mark.thorough


@pytest.fixture
async def proxy() -> AsyncIterator[Scripted]:
    async with scripted() as standin:
        yield standin


async def test_a_full_disk_is_a_step_and_a_run_without_code_ends_in_silence(
    proxy: Scripted,
) -> None:
    config = WorkersConfig(processes=1, dedicated=8, kill_grace_seconds=0.3)
    sandbox = WorkerSandbox(backend="namespace", port=proxy.port, memory_mb=600, disk_mb=32)
    async with LocalPool(config, [f"{ZOO}:GaiaZoo"], sandbox=sandbox, listen=proxy.also_on) as pool:
        with capture_logs() as logs:
            talk = proxy.ask("", seconds=180, max_steps=1)
            await pool.run(talk)
            code = "open('big', 'wb').write(b'x' * 4 * 10**7)"
            fills = proxy.ask(code, seconds=180, step_seconds=60)
            await pool.run(fills)
    done = proxy.posted(fills)["output"]
    assert (done["answer"], done["steps"][0]["error"]["kind"]) == ("42", "exception")
    assert proxy.posted(talk)["output"]["answer"] is None
    assert [line for line in logs if line["event"] == "worker_output"] == []
