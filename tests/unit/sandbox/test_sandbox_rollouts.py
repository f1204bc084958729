"""Sandboxes of rollouts and scorers end with their owners; infrastructure failures never count."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import orjson
import pytest
import pytest_asyncio
from envserver_records.errors import SandboxUnavailable, WorkerDied
from envserver_records.records import SandboxLimits, Usage
from support.api import requested
from support.commands import envserver, read_jsonl
from support.process_tree import alive, alive_with, children_of, marked
from support.waiting import until, with_enough_time

from envserver import (
    Group,
    Result,
    SandboxError,
    SandboxSpec,
    SandboxUsage,
    Settings,
    Task,
    pack,
    unpack,
)
from envserver.proxy.attempts import ProxyAttempt
from envserver.registry import find
from envserver.rollouts.attempt import Finished, run_attempt
from envserver.rollouts.group import RolloutContext, attempt_spec, make_group
from envserver.running import rollout_context
from envserver.sandbox.attempt_sandboxes import summed
from envserver.sandbox.requests import Exec, Open, Opened
from envserver.sandbox.supervisor import READY

pytestmark = pytest.mark.asyncio(loop_scope="module")

ZOO = str(Path(__file__).parents[2] / "support" / "sandbox_zoo.py")
MOST_ATTEMPTS = 50
_numbers = count(1)


@asynccontextmanager
async def house(kind: str, size: int = 4, **settings: Any) -> AsyncIterator[RolloutContext]:
    """All that `envserver process` runs, for one of the zoo's environments."""
    environment = find(f"{ZOO}:{kind}")()
    environment.config.group_size = size
    patient = {"heartbeat_seconds": 30, "kill_grace_seconds": 30}
    tree = {"model": "sim", "workers": {"processes": 1}, **settings}
    tree["workers"] = {**patient, **tree["workers"]}
    tree["sandbox"] = {"backend": "namespace", **settings.get("sandbox", {})}
    async with rollout_context(
        Settings.model_validate(tree), environment, f"{ZOO}:{kind}", observer=lambda event: None
    ) as parts:
        yield parts


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def zoo() -> AsyncIterator[RolloutContext]:
    async with house("Zoo") as parts:
        yield parts


async def run(
    parts: RolloutContext,
    do: str,
    marker: str = "",
    *,
    isolation: Any = None,
    seconds: float = 600.0,
) -> Finished:
    spec = attempt_spec(parts, Task("t", {"do": do, "marker": marker}), f"{do}-{next(_numbers)}", 1)
    return await run_attempt(
        parts,
        msgspec.structs.replace(
            spec, deadline=time.time() + seconds, isolation=isolation or parts.isolation
        ),
    )


def supervisors() -> Iterator[int]:
    """Our own supervisors of sandboxes."""
    for entry in Path(f"/proc/{os.getpid()}/task").iterdir():
        for child in (entry / "children").read_text().split():
            if b"envserver.sandbox" in Path(f"/proc/{child}/cmdline").read_bytes():
                yield int(child)


def sandboxes_of(supervisor: int) -> Iterator[list[int]]:
    """The process 1 of each sandbox, by zygote; some are kept ready for whoever comes next."""
    for outer in children_of(supervisor):
        for zygote in children_of(outer):
            yield children_of(zygote)


async def test_an_agent_uses_a_sandbox_and_what_it_used_is_told(zoo: RolloutContext) -> None:
    finished = await run(zoo, "sums")
    output = finished.result.output
    assert output["shown"] == "hello6 * 7"
    assert output["summed"] == "42 ['a']\n"
    assert output["color"] == "blue\n"
    assert output["backend"] == "namespace"
    used = finished.trajectory.usage.sandbox
    assert used is not None
    assert used.executions == output["executions"] == 3
    assert used.cpu_seconds > 0 and used.peak_memory_mb > 1 and used.written_bytes > 0
    assert finished.trajectory.usage.ended_by == "agent"
    assert unpack(pack(finished.trajectory.usage), Usage) == finished.trajectory.usage


@pytest.mark.parametrize("isolation", ["pooled", "dedicated"])
async def test_what_an_agent_leaves_open_is_closed(zoo: RolloutContext, isolation: str) -> None:
    marker = marked()
    finished = await run(zoo, "leave_open", marker, isolation=isolation)
    assert finished.result.output == "left"
    assert alive_with(marker) == []
    assert finished.trajectory.usage.sandbox is not None
    assert finished.trajectory.usage.sandbox.executions == 2
    assert finished.trajectory.usage.sandbox.killed == {"cancelled": 1}, finished.trajectory.usage


