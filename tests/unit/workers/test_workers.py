"""Workers: agents run, fail and misbehave in their own processes, and the server reports how.

Nothing survives them, nor a server that is killed.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from envserver_records.errors import (
    LimitReached,
    WorkerDied,
    WorkerError,
    WorkerGarbage,
    WorkerHung,
)
from structlog.testing import capture_logs
from support.cases import cases_of
from support.process_tree import alive
from support.waiting import until, with_enough_time
from support.worker_standin import ZOO, StandIn

from envserver import WorkersConfig
from envserver.workers import Assignment, LocalPool

CASES = cases_of(__file__)

pytestmark = pytest.mark.asyncio(loop_scope="module")

LEVELS = ("pooled", "dedicated")


def pool_with(*kinds: str, **settings: float) -> LocalPool:
    patient = {"processes": 1, "heartbeat_seconds": 60, "kill_grace_seconds": 60}
    config = WorkersConfig.model_validate({**patient, **settings})
    return LocalPool(config, [f"{ZOO}:{kind}" for kind in kinds or ("Zoo", "Plain")])


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pool() -> AsyncIterator[LocalPool]:
    """Kills no worker because the machine is slow."""
    async with pool_with() as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pool_that_listens() -> AsyncIterator[LocalPool]:
    """Kills workers that are silent for three seconds."""
    async with pool_with(heartbeat_seconds=3) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def hasty_pool() -> AsyncIterator[LocalPool]:
    """Kills workers whose rollouts go on after they were cancelled."""
    async with pool_with(kill_grace_seconds=0.3) as started:
        yield started


async def death_of(pool: LocalPool, assignment: Assignment) -> WorkerError:
    with pytest.raises(WorkerError) as caught:
        await pool.run(assignment)
    return caught.value


async def pid_of_pooled(pool: LocalPool, proxy: StandIn) -> int:
    echo = proxy.open("echo")
    await pool.run(echo)
    return int(proxy.posted(echo)["output"]["pid"])


# Agents that end by themselves.


@pytest.mark.parametrize("isolation", LEVELS)
async def test_an_agent_runs_and_posts_it(pool: LocalPool, proxy: StandIn, isolation: str) -> None:
    logged = len(proxy.logs)
    echo = proxy.open("echo", isolation=isolation, text="four")
    chat = proxy.open("chat", isolation=isolation)
    plain = proxy.open("chat", kind="Plain", isolation=isolation)
    await asyncio.gather(*(pool.run(one) for one in (echo, chat, plain)))
    posted = proxy.posted(echo)
    assert posted["output"]["text"] == "four"
    assert posted["metrics"] == {"length": 4.0}
    assert posted["output"]["pid"] != os.getpid()
    assert proxy.posted(chat)["output"] == ["hello", "stop", "assistant"]
    assert proxy.posted(plain)["output"] == "hello"
    facts = {"turns": 1, "path": repr(Path("/tmp"))}
    assert proxy.logs[logged:] == [{"event": "chatted", "facts": facts}]
    assert {chat["model"] for chat in proxy.chats} == {"tiny"}
    assert any(chat["headers"].get("x-agent") == "solver" for chat in proxy.chats)


async def test_an_agents_exception_is_its_failure(pool: LocalPool, proxy: StandIn) -> None:
    deaths = pool.snapshot()["deaths"]
    raised, unsendable, left = proxy.open("fail"), proxy.open("unsendable"), proxy.open("sys_exit")
    await asyncio.gather(*(pool.run(one) for one in (raised, unsendable, left)))
    failure = proxy.posted(raised)["failure"]
    assert failure["kind"] == "agent_error"
    assert failure["message"] == "KeyError: 'no such thing'"
    assert "in fail\n" in failure["detail"]["traceback"]
    assert "envserver/workers" not in failure["detail"]["traceback"]
    assert "JSON cannot hold" in proxy.posted(unsendable)["failure"]["message"]
    assert "SystemExit(3)" in proxy.posted(left)["failure"]["message"]
    assert pool.snapshot()["deaths"] == deaths


@pytest.mark.parametrize(("code", "status", "kind"), CASES["refused"])
async def test_what_the_proxy_refuses_keeps_its_kind(
    pool: LocalPool, proxy: StandIn, code: str, status: int, kind: str
) -> None:
    for agent in ("Zoo", "Plain"):
        refused = proxy.open("chat", kind=agent, error=code, status=status)
        await pool.run(refused)
        assert proxy.posted(refused)["failure"]["kind"] == kind


async def test_a_worker_has_a_directory_and_leaves_nothing(pool: LocalPool, proxy: StandIn) -> None:
    dirty = proxy.open("dirty_directory", isolation="dedicated")
    await pool.run(dirty)
    directory = Path(proxy.posted(dirty)["output"])
    await until(lambda: not directory.exists())
    assert directory != Path.cwd()


# Agents that take their process with them.


@pytest.mark.parametrize("isolation", LEVELS)
@pytest.mark.parametrize(("do", "facts", "output"), CASES["deaths"])
async def test_a_death_says_how(
    pool: LocalPool, proxy: StandIn, isolation: str, do: str, facts: dict[str, Any], output: str
) -> None:
    died = await death_of(pool, proxy.open(do, isolation=isolation))
    assert type(died) is WorkerDied
    assert facts.items() <= died.detail.items()
    assert output in died.detail.get("output", "")
    assert "mate" not in died.detail
    await pid_of_pooled(pool, proxy)  # replaced


@pytest.mark.thorough
async def test_a_blocked_event_loop_is_a_hang(pool_that_listens: LocalPool, proxy: StandIn) -> None:
    pool = pool_that_listens
    before = await pid_of_pooled(pool, proxy)
    assert type(await death_of(pool, proxy.open("spin"))) is WorkerHung
    assert not alive(before)
    assert await pid_of_pooled(pool, proxy) != before


async def test_busy_threads_and_slow_setups_are_no_hang(
    pool_that_listens: LocalPool, proxy: StandIn
) -> None:
    pool = pool_that_listens
    busy = proxy.open("busy", kind="Plain", rest_seconds=4.5)
    slow = proxy.open("echo", isolation="dedicated", config={"setup_seconds": 4.5})
    await asyncio.gather(pool.run(busy), pool.run(slow))
    assert proxy.posted(busy)["output"] == "done"
    assert "output" in proxy.posted(slow)


async def test_a_busy_server_blames_no_worker(pool_that_listens: LocalPool, proxy: StandIn) -> None:
    pool = pool_that_listens
    before = await pid_of_pooled(pool, proxy)
    time.sleep(4.5)  # longer than heartbeat_seconds, on the server's own event loop
    assert await pid_of_pooled(pool, proxy) == before


async def test_garbage_on_the_control_socket(pool: LocalPool, proxy: StandIn) -> None:
    before = await pid_of_pooled(pool, proxy)
    assert type(await death_of(pool, proxy.open("garbage"))) is WorkerGarbage
    assert not alive(before)
    assert await pid_of_pooled(pool, proxy) != before


async def test_a_flood_of_output_is_bounded_and_told(pool: LocalPool, proxy: StandIn) -> None:
    flood = proxy.open("flood", lines=20_000)
    with capture_logs() as logs:
        await pool.run(flood)
        await until(lambda: any(line["event"] == "worker_output_dropped" for line in logs))
    lines = [line for line in logs if line["event"] == "worker_output"]
    assert proxy.posted(flood)["output"] == "done"
    assert lines[0]["rollout_id"] == flood.rollout_id  # what is read after its end is nobody's
    assert 0 < len(lines) < 10_000


# Deadlines and cancelling.


async def test_deadlines_cancel_the_agent(pool: LocalPool, proxy: StandIn, tmp_path: Path) -> None:
    before = await pid_of_pooled(pool, proxy)
    paths = {"started": str(tmp_path / "started"), "ended": str(tmp_path / "ended")}

    async def overtaken(seconds: float) -> dict[str, Any] | None:
        late = proxy.open("sleep", seconds=seconds, **paths)
        await pool.run(late)
        return proxy.posted(late)["failure"] if (tmp_path / "started").exists() else None

    failure = await with_enough_time(overtaken)
    assert (failure["kind"], failure["detail"]) == (LimitReached.kind, {"limit": "time"})
    assert (tmp_path / "ended").exists()
    assert await pid_of_pooled(pool, proxy) == before


async def test_a_thread_that_ignores_its_deadline_is_killed_and_its_mates_are_told(
    hasty_pool: LocalPool, proxy: StandIn, tmp_path: Path
) -> None:
    mate = proxy.open("sleep", started=str(tmp_path / "mate"))
    waiting = asyncio.create_task(death_of(hasty_pool, mate))
    await until((tmp_path / "mate").exists)

    async def overtaken(seconds: float) -> WorkerError | None:
        started = tmp_path / "late"
        late = proxy.open("sleep", kind="Plain", seconds=seconds, started=str(started))
        with contextlib.suppress(WorkerDied):  # the deadline came before a worker was free
            try:
                await hasty_pool.run(late)
            except WorkerHung as hung:
                assert started.exists() and not proxy.has_posted(late)
                return hung
        return None

    hung = await with_enough_time(overtaken)
    assert "mate" not in hung.detail
    died = await waiting
    assert type(died) is WorkerDied
    assert died.detail == {"mate": True}


async def test_a_death_of_unknown_cause_is_tried_again_alone(
    pool: LocalPool, proxy: StandIn, tmp_path: Path
) -> None:
    innocent = proxy.open("sleep", rollout_id="innocent", started=str(tmp_path / "innocent"))
    waiting = asyncio.create_task(death_of(pool, innocent))
    await until((tmp_path / "innocent").exists)
    guilty = await death_of(pool, proxy.open("os_exit", rollout_id="guilty"))
    assert guilty.detail["mate"] and (await waiting).detail["mate"]

    pooled = await pid_of_pooled(pool, proxy)
    again = proxy.open("echo", rollout_id="innocent")
    await pool.run(again)
    assert proxy.posted(again)["output"]["pid"] != pooled
    guilty = await death_of(pool, proxy.open("os_exit", rollout_id="guilty"))
    assert "mate" not in guilty.detail
    assert await pid_of_pooled(pool, proxy) == pooled


async def test_cancelling_ends_the_agent(pool: LocalPool, proxy: StandIn, tmp_path: Path) -> None:
    before = await pid_of_pooled(pool, proxy)
    paths = {"started": str(tmp_path / "started"), "ended": str(tmp_path / "ended")}
    obedient = proxy.open("sleep", **paths)
    running = asyncio.create_task(pool.run(obedient))
    await until((tmp_path / "started").exists)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (tmp_path / "ended").exists()
    assert not proxy.has_posted(obedient)
    assert await pid_of_pooled(pool, proxy) == before


async def test_forgotten_tasks_end_with_it(pool: LocalPool, proxy: StandIn, tmp_path: Path) -> None:
    paths = {"started": str(tmp_path / "started"), "ended": str(tmp_path / "ended")}
    await pool.run(proxy.open("forget_a_task", **paths))
    assert (tmp_path / "ended").exists()


async def test_a_worker_ends_what_an_environment_left(proxy: StandIn, tmp_path: Path) -> None:
    async with pool_with("Saver") as pool:
        await pool.run(proxy.open("", kind="Saver", folder=str(tmp_path)))
    assert {path.name for path in tmp_path.iterdir()} == {"read", "saved"}


async def test_who_waits_in_vain_for_a_worker_is_told(proxy: StandIn, tmp_path: Path) -> None:
    async with pool_with("Zoo", rollouts_per_process=1, kill_grace_seconds=0.1) as pool:
        first = proxy.open("sleep", started=str(tmp_path / "started"))
        running = asyncio.create_task(death_of(pool, first))
        await until((tmp_path / "started").exists)
        died = await death_of(pool, proxy.open("echo", seconds=0.1))
        assert "before a worker was free" in str(died)
        waiting = asyncio.create_task(death_of(pool, proxy.open("echo")))
        await asyncio.sleep(0)
    assert "The pool was closed" in str(await waiting)
    assert type(await running) is WorkerDied


async def test_a_setup_without_end_is_not_the_models_fault(pool: LocalPool, proxy: StandIn) -> None:
    async def overtaken(seconds: float) -> dict[str, Any] | None:
        config = {"setup_waits": True}
        endless = proxy.open("echo", isolation="dedicated", config=config, seconds=seconds)
        with contextlib.suppress(WorkerDied):  # the deadline came before it was forked
            await pool.run(endless)
            return proxy.posted(endless)["failure"]
        return None

    assert (await with_enough_time(overtaken, 0.3))["kind"] == "agent_error"


# Nothing survives.


@pytest.mark.parametrize(
    "way", ["worker exits", "rollout ends", "forkserver is killed", "pool ends"]
)
async def test_what_an_agent_started_is_gone(proxy: StandIn, tmp_path: Path, way: str) -> None:
    isolation = "dedicated" if way == "rollout ends" else "pooled"
    written = tmp_path / "pids"
    async with pool_with("Zoo", kill_grace_seconds=0.2) as pool:
        parent = proxy.open(
            "grandchildren",
            isolation=isolation,
            pids=str(written),
            rest_seconds=0 if way == "rollout ends" else 3600,
            exit=way == "worker exits",
        )
        running = asyncio.gather(pool.run(parent), return_exceptions=True)
        await until(lambda: written.exists() and written.read_text())
        pids = [int(pid) for pid in written.read_text().split()]
        if way == "forkserver is killed":
            worker = Path(f"/proc/{pool.snapshot()['pids'][0]}/stat").read_text()
            os.kill(int(worker.rpartition(")")[2].split()[1]), signal.SIGKILL)
        if way != "pool ends":
            await until(lambda: not any(alive(pid) for pid in pids))
            (error,) = await running
            assert (type(error) is WorkerDied) == (way != "rollout ends"), error
            await pid_of_pooled(pool, proxy)
    assert not any(alive(pid) for pid in pids)
    await running


# Secrets.


async def test_workers_get_nothing_hidden(proxy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-top-secret")
    monkeypatch.setenv("ENVSERVER_OPENAI__API_KEY", "sk-top-secret")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    async with LocalPool(WorkersConfig(processes=1), [f"{ZOO}:Zoo"]) as pool:
        environ = proxy.open("environ")
        await pool.run(environ)
        (worker,) = (Path(f"/proc/{pid}") for pid in pool.snapshot()["pids"])
        forkserver = Path(f"/proc/{(worker / 'stat').read_text().rpartition(')')[2].split()[1]}")
        seen = [
            (process / name).read_bytes()
            for process in (worker, forkserver)
            for name in ("environ", "cmdline")
        ]
    names = proxy.posted(environ)["output"]
    assert "LC_ALL" in names
    assert not {"OPENAI_API_KEY", "ENVSERVER_OPENAI__API_KEY", "USER", "SHELL"} & set(names)
    received = b"".join([*seen, str(names).encode()])
    assert b"PATH=" in received
    for secret in (b"sk-top-secret", b"the-hidden-answer", b"hidden"):
        assert secret not in received


async def test_nothing_survives_a_killed_server(tmp_path: Path) -> None:
    pids, started = tmp_path / "pids", tmp_path / "started"
    server = subprocess.Popen(
        [sys.executable, "-c", CASES["server"], str(pids), str(started)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    try:
        await until(lambda: started.exists() and pids.exists() and pids.read_text())
        (root,) = tmp_path.glob("envserver-workers-*")
        family = [int(pid) for pid in pids.read_text().split()] + marked_by(root)
        assert len(set(family)) >= 7  # forkserver, 3 workers, 3 grandchildren
    finally:
        server.kill()
        server.wait()
    await until(lambda: not any(alive(pid) for pid in family) and not marked_by(root))
    assert not root.exists()


@pytest.mark.parametrize(
    "starts",
    [
        f"LocalPool(WorkersConfig(processes=1), ['{ZOO}:Zoo'])",
        "SandboxService(SandboxConfig(backend='namespace'))",
    ],
    ids=["workers", "sandboxes"],
)
async def test_a_server_that_is_killed_while_it_starts_leaves_nothing(starts: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # its path is short enough for sockets
        killed = subprocess.run(
            [sys.executable, "-c", CASES["killed_at_its_start"].format(starts)],
            env={**os.environ, "TMPDIR": folder},
            stderr=subprocess.DEVNULL,
            check=False,
        )
        assert killed.returncode == -signal.SIGKILL
        await until(lambda: not list(Path(folder).iterdir()))


def marked_by(root: Path) -> list[int]:
    """Processes whose environment variables name `root`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.fsencode(root) in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return [pid for pid in found if alive(pid)]
