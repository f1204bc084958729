"""Agents that execute code in their own process: the whole process is sandboxed.

The small process beside it, its companion, may do what the worker may, and no more.
"""

import asyncio
import os
import resource
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from envserver_records.errors import ConfigError, WorkerDied, WorkerHung
from support.ordinary_user import run_as_ordinary_user
from support.process_tree import alive_with, marked
from support.waiting import until
from support.worker_standin import ZOO, StandIn, serving

from envserver import WorkersConfig
from envserver.rollouts.policy import limit_of_death
from envserver.workers import Assignment, LocalPool, WorkerSandbox
from envserver.workers.pool import Spent

pytestmark = pytest.mark.asyncio(loop_scope="module")
COMPANIONS = str(Path(ZOO).with_name("companion_zoo.py"))
BACKENDS = ["namespace"]
if shutil.which("bwrap") and os.geteuid() == 0:  # else nobody may join what bubblewrap made
    BACKENDS.append("bubblewrap")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pool(proxy: StandIn) -> AsyncIterator[LocalPool]:
    config = WorkersConfig(processes=1, dedicated=4, heartbeat_seconds=3, kill_grace_seconds=0.3)
    sandbox = WorkerSandbox(backend="namespace", port=proxy.port, memory_mb=400, disk_mb=32)
    async with LocalPool(
        config, [f"{ZOO}:Sandboxed"], sandbox=sandbox, listen=proxy.also_on
    ) as started:
        yield started


def assign(proxy: StandIn, do: str, **public: Any) -> Assignment:
    return proxy.open(do, kind="Sandboxed", isolation="sandboxed", **public)


async def said(pool: LocalPool, proxy: StandIn, do: str, **public: Any) -> Any:
    """What the agent returned, or the words of its failure."""
    assignment = assign(proxy, do, **public)
    await pool.run(assignment)
    posted = proxy.posted(assignment)
    return posted["output"] if "output" in posted else posted["failure"]["message"]


async def death(pool: LocalPool, proxy: StandIn, do: str) -> WorkerDied:
    with pytest.raises(WorkerDied) as caught:
        await pool.run(assign(proxy, do))
    return caught.value


async def test_it_sees_none_of_the_machine(pool: LocalPool, proxy: StandIn, tmp_path: Path) -> None:
    seen = await said(pool, proxy, "look")
    assert seen["cwd"] == "/work"
    assert seen["uid"] == 1000
    assert seen["processes"] == [1]
    assert not {"home", "var", "srv", "sys", "data"} & set(seen["root"])
    secret = tmp_path / "secret.txt"
    secret.write_text("hidden")
    project = Path(__file__).parents[3]
    for path in (
        secret,
        "/etc/shadow",
        project / "README.md",
        project / "environments" / "envserver_environments" / "math",
    ):
        answer = await said(pool, proxy, "read", path=str(path))
        assert "No such file" in answer or "Permission denied" in answer, path


async def test_only_the_proxy_can_be_reached(pool: LocalPool, proxy: StandIn) -> None:
    assert await said(pool, proxy, "chat") == ["hello", "stop", "assistant"]
    assert await said(pool, proxy, "openai_client") == "hello"
    assert await said(pool, proxy, "connect", host="127.0.0.1", port=proxy.port) == "connected"
    async with serving() as other:
        answer = await said(pool, proxy, "connect", host="127.0.0.1", port=other.port)
        assert "ConnectionRefusedError" in answer
    for host in ("10.0.0.1", "192.0.2.1"):
        answer = await said(pool, proxy, "connect", host=host, port=80)
        assert "unreachable" in answer


async def test_ordinary_work_goes_on(pool: LocalPool, proxy: StandIn) -> None:
    assert await said(pool, proxy, "compute") == ["42", "kept here"]
    assert await said(pool, proxy, "mount") != 0
    answer = await said(pool, proxy, "fill_disk")
    assert "No space left" in answer or "too large" in answer.lower()


@pytest.mark.parametrize("do", ["eat_memory", "fill_sockets"])
async def test_memory_is_bounded_for_all_of_them(pool: LocalPool, proxy: StandIn, do: str) -> None:
    assert "passed its 400 MB" in (await death(pool, proxy, do)).detail["output"]


async def test_a_worker_without_descriptors_is_told_so(pool: LocalPool, proxy: StandIn) -> None:
    """It cannot post a large result; without its exit code that would be a failure of ours."""
    died = await death(pool, proxy, "hold_files_and_hang_up")
    assert "Too many open files" in died.detail["output"]
    assert limit_of_death(died, spoke=True, overdue=False) == "crash"