async def test_sandboxes_end_with_a_worker_that_is_killed(zoo: RolloutContext) -> None:
    marker = marked()
    with pytest.raises(WorkerDied):
        await run(zoo, "die", marker, isolation="dedicated")
    await until(lambda: not alive_with(marker))


async def test_a_cancelled_program_has_ended_and_the_sandbox_goes_on(zoo: RolloutContext) -> None:
    finished = await run(zoo, "lose_patience", marked())
    found, said, killed = finished.result.output
    assert (found, said, killed) == (1, "well\n", {"cancelled": 1})


async def test_a_program_that_runs_at_the_deadline_is_the_models(zoo: RolloutContext) -> None:
    marker = marked()

    async def overrun(seconds: float) -> Finished | None:
        try:
            finished = await run(zoo, "overrun", marker, seconds=seconds)
        except SandboxUnavailable:  # on a busy machine none was made in that time
            return None
        used = finished.trajectory.usage.sandbox
        return finished if used is not None and used.executions == 1 else None

    finished = await with_enough_time(overrun)
    assert (finished.result.limit, finished.result.truncated) == ("time", True)
    assert finished.trajectory.usage.ended_by == "time"
    assert alive_with(marker) == []


async def test_a_cancelled_rollout_takes_its_sandbox_along(zoo: RolloutContext) -> None:
    assert await cancelled(lambda marker: run(zoo, "overrun", marker))


async def cancelled(work: Callable[[str], Coroutine[Any, Any, Any]]) -> bool:
    """Cancels `work` while its program runs; returns whether it ended as cancelled."""
    marker = marked()
    working = asyncio.create_task(work(marker))
    await until(lambda: alive_with(marker))
    working.cancel()
    (ended,) = await asyncio.gather(working, return_exceptions=True)
    await until(lambda: not alive_with(marker))
    return isinstance(ended, asyncio.CancelledError)


async def test_nobody_gets_more_than_the_environment_declares(zoo: RolloutContext) -> None:
    said = (await run(zoo, "ask_too_much")).result.output
    assert "Only these modules may be preloaded: json" in said["preload"]
    assert said["disk"] != "got it"
    assert "wall_seconds must be positive" in said["nan"]
    assert "'A=B'" in said["variable"]
    assert said["memory"] in ("memory", 1)
    assert "NUL" in said["wide"]
    assert "got it" not in (said["stdin"], said["limit"])
    assert said["many"] == [8, "An attempt may have 8 sandboxes at a time."]


async def test_two_attempts_share_nothing(zoo: RolloutContext, tmp_path: Path) -> None:
    first, second = await asyncio.gather(*(run(zoo, "share", str(tmp_path)) for _ in range(2)))
    assert len({one.result.output[0] for one in (first, second)}) == 2
    for one in (first, second):
        assert one.result.output[1].split() == ["/tmp:", "/work:", "greeting", "mine"]


@pytest.mark.thorough
async def test_agents_that_do_not_use_asyncio() -> None:
    async with house("Plain") as parts:
        finished = await run(parts, "")
        assert finished.result.output == ["121", "42\n", 2]
        usage = finished.trajectory.usage
        assert usage.sandbox is not None
        # Its process was its own, so what that used is known, too.
        assert usage.worker_cpu_seconds is not None and usage.worker_cpu_seconds > 0
        assert usage.worker_peak_memory_mb is not None and usage.worker_peak_memory_mb > 1


async def test_agents_that_live_behind_the_wall_themselves() -> None:
    marker = marked()
    async with house("Sandboxed") as parts:
        finished = await run(parts, "sums")
        used = finished.trajectory.usage
        assert finished.result.output["summed"] == "42 ['a']\n"
        assert used.sandbox is not None and used.sandbox.executions == 3
        assert used.worker_cpu_seconds is not None
        with pytest.raises(WorkerDied):
            await run(parts, "die", marker)
        await until(lambda: not alive_with(marker))


async def test_without_a_declaration_there_is_none_and_nothing_is_started() -> None:
    before = set(supervisors())
    async with house("Bare") as parts:
        finished = await run(parts, "")
        assert set(supervisors()) == before
    assert finished.result.output.startswith("This environment declares no sandbox.")
    assert finished.trajectory.usage.sandbox is None


# What is not the model's fault.


async def test_a_supervisor_that_dies_is_replaced_and_no_rollout_is_scored_for_it(
    zoo: RolloutContext, tmp_path: Path
) -> None:
    killed = await without_supervisor(lambda marker: run(zoo, "swallow", marker), tmp_path)
    await until(lambda: set(supervisors()) - {killed})
    finished = await patient_run(zoo, "sums")
    assert finished.result.output["executions"] == 3


