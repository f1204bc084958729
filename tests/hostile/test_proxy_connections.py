"""One rollout cannot take the server's connections, memory or time from the others.

The agents run in real sandboxed workers, before the real proxy and the simulated engine; the server
is this process.
"""

import asyncio
import contextlib
import json
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from support.commands import ENVSERVER, environment_variables, read_jsonl
from support.waiting import PATIENCE, until

from envserver import ServerConfig, Settings, Task
from envserver.http.proxy_server import serve_proxy
from envserver.registry import find
from envserver.rollouts.attempt import Finished, run_attempt
from envserver.rollouts.group import RolloutContext, attempt_spec
from envserver.running import rollout_context
from envserver.running.metrics import parts_numbers

in_module = pytest.mark.asyncio(loop_scope="module")
FILE = Path(__file__).parents[1] / "support" / "greedy_zoo.py"
ZOO = f"{FILE}:Greedy"
MB = 10**6
_numbers = count(1)


@asynccontextmanager
async def house(**workers: Any) -> AsyncIterator[RolloutContext]:
    """All that `envserver process` runs."""
    tree = {
        "model": "sim",
        "sim": {"latency_seconds": 0},
        "workers": {"heartbeat_seconds": 30, "kill_grace_seconds": 0.3, **workers},
        "sandbox": {"backend": "namespace"},
    }
    async with rollout_context(Settings.model_validate(tree), find(ZOO)(), ZOO) as parts:
        yield parts


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server() -> AsyncIterator[RolloutContext]:
    async with house() as parts:
        yield parts


async def run(parts: RolloutContext, do: str, seconds: float = 300) -> Finished:
    spec = attempt_spec(parts, Task("t", {"do": do}), f"{do}-{next(_numbers)}", 1)
    return await run_attempt(
        parts,
        msgspec.structs.replace(spec, deadline=time.time() + seconds),
    )


@asynccontextmanager
async def beside(parts: RolloutContext, do: str) -> AsyncIterator[None]:
    """A rollout that does not end by itself."""
    greedy = asyncio.create_task(run(parts, do))
    try:
        yield
    finally:
        assert not greedy.done()
        greedy.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await greedy


def refused(parts: RolloutContext, bound: Any) -> int:
    return parts.proxy.totals.refused[bound]


async def shown(parts: RolloutContext, name: str) -> dict[str, float]:
    """What `/metrics` shows, by the last label."""
    numbers = (await parts_numbers([parts]))[name]
    return {key if isinstance(key, str) else key[-1]: value for key, value in numbers.items()}


async def honest(parts: RolloutContext, rollouts: int = 6) -> None:
    """Others, side by side, finish unharmed."""
    for finished in await asyncio.gather(*(run(parts, "chat") for _ in range(rollouts))):
        assert finished.result.limit is None
        assert finished.result.output
        assert finished.trajectory.flags == []


@in_module
async def test_thousand_held_connections_harm_nobody_else(server: RolloutContext) -> None:
    async with beside(server, "hold"):
        await until(lambda: refused(server, "connections") >= 1000 - 2 * 64)
        # Those that were refused end a moment later.
        await until(lambda: server.proxy.totals.connections <= 2 * 64 + 8)
        await honest(server)
    assert (await shown(server, "proxy_refused"))["connections"] >= 1000 - 2 * 64


@in_module
async def test_connections_that_come_and_go_harm_nobody_else(server: RolloutContext) -> None:
    before = refused(server, "connections")
    async with beside(server, "come_and_go"):
        await until(lambda: refused(server, "connections") > before)
        await honest(server)


@in_module
async def test_bodies_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a server that waits for as long as a busy machine needs to send them."""
    patient = ServerConfig(header_seconds=PATIENCE, body_idle_seconds=PATIENCE)
    monkeypatch.setattr("envserver.running.context.serve_proxy", partial(serve_proxy, http=patient))
    async with house() as server:
        await bodies_are_bounded_together(server)


async def bodies_are_bounded_together(server: RolloutContext) -> None:
    before, most = resident_bytes(), [0]

    async def watch() -> None:
        while True:
            most[0] = max(most[0], resident_bytes())
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())
    greedy, _ = await asyncio.gather(run(server, "bodies"), honest(server))
    watching.cancel()
    told = greedy.result.output
    assert told.pop("held") == 2
    assert sum(told.values()) == 38
    assert set(told) <= {"429", "closed"}
    assert most[0] - before < 400 * MB  # it was 2,500
    assert (await shown(server, "proxy_refused"))["bytes"] == 38
    assert server.proxy.totals.bytes == 0
    assert greedy.trajectory.flags == ["over_bound"]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@in_module
async def test_a_flood_of_requests_is_refused_and_counted() -> None:
    async with house(max_requests_per_second=10) as parts:
        greedy, _ = await asyncio.gather(run(parts, "flood"), honest(parts))
        told = greedy.result.output
        assert set(told) == {"200", "429"}
        assert sum(told.values()) == 800
        assert (await shown(parts, "proxy_refused"))["requests"] == told["429"]
        assert greedy.trajectory.flags == ["over_bound"]


@in_module
async def test_heads_and_bodies_that_stop_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a server whose times are short."""
    short = ServerConfig(header_seconds=3, body_idle_seconds=3)
    monkeypatch.setattr("envserver.running.context.serve_proxy", partial(serve_proxy, http=short))
    async with house() as parts:
        assert (await run(parts, "slow")).result.output == ["408", "408"]
        assert refused(parts, "idle") == 2


@pytest.mark.parametrize(
    ("kind", "hold_seconds", "worker_seconds", "end"),
    [("Greedy", 3600, 30, "time"), ("Trusted", 8, 300, None)],
)
def test_a_server_with_few_descriptors_goes_on(
    tmp_path: Path, kind: str, hold_seconds: int, worker_seconds: int, end: str | None
) -> None:
    """Three hold 1,000 connections each, and are scored in the end."""
    doings = [*["hold"] * 3, *["chat"] * 9]
    command = [
        ENVSERVER, "process", "--env", f"{FILE}:{kind}", "--sandbox.backend", "namespace",
        "--model", "sim", "--sim.latency_seconds", 0,
        "--env.doings", json.dumps(doings), "--env.total_steps", len(doings),
        "--env.hold_seconds", hold_seconds, "--env.group_size", 1,
        "--env.worker_timeout", worker_seconds,
        "--workers.dedicated", 4, "--env.data_path_to_save_groups", "out.jsonl",
    ]  # fmt: skip
    done = subprocess.run(
        ["sh", "-c", 'ulimit -n 512; exec "$@"', "sh", *map(str, command)],
        cwd=tmp_path, env=environment_variables(), capture_output=True, text=True, timeout=PATIENCE,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rollouts = [group["envserver"]["rollouts"][0] for group in read_jsonl(tmp_path / "out.jsonl")]
    ends = Counter((rollout["limit"], *rollout["flags"]) for rollout in rollouts)
    assert ends == {(None,): 9, (end, "over_bound"): 3}, done.stderr
    assert [rollout["attempt"] for rollout in rollouts] == [1] * 12
