"""The trainer APIs that are measured, each as a process of its own, and what is sent to and fetched
from them, as the clients of the Atropos API and our own do it.

Posts: `json.dumps`, gzip at Python's default level, a connection for each, as atroposlib's
environments post them; 8 are under way at a time. Batches: `GET /batch` for gzip, as `requests`
asks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import json
import os
import re
import ssl
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import aiohttp
import httpx
import numpy as np
from envserver_records.records import Group, Json, Trajectory, pack, unpack
from envserver_records.records import Sequence as TokenSequence
from proxy_load import cpu_seconds
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.api import ENVIRONMENT as ENVIRONMENT_OF_ATROPOS
from support.api import REGISTRATION, registration
from support.commands import free_port, running, until
from support.postgres import Postgres, find_programs, running_postgres
from support.process_tree import cpu_seconds as cpu_of_ended_too
from support.process_tree import descendants, own_megabytes
from support.records import trajectory

from envserver.rollouts.stream import group_id as stream_group_id
from envserver.rollouts.stream import stream_prefix
from envserver.runners import messages
from envserver.runners.messages import KEY_HEADER
from envserver.store import GroupPut, open_store
from envserver.store.demand import put_of

T = TypeVar("T")
AT_A_TIME = 8
ENVIRONMENT = "bench"
GROUP_SIZE = 8
_VOCABULARY = 150_000


# How a benchmark is asked, measures, prints and judges


def asked(doc: str | None, *places: str, **defaults: Any) -> Any:
    """The arguments of a command line: what must be given, and `--NAME` by default or type."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    for place in places:
        parser.add_argument(place)
    for name, default in defaults.items():
        how: Json = {"default": default, "type": type(default)}
        if default is False:
            how = {"action": "store_true"}
        elif isinstance(default, list):
            how |= {"nargs": "+", "type": type(default[0])}
        elif isinstance(default, type):
            how = {"type": default}
        parser.add_argument(*{f"--{name}", f"--{name.replace('_', '-')}"}, **how)
    return parser.parse_args()


def judge(missed: Sequence[str]) -> None:
    """Exits with 1 where a budget is missed."""
    if missed:
        sys.exit(f"Over budget: {'; '.join(missed)}.")


def table(title: str, *columns: str, left: int = 1) -> Table:
    """A table whose first columns, so many, are words."""
    made = Table(title=title)
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number < left else "right")
    return made


def show(shown: Table, output: Path | None = None) -> None:
    """Prints a table, and writes it to `output` too."""
    Console(width=130).print(shown)
    if output is not None:
        with output.open("w") as file:
            Console(file=file, width=130).print(shown)


async def cost_of(work: Awaitable[T], *servers: Server) -> tuple[T, float, list[float]]:
    """What `work` gives, the seconds until it was there, and the CPU seconds of each server, with
    what each does after its last answer."""
    before, began = [one.cpu() for one in servers], time.perf_counter()
    made = await work
    wall = time.perf_counter() - began
    await asyncio.sleep(0.05)
    return made, wall, [one.cpu() - cpu for one, cpu in zip(servers, before, strict=True)]


class Costs:
    """Milliseconds of CPU that an operation takes of each server, by case, of all tries."""

    def __init__(self, *servers: Server) -> None:
        self.of: dict[str, list[list[float]]] = {}
        self._servers = servers

    async def measure(self, case: str, operations: int, work: Awaitable[T]) -> T:
        made, _, seconds = await cost_of(work, *self._servers)
        self.of.setdefault(case, []).append([1000 * one / operations for one in seconds])
        return made

    def best(self, case: str) -> list[float]:
        """The least of each server."""
        return [min(tries) for tries in zip(*self.of[case], strict=True)]


def cpu_below() -> float:
    """CPU seconds of all processes below this one, ended ones included."""
    own = os.times()
    return own.children_user + own.children_system + cpu_of_ended_too(descendants(os.getpid()))


def megabytes(kind: str, *pids: int | str) -> float:
    """What processes hold, by lines of smaps_rollup: "Private_" is theirs alone, of "Pss:" a share
    of what they hold together."""
    kilobytes = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            kilobytes += sum(int(line.split()[1]) for line in lines if line.startswith(kind))
    return kilobytes / 1024