async def without_supervisor(work: Callable[[str], Coroutine[Any, Any, Any]], folder: Path) -> int:
    """Kills the supervisor, which ends `work`; returns its process id."""
    (pid,) = supervisors()
    marker = folder / "open"
    working = asyncio.create_task(work(str(marker)))
    await until(marker.exists)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SandboxError):
        await working
    return pid


async def patient_run(parts: RolloutContext, do: str) -> Finished:
    """Runs `do` as soon as a sandbox can be made for it."""
    finished: list[Finished] = []

    async def run_once() -> bool:
        try:
            finished.append(await run(parts, do))
        except SandboxUnavailable:
            return False
        return True

    await until(run_once)
    return finished[0]


async def test_who_gets_no_room_in_time_is_tried_again(tmp_path: Path) -> None:
    settings = {"sandbox": {"concurrent": 2}, "rollouts": {"scorer_processes": 1}}
    async with house("Zoo", **settings) as parts:
        first, second = tmp_path / "first", tmp_path / "second"
        holding = asyncio.create_task(run(parts, "hold", str(first)))
        await until(first.exists)

        async def asked_in_vain(seconds: float) -> bool | None:
            try:
                await run(parts, "hold", str(second), seconds=seconds)
            except SandboxUnavailable:
                return True
            except WorkerDied:  # the deadline came before a worker was free
                return None
            return None

        assert await with_enough_time(asked_in_vain)
        assert not second.exists()
        holding.cancel()
        await asyncio.wait({holding})
        assert (await run(parts, "sums")).trajectory.usage.sandbox is not None


async def scored(
    parts: RolloutContext, do: str, marker: str = "", answer: str = "42"
) -> float | None:
    """The reward of a scorer that does so."""
    output = {"score": do, "marker": marker}
    return (
        await parts.scorer.score(Task("t", {}, {"answer": answer}), Result(output=output))
    ).reward


async def test_a_scorer_has_sandboxes_of_its_own(zoo: RolloutContext) -> None:
    assert [await scored(zoo, "sums", answer=answer) for answer in ("42", "43")] == [1.0, 0.0]


async def test_a_scorer_that_is_killed_takes_its_sandboxes_along(zoo: RolloutContext) -> None:
    await cancelled(lambda marker: scored(zoo, "hang", marker))


async def test_a_scorer_that_hides_a_loss_scores_none(zoo: RolloutContext, tmp_path: Path) -> None:
    await without_supervisor(lambda marker: scored(zoo, "swallow", marker), tmp_path)
    await patient_run(zoo, "sums")


@pytest.mark.slow
async def test_two_hundred_rollouts_whose_workers_are_killed_at_random() -> None:
    settings = {
        "rollouts": {"max_attempts": MOST_ATTEMPTS},
        "workers": {"processes": 1, "dedicated": 8},
        "sandbox": {"concurrent": 12},
    }
    rng, killed, before = random.Random(1), 0, set(supervisors())
    async with house("Plain", 8, **settings) as parts:
        (task, *_) = parts.environment.tasks("train")
        requests = (requested(number, env="plain", task=task) for number in range(25))
        making = asyncio.gather(*(make_group(parts, request) for request in requests))
        seen: set[int] = set()
        while not making.done():
            await asyncio.sleep(0.01)
            pids = parts.pool.snapshot()["pids"]
            if len(set(pids) - seen) >= 4 and killed < MOST_ATTEMPTS - 1:
                seen |= set(pids)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rng.choice(pids), signal.SIGKILL)
                    killed += 1
        groups = await making
        service = set(supervisors()) - before
        assert len(service) == 1
        await until(lambda: parts.pool.snapshot()["processes"] <= 1)
        await until(lambda: all(len(zygote) <= READY for zygote in sandboxes_of(*service)))
    assert killed > 20
    for group in groups:
        assert isinstance(group, Group)
        assert [one.output for one in group.trajectories] == [["121", "42\n", 2]] * 8
        assert {failure.kind for failure in group.failures} <= {"worker_died"}


# A worker that was taken over.


encode = msgspec.msgpack.encode


async def post(url: str, body: bytes) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as http, http.post(url, data=body) as answer:
        return answer.status, await answer.read()


async def opened(zoo: RolloutContext, name: str, wanted: Open) -> tuple[ProxyAttempt, str, str]:
    """An attempt, the address of its sandboxes, and that of one that is open."""
    attempt = zoo.proxy.open(attempt_spec(zoo, Task("t", {}), name, 1))
    url = f"{zoo.proxy_url}/r/{attempt.key}/sandbox"
    status, body = await post(f"{url}/open", encode(wanted))
    box = msgspec.msgpack.decode(body, type=Opened)
    assert (status, box.isolation) == (200, "namespace")
    return attempt, url, f"{url}/{box.id}"


