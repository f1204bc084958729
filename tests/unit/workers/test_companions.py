"""The small process beside a sandboxed worker: it may do what the worker may, and no more."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from envserver_records.errors import ConfigError
from support.ordinary_user import run_as_ordinary_user
from support.worker_standin import StandIn, serving

from envserver import WorkersConfig
from envserver.workers import LocalPool, WorkerSandbox
from envserver.workers.pool import Spent

pytestmark = pytest.mark.asyncio(loop_scope="module")
ZOO = str(Path(__file__).parents[2] / "support" / "companion_zoo.py")
BACKENDS = ["namespace"]
if shutil.which("bwrap") and os.geteuid() == 0:  # else nobody may join what bubblewrap made
    BACKENDS.append("bubblewrap")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def proxy() -> AsyncIterator[StandIn]:
    async with serving() as standin:
        yield standin


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=BACKENDS)
async def pool(proxy: StandIn, request: pytest.FixtureRequest) -> AsyncIterator[LocalPool]:
    config = WorkersConfig(processes=1, dedicated=4, kill_grace_seconds=0.3)
    sandbox = WorkerSandbox(
        backend=request.param, port=proxy.port, memory_mb=400, disk_mb=32, processes=20
    )
    async with LocalPool(
        config, [f"{ZOO}:Accompanied"], sandbox=sandbox, listen=proxy.also_on
    ) as started:
        yield started


async def played(pool: LocalPool, proxy: StandIn, do: str) -> tuple[dict[str, Any], Spent | None]:
    asked = proxy.open(do, file=ZOO, kind="Accompanied", isolation="sandboxed")
    spent = await pool.run(asked)
    return proxy.posted(asked)["output"], spent


async def test_it_has_what_the_worker_has_and_no_more(pool: LocalPool, proxy: StandIn) -> None:
    told, _ = await played(pool, proxy, "facts")
    for fact, own in told["own"].items():
        assert told["its"][fact] == own, fact
    rights = told["its"]["rights"]
    assert set(rights["CapEff"] + rights["CapPrm"]) == {"0" * 16}
    assert rights["Seccomp"] == ["2"] and rights["Uid"] == ["1000"] * 4
    assert len(told["its"]["open"]) == 4  # standard streams and its channel
    assert not {"msgspec", "envserver.registry", "envserver.workers.run"} & set(
        told["its"]["modules"]
    )


async def test_its_end_and_its_work_are_told(pool: LocalPool, proxy: StandIn) -> None:
    _, idle = await played(pool, proxy, "facts")
    told, busy = await played(pool, proxy, "work")
    assert os.waitstatus_to_exitcode(told["status"]) == 1
    assert idle is not None and busy is not None
    assert busy.cpu_seconds > 0.5
    told, _ = await played(pool, proxy, "die")
    assert os.waitstatus_to_exitcode(told["status"]) == -signal.SIGKILL


async def test_one_that_is_not_used_ends_with_its_worker(pool: LocalPool, proxy: StandIn) -> None:
    for _ in range(3):
        told, spent = await played(pool, proxy, "nothing")
        assert told is None and spent is not None


async def test_one_that_has_died_is_not_given(pool: LocalPool, proxy: StandIn) -> None:
    told, _ = await played(pool, proxy, "be lost")
    assert told is True


async def test_one_that_cannot_be_imported_is_told_at_the_start() -> None:
    sandbox = WorkerSandbox(backend="namespace", port=1, memory_mb=400, disk_mb=32)
    with pytest.raises(ConfigError, match="no_such_module"):
        async with LocalPool(WorkersConfig(), [f"{ZOO}:Lost"], sandbox=sandbox):
            pass


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user runs it already")
async def test_all_of_this_holds_for_an_ordinary_user() -> None:
    command = ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = await asyncio.to_thread(run_as_ordinary_user, command)
    assert done.returncode == 0, done.stdout
    assert "5 passed" in done.stdout