async def test_a_server_without_descriptors_says_so(pool: LocalPool, proxy: StandIn) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        died = await death(pool, proxy, "compute")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "Too many open files" in died.message and "ulimit -n" in died.hint
    assert await said(pool, proxy, "compute") == ["42", "kept here"]


async def test_its_death_is_told_as_it_was(pool: LocalPool, proxy: StandIn) -> None:
    crashed = (await death(pool, proxy, "segfault")).detail
    assert crashed["signal"] == "SIGSEGV" and "last words" in crashed["output"]
    assert (await death(pool, proxy, "os_exit")).detail["exit_code"] == 3


async def test_no_signal_from_inside_ends_or_stops_it(pool: LocalPool, proxy: StandIn) -> None:
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
        assert await said(pool, proxy, "attack", signal=int(number)) == "still here"


async def test_nothing_outlives_it(pool: LocalPool, proxy: StandIn) -> None:
    mark = marked()
    assert await said(pool, proxy, "leave_something", mark=mark) == "left"
    await until(lambda: not alive_with(mark))


async def test_one_that_blocks_is_killed_and_others_go_on(pool: LocalPool, proxy: StandIn) -> None:
    stuck = asyncio.ensure_future(pool.run(assign(proxy, "spin")))
    assert await said(pool, proxy, "openai_client") == "hello"
    with pytest.raises(WorkerHung):
        await stuck


# The companion.


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=BACKENDS)
async def pair(proxy: StandIn, request: pytest.FixtureRequest) -> AsyncIterator[LocalPool]:
    config = WorkersConfig(processes=1, dedicated=4, kill_grace_seconds=0.3)
    sandbox = WorkerSandbox(
        backend=request.param, port=proxy.port, memory_mb=400, disk_mb=32, processes=20
    )
    async with LocalPool(
        config, [f"{COMPANIONS}:Accompanied"], sandbox=sandbox, listen=proxy.also_on
    ) as started:
        yield started


async def played(pair: LocalPool, proxy: StandIn, do: str) -> tuple[dict[str, Any], Spent | None]:
    asked = proxy.open(do, file=COMPANIONS, kind="Accompanied", isolation="sandboxed")
    spent = await pair.run(asked)
    return proxy.posted(asked)["output"], spent


async def test_a_companion_has_what_its_worker_has_only(pair: LocalPool, proxy: StandIn) -> None:
    told, _ = await played(pair, proxy, "facts")
    for fact, own in told["own"].items():
        assert told["its"][fact] == own, fact
    rights = told["its"]["rights"]
    assert set(rights["CapEff"] + rights["CapPrm"]) == {"0" * 16}
    assert rights["Seccomp"] == ["2"] and rights["Uid"] == ["1000"] * 4
    assert len(told["its"]["open"]) == 4  # standard streams and its channel
    assert not {"msgspec", "envserver.registry", "envserver.workers.run"} & set(
        told["its"]["modules"]
    )


async def test_the_end_and_work_of_a_companion_are_told(pair: LocalPool, proxy: StandIn) -> None:
    _, idle = await played(pair, proxy, "facts")
    told, busy = await played(pair, proxy, "work")
    assert os.waitstatus_to_exitcode(told["status"]) == 1
    assert idle is not None and busy is not None
    assert busy.cpu_seconds > 0.5
    told, _ = await played(pair, proxy, "die")
    assert os.waitstatus_to_exitcode(told["status"]) == -signal.SIGKILL


async def test_an_unused_companion_ends_with_its_worker(pair: LocalPool, proxy: StandIn) -> None:
    for _ in range(3):
        told, spent = await played(pair, proxy, "nothing")
        assert told is None and spent is not None


async def test_a_companion_that_has_died_is_not_given(pair: LocalPool, proxy: StandIn) -> None:
    told, _ = await played(pair, proxy, "be lost")
    assert told is True


async def test_a_companion_that_cannot_be_imported_is_told_at_the_start() -> None:
    sandbox = WorkerSandbox(backend="namespace", port=1, memory_mb=400, disk_mb=32)
    with pytest.raises(ConfigError, match="no_such_module"):
        async with LocalPool(WorkersConfig(), [f"{COMPANIONS}:Lost"], sandbox=sandbox):
            pass


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user runs it already")
async def test_this_holds_for_an_ordinary_user() -> None:
    words = ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = await asyncio.to_thread(run_as_ordinary_user, [*words, __file__, "-k", "companion"])
    assert done.returncode == 0, done.stdout
    assert "5 passed" in done.stdout