def command(*argv: str) -> bytes:
    return encode(Exec(argv=list(argv), stdin=b"", cwd="/", env=None, limits=None))


async def test_a_hostile_worker_is_refused(zoo: RolloutContext) -> None:
    mine, url, box = await opened(zoo, "a", Open())
    other = zoo.proxy.open(attempt_spec(zoo, Task("t", {}), "b", 1))
    other_box = box.replace(mine.key, other.key)
    run = command("id")
    try:
        assert (await post(f"{box}/exec", run))[0] == 200
        for place, request in (
            (f"{other_box}/exec", run),
            (f"{url}/2/exec", run),
            (f"{url}/../{other_box.partition('/r/')[2]}/exec", run),
            (f"{box}/exec", b"\xff" * 100),
            (f"{box}/exec", encode({"argv": "id"})),
            (f"{box}/fly", run),
            (f"{box}/read", encode({"path": "x", "max_bytes": -1})),
            (f"{box}/read", encode({"path": "x", "max_bytes": 1 << 40})),
            (f"{box}/read", encode({"path": "/proc/1/environ", "max_bytes": 9})),
            (f"{url}/open", encode({"spec": {"limits": {"wall_seconds": "1"}}})),
            (f"{url}/open", encode({"spec": {"archive": b"no tar"}})),
            (f"{url}/open", encode({"spec": None, "wall": "unsafe-local"})),
            (f"{url}/open/open", b""),
            (f"{url}/", b""),
        ):
            status, body = await post(place, request)
            assert status in (400, 404), (place, status, body)
            assert orjson.loads(body)["error"]["message"]
        assert (await post(f"{box}/exec", bytes(20 << 20)))[0] == 413
        assert (await post(f"{url}/open", bytes(100 << 20)))[0] == 413
        assert mine.sandbox_failure is other.sandbox_failure is None
    finally:
        zoo.proxy.seal(mine)
        zoo.proxy.seal(other)
    assert (await post(f"{url}/open", encode(Open())))[0] == 409
    assert (await post(f"{box}/exec", run))[0] == 409
    used = await zoo.proxy.settle(mine)
    assert used is not None and used.executions == 1
    assert await zoo.proxy.settle(other) is None


async def test_an_attempt_that_is_sealed_interrupts_what_it_asks(zoo: RolloutContext) -> None:
    marker = marked()
    attempt, _, box = await opened(zoo, "sealed", Open())
    asking = asyncio.create_task(post(f"{box}/exec", command("sleep", marker)))
    await until(lambda: alive_with(marker))
    (pid,) = alive_with(marker)
    zoo.proxy.seal(attempt)
    assert (await asking)[0] == 409
    used = await zoo.proxy.settle(attempt)
    assert not alive(pid)
    assert used is not None and used.killed == {"cancelled": 1}


async def test_a_spec_may_say_less_than_the_environments(zoo: RolloutContext) -> None:
    less = Open(SandboxSpec(limits=SandboxLimits(wall_seconds=0.3)))
    attempt, _, box = await opened(zoo, "less", less)
    try:
        _, body = await post(f"{box}/exec", command("sleep", "9"))
        assert msgspec.msgpack.decode(body)["killed_by"] == "wall"
    finally:
        zoo.proxy.seal(attempt)


# Sums, and the whole from the command line.


async def test_usages_are_summed_and_peaks_kept() -> None:
    one = SandboxUsage(cpu_seconds=1.0, peak_memory_mb=5.0, cpu_exact=True, killed={"wall": 1})
    two = SandboxUsage(cpu_seconds=2.0, peak_memory_mb=3.0, killed={"wall": 1, "cpu": 1})
    both = summed([one, two])
    assert (both.cpu_seconds, both.peak_memory_mb, both.cpu_exact) == (3.0, 5.0, False)
    assert (both.executions, both.killed) == (2, {"wall": 2, "cpu": 1})


@pytest.mark.thorough
async def test_the_usage_stands_in_the_output_of_process(tmp_path: Path) -> None:
    ran = await asyncio.to_thread(
        envserver, "process", "--env", f"{ZOO}:Zoo", "--model", "sim", "--sandbox.backend",
        "namespace", "--env.group_size", 2, "--env.data_path_to_save_groups", "out.jsonl",
        folder=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    groups = read_jsonl(tmp_path / "out.jsonl")
    usages = [one["usage"] for group in groups for one in group["envserver"]["rollouts"]]
    assert len(usages) == 4
    for usage in usages:
        assert usage["ended_by"] == "agent"
        assert usage["worker_cpu_seconds"] is None
        assert usage["sandbox"]["executions"] == 3
        assert usage["sandbox"]["cpu_seconds"] > 0
        assert usage["sandbox"]["killed"] == {}
