"""Agents that execute code in their own process: the whole process is sandboxed."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from envserver_records.errors import WorkerDied, WorkerHung
from support.commands import envserver, read_jsonl
from support.waiting import until
from support.worker_standin import StandIn, alive, serving

from envserver import WorkersConfig
from envserver.rollouts.policy import limit_of_death
from envserver.workers import Assignment, LocalPool, WorkerSandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")
ZOO = str(Path(__file__).parents[2] / "support" / "sandboxed_zoo.py")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def proxy() -> AsyncIterator[StandIn]:
    async with serving() as standin:
        yield standin


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pool(proxy: StandIn) -> AsyncIterator[LocalPool]:
    config = WorkersConfig(processes=1, dedicated=4, heartbeat_seconds=3, kill_grace_seconds=0.3)
    sandbox = WorkerSandbox(backend="namespace", port=proxy.port, memory_mb=400, disk_mb=32)
    async with LocalPool(
        config, [f"{ZOO}:Sandboxed"], sandbox=sandbox, listen=proxy.also_on
    ) as started:
        yield started


def assign(proxy: StandIn, do: str, **public: Any) -> Assignment:
    return proxy.open(do, file=ZOO, kind="Sandboxed", isolation="sandboxed", **public)


async def said(pool: LocalPool, proxy: StandIn, do: str, **public: Any) -> Any:
    """What the agent returned, or the words of its failure."""
    assignment = assign(proxy, do, **public)
    await pool.run(assignment)
    posted = proxy.posted(assignment)
    return posted["output"] if "output" in posted else posted["failure"]["message"]


async def test_it_sees_nothing_of_the_machine(
    pool: LocalPool, proxy: StandIn, tmp_path: Path
) -> None:
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
    assert await said(pool, proxy, "chat") == ["hello", "hello"]
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
async def test_memory_is_bounded_for_all_its_processes_together(
    pool: LocalPool, proxy: StandIn, do: str
) -> None:
    with pytest.raises(WorkerDied) as caught:
        await pool.run(assign(proxy, do))
    assert "passed its 400 MB" in caught.value.detail["output"]


async def test_it_may_hold_a_few_hundred_files(pool: LocalPool, proxy: StandIn) -> None:
    assert 300 < await said(pool, proxy, "hold_files") < 512


async def test_a_worker_that_used_up_its_descriptors_is_told_so(
    pool: LocalPool, proxy: StandIn
) -> None:
    """It cannot post a large result; without its exit code that would be a failure of ours."""
    with pytest.raises(WorkerDied) as caught:
        await pool.run(assign(proxy, "hold_files_and_hang_up"))
    assert "Too many open files" in caught.value.detail["output"]
    assert limit_of_death(caught.value, "sandboxed", spoke=True, overdue=False) == "crash"


async def test_a_server_without_descriptors_says_so(pool: LocalPool, proxy: StandIn) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(WorkerDied, match="Too many open files") as caught:
            await pool.run(assign(proxy, "compute"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "ulimit -n" in caught.value.hint
    assert await said(pool, proxy, "compute") == ["42", "kept here"]


async def test_its_death_is_told_as_it_was(pool: LocalPool, proxy: StandIn) -> None:
    with pytest.raises(WorkerDied) as caught:
        await pool.run(assign(proxy, "crash"))
    assert caught.value.detail["signal"] == "SIGSEGV"
    assert "last words" in caught.value.detail["output"]
    with pytest.raises(WorkerDied) as caught:
        await pool.run(assign(proxy, "leave"))
    assert caught.value.detail["exit_code"] == 9


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
async def test_no_signal_from_inside_ends_or_stops_it(
    pool: LocalPool, proxy: StandIn, number: signal.Signals
) -> None:
    assert await said(pool, proxy, "attack", signal=int(number)) == "still here"


async def test_nothing_outlives_it(pool: LocalPool, proxy: StandIn) -> None:
    marker = f"sandboxed-{os.getpid()}"
    assert await said(pool, proxy, "leave_something", marker=marker) == "left"
    await until(lambda: not processes_with(marker))


async def test_one_that_blocks_is_killed_and_others_go_on(pool: LocalPool, proxy: StandIn) -> None:
    stuck = asyncio.ensure_future(pool.run(assign(proxy, "spin")))
    assert await said(pool, proxy, "chat") == ["hello", "hello"]
    with pytest.raises(WorkerHung):
        await stuck


def processes_with(marker: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if marker.encode() in (entry / "cmdline").read_bytes() and alive(int(entry.name)):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.thorough
async def test_a_command_runs_walled_agents(tmp_path: Path) -> None:
    coder = Path(__file__).parents[2] / "support" / "walled_coder.py"
    groups = tmp_path / "groups.jsonl"
    done = await asyncio.to_thread(
        envserver,
        *("process", "--env", coder, "--model", "sim", "--sim.solve_probability", "0.5"),
        *("--env.total_steps", "8", "--env.data_path_to_save_groups", groups),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    rewards = [score for group in read_jsonl(groups) for score in group["scores"]]
    assert len(rewards) == 32
    assert 0 < sum(rewards) < 32  # some solve it, some do not, and all ran
