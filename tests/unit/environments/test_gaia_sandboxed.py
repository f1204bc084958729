"""The agents of `gaia` behind the wall: code that hangs, eats, crashes or looks around ends its
step, typed, and neither its run nor others suffer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from structlog.testing import capture_logs
from support.gaia_standin import ZOO, Scripted, scripted

from envserver import WorkersConfig
from envserver.workers import LocalPool, WorkerSandbox

pytestmark = [pytest.mark.thorough, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def proxy() -> AsyncIterator[Scripted]:
    async with scripted() as standin:
        yield standin


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pool(proxy: Scripted) -> AsyncIterator[LocalPool]:
    config = WorkersConfig(processes=1, dedicated=8, kill_grace_seconds=0.3)
    sandbox = WorkerSandbox(backend="namespace", port=proxy.port, memory_mb=600, disk_mb=32)
    async with LocalPool(
        config, [f"{ZOO}:GaiaZoo"], sandbox=sandbox, listen=proxy.also_on
    ) as started:
        yield started


async def solved(
    pool: LocalPool, proxy: Scripted, *codes: str, seconds: float = 180, step_seconds: float = 60
) -> Any:
    """What an agent that executes `codes` and then answers returned."""
    assignment = proxy.ask(*codes, seconds=seconds, step_seconds=step_seconds)
    await pool.run(assignment)
    return proxy.posted(assignment)["output"]


TROUBLE = {
    "while True: pass": "timeout",
    "sum(range(10**13))": "timeout",
    "x = bytearray(10**10)": "exception",
    "pieces = []\nwhile True: pieces.append(bytearray(10**8))": "exception",
    "import os; os._exit(1)": "died",
    "import ctypes; ctypes.string_at(0)": "died",
    "raise SystemExit": "exception",
    "open('big', 'wb').write(b'x' * 4 * 10**7)": "exception",
    "import urllib.request; urllib.request.urlopen('http://10.0.0.1', timeout=1)": "exception",
    "open('/etc/shadow').read()": "exception",
    f"open({str(Path(__file__))!r}).read()": "exception",
}


@pytest.mark.parametrize("code", TROUBLE)
async def test_trouble_is_a_step_and_the_run_goes_on(
    pool: LocalPool, proxy: Scripted, code: str
) -> None:
    # What must be stopped never ends by itself. The step that answers is tried until it fits.
    done = await solved(pool, proxy, code, step_seconds=1 if TROUBLE[code] == "timeout" else 60)
    assert done["answer"] == "42"
    assert done["steps"][0]["error"]["kind"] == TROUBLE[code]


async def test_a_run_without_code_ends_its_interpreter_in_silence(
    pool: LocalPool, proxy: Scripted
) -> None:
    with capture_logs() as logs:
        talk = proxy.ask("", max_steps=1)
        await pool.run(talk)
        assert await solved(pool, proxy, "print(1)")
    assert proxy.posted(talk)["output"]["answer"] is None
    assert [line for line in logs if line["event"] == "worker_output"] == []


async def test_others_are_not_held_up(pool: LocalPool, proxy: Scripted) -> None:
    """Two loop without end, one eats, one crashes; the others are solved meanwhile."""
    loops = [
        asyncio.ensure_future(solved(pool, proxy, code, seconds=3600, step_seconds=3600))
        for code in ("while True: pass", "while 1: 1")
    ]
    bad = ["x = bytearray(10**10)", "import os; os.kill(0, 9)"]
    hostile = [asyncio.ensure_future(solved(pool, proxy, code)) for code in bad]
    for _ in range(5):
        assert (await solved(pool, proxy, "1 + 1"))["answer"] == "42"
    assert [(await one)["answer"] for one in hostile] == ["42"] * 2
    assert not any(one.done() for one in loops)
    for one in loops:
        one.cancel()
    await asyncio.gather(*loops, return_exceptions=True)


async def test_a_run_without_end_keeps_its_steps(pool: LocalPool, proxy: Scripted) -> None:
    for seconds in (4, 16, 64):  # the two steps before must fit
        codes = ("1", "2", *["while True: pass"] * 5)
        assignment = proxy.ask(*codes, seconds=seconds, step_seconds=3600)
        await pool.run(assignment)
        done = proxy.posted(assignment).get("output") if proxy.has_posted(assignment) else None
        if done and len(done["steps"]) > 2:
            break
    assert (done["answer"], done["state"]) == (None, "time")
    assert [step["observation"] for step in done["steps"][:2]] == ["Value: 1", "Value: 2"]
    assert done["steps"][-1]["error"]["kind"] == "timeout"


async def test_nothing_hidden_is_in_sight(pool: LocalPool, proxy: Scripted) -> None:
    look = (
        "import os, json\nprint(json.dumps([dict(os.environ), os.listdir('/proc'), os.getcwd()]))"
    )
    done = await solved(pool, proxy, look)
    variables, processes, cwd = json.loads(done["steps"][0]["observation"])
    assert cwd == "/work"
    assert not [name for name in variables if "KEY" in name or "TOKEN" in name]
    assert len([name for name in processes if name.isdigit()]) == 2  # worker, interpreter