@contextmanager
def peak_megabytes(pid: int, every_seconds: float, *, itself: bool = True) -> Iterator[list[float]]:
    """The peak of what a process (`itself` too) and all below it hold while the block runs."""
    peak, over = [0.0], threading.Event()

    def look() -> None:
        while not over.wait(every_seconds):
            pids = descendants(pid) | ({pid} if itself else set())
            peak[0] = max(peak[0], megabytes("Pss:", *pids))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def rows(count: int, tokens: int, seed: int) -> list[dict[str, list[Any]]]:
    """Sequences of a quarter of prompt and three quarters that were sampled: ids as frequent as
    words are, logprobs as engines give them (float32, written out as Python's floats)."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        ids = random.zipf(1.2, tokens) % _VOCABULARY
        sampled = np.arange(tokens) >= tokens // 4
        logprobs = np.where(sampled, -random.exponential(0.6, tokens), 1.0).astype(np.float32)
        found.append(
            {
                "tokens": ids.tolist(),
                "masks": np.where(sampled, ids, -100).tolist(),
                "logprobs": logprobs.tolist(),
            }
        )
    return found


def posted(count: int, tokens: int, seed: int = 0, env_id: int | None = None) -> bytes:
    """A group as an environment posts it, before gzip."""
    made = rows(count, tokens, seed)
    group = {
        "tokens": [row["tokens"] for row in made],
        "masks": [row["masks"] for row in made],
        "scores": [float(index % 2) for index in range(count)],
        "inference_logprobs": [row["logprobs"] for row in made],
        "ref_logprobs": None,
        "overrides": None,
        "group_overrides": {},
        "env_id": env_id,
    }
    return json.dumps(group).encode()


def packed(index: int, count: int, tokens: int) -> GroupPut:
    """The same group as one of our own environments makes it: that at `index` of its stream."""
    group_id = stream_group_id(stream_prefix(ENVIRONMENT, "train", 0), index, "task")
    group = Group(
        group_id=group_id,
        index=index,
        env=ENVIRONMENT,
        task_id="task",
        split="train",
        seed=0,
        trajectories=[
            _trajectory(f"{group_id}-{number}", row)
            for number, row in enumerate(rows(count, tokens, index % 16))
        ],
        policy_version=1,
        generation_params={},
    )
    return put_of(group, pack(group))


def _trajectory(rollout_id: str, row: dict[str, list[Any]]) -> Trajectory:
    mask = (np.array(row["masks"]) != -100).astype(np.uint8)
    sequence = TokenSequence(
        tokens=np.array(row["tokens"], np.int32),
        mask=mask,
        logprobs=np.array(row["logprobs"], np.float32) * mask,
        calls=np.where(mask, 0, -1).astype(np.int32),
        versions=np.where(mask, 1, -1).astype(np.int32),
        path=[0],
    )
    return trajectory(rollout_id, sequence, task_id="task", env=ENVIRONMENT, messages=[])


@cache
def packed_bodies(tokens: int) -> list[bytes]:
    """Sixteen groups of 8 x `tokens`, packed."""
    return [packed(index, GROUP_SIZE, tokens).body for index in range(16)]


def posts(tokens: int, first: int, count: int) -> list[bytes]:
    """Packed groups at `count` places of their stream, from `first`, as they are posted."""
    made = []
    for index in range(first, first + count):
        group = unpack(packed_bodies(tokens)[index % 16], Group)
        group.index = index
        group.group_id = stream_group_id(stream_prefix(ENVIRONMENT, "train", 0), index, "task")
        made.append(messages.compressed(pack(group)))
    return made


@cache
def bodies(tokens: int) -> list[bytes]:
    """Sixteen groups of 8 x `tokens`, as atroposlib sends them."""
    return [gzip.compress(posted(GROUP_SIZE, tokens, seed)) for seed in range(16)]


class Wire:
    """A client of the Atropos API at `url`; an async context manager.

    Args:
        tls: checks the server's certificate; None: by the authorities of this machine.
    """

    def __init__(self, url: str, tls: ssl.SSLContext | None = None) -> None:
        self.url = url
        self._tls = tls

    def _session(self, *, auto_decompress: bool = True) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(ssl=self._tls or True)
        return aiohttp.ClientSession(connector=connector, auto_decompress=auto_decompress)

    async def __aenter__(self) -> Wire:
        self._kept = self._session(auto_decompress=False)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._kept.close()

    async def start(self, batch_size: int) -> None:
        """A fresh run: everything that waited is gone."""
        await self.get("/reset_data")
        await self._post(
            "/register",
            REGISTRATION | {"batch_size": batch_size, "max_token_len": 4096, "num_steps": 10**6},
        )
        await self.get("/batch")

    async def add_environment(self, group_size: int) -> int:
        """The number of a new environment."""
        answer = await self._post(
            "/register-env",
            ENVIRONMENT_OF_ATROPOS | {"max_token_length": 4096, "group_size": group_size},
        )
        return int(answer["env_id"])

    async def post_all(self, bodies: Sequence[bytes], count: int, path: str) -> None:
        """`count` posts, each with the next of `bodies` (gzip), which come again and again."""
        numbers = iter(range(count))

        async def environment() -> None:
            for number in numbers:
                await self._post_gzip(path, bodies[number % len(bodies)])

        await asyncio.gather(*[environment() for _ in range(AT_A_TIME)])

    async def _post_gzip(self, path: str, body: bytes) -> None:
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        async with (
            self._session() as session,
            session.post(self.url + path, data=body, headers=headers) as answer,
        ):
            answer.raise_for_status()
            await answer.read()

    async def join(self) -> None:
        """Registers as an environment on another machine, whose groups are packed."""
        body = registration(ENVIRONMENT, env=ENVIRONMENT, group_size=1)
        welcome = await self._post("/v1/environments", body)
        self._joined = f"{self.url}/v1/environments/{welcome['id']}/groups"
        self._headers = {KEY_HEADER: welcome["key"], "content-type": messages.GROUP_LIST_MSGPACK}

    async def post_packed(self, bodies: Sequence[bytes], at_once: int) -> None:
        """Posts `bodies`, so many in each request, over connections that are kept, as `envserver
        join` does when they are ready together."""
        waiting = iter(range(0, len(bodies), at_once))

        async def environment(session: aiohttp.ClientSession) -> None:
            for first in waiting:
                post = messages.encode_batch(bodies[first : first + at_once])
                async with session.post(self._joined, data=post, headers=self._headers) as answer:
                    answer.raise_for_status()
                    if (await answer.json())["refused"]:
                        raise RuntimeError("a group was refused")

        async with self._session() as session:
            await asyncio.gather(*[environment(session) for _ in range(AT_A_TIME)])

    async def fetch(self) -> bytes:
        """A batch as it comes, gzip."""
        headers = {"accept-encoding": "gzip, deflate"}
        async with self._kept.get(self.url + "/batch", headers=headers) as answer:
            answer.raise_for_status()
            return await answer.read()

    async def get(self, path: str) -> bytes:
        async with self._kept.get(self.url + path) as answer:
            answer.raise_for_status()
            return await answer.read()

    async def status_env(self, env_id: int) -> None:
        """What environments ask ten times a second."""
        async with self._kept.get(self.url + "/status-env", json={"env_id": env_id}) as answer:
            answer.raise_for_status()
            await answer.read()

    async def _post(self, path: str, body: Json) -> Json:
        async with self._kept.post(self.url + path, json=body) as answer:
            answer.raise_for_status()
            found: Json = await answer.json(content_type=None)
            return found


async def post_and_fetch(wire: Wire, costs: Costs, tokens: int, groups: int) -> None:
    """Single posts of groups of 8 x `tokens`, and a batch of them all."""
    await wire.start(groups * GROUP_SIZE)
    posting = wire.post_all(bodies(tokens), groups, "/scored_data")
    await costs.measure(f"post 8 x {tokens}", groups, posting)
    messages = await costs.measure(f"fetch {groups * GROUP_SIZE} x {tokens}", 1, wire.fetch())
    stream = zlib.decompressobj(16 + zlib.MAX_WBITS)
    text = stream.decompress(messages)
    if not stream.eof or stream.unused_data or len(json.loads(text)["batch"]) != groups:
        raise RuntimeError("the answer is another batch, or not a complete gzip stream")


# The servers


ROOT = Path(__file__).parent.parent.parent
PEER_PYTHON = ROOT / ".venv-atropos" / "bin" / "python"
HOW_TO_GET_PEER = "PyPI's atroposlib is not in .venv-atropos: make atropos-peer"


class Server(NamedTuple):
    """A trainer API that answers at `url`."""

    name: str
    url: str
    pid: int

    def cpu(self) -> float:
        """CPU seconds so far, with kernel calls and all threads."""
        return cpu_seconds(self.pid)

    def megabytes(self) -> float:
        """What it holds of the machine's memory now, pages of files not counted."""
        return own_megabytes(self.pid)

    def metric(self, name: str) -> float:
        """The sum of a metric's values over its labels."""
        text = body_of(f"{self.url}/metrics")
        return sum(map(float, re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)))


def body_of(url: str) -> str:
    """The body of a successful answer to GET; "" while there is none."""
    with contextlib.suppress(httpx.TransportError):
        answer = httpx.get(url, verify=False, timeout=60)
        return answer.text if answer.is_success else ""
    return ""


@contextmanager
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL with fsync."""
    programs = find_programs(ROOT / ".venv-postgres")
    if programs is None:
        raise SystemExit("There is no PostgreSQL: make postgres")
    with running_postgres(programs) as made:
        yield made


@contextmanager
def ours(groups: Sequence[GroupPut] = (), store: str | None = None) -> Iterator[Server]:
    """`envserver run-api` over `store`, else over a SQLite store on disk that holds `groups`."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        place = store or folder / "store.db"
        if groups:
            asyncio.run(_fill(folder / "store.db", groups))
        words = ["run-api", "--port", "0", "--store", place, "--log_level", "warning"]
        with running(*words, folder=folder) as process:
            url = process.wait_for(r"(http://127\.0\.0\.1:\d+)").group(1)
            yield Server("ours", url, process.pid)


async def _fill(place: Path, groups: Sequence[GroupPut]) -> None:
    async with open_store(place) as store:
        for group in groups:
            await store.put([group])


@contextmanager
def theirs() -> Iterator[Server]:
    """The server of atroposlib, as its `run-api` starts it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    words = ["-m", "uvicorn", "atroposlib.api.server:app", "--log-level", "warning"]
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        running(*words, "--port", port, folder=Path(folder), program=PEER_PYTHON) as process,
    ):
        until(lambda: body_of(f"{url}/info"), process.output, alive=process.process)
        yield Server("atroposlib", url, process.pid)
