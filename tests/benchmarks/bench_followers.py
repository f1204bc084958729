"""What a follower takes off the leader: CPU of both for posts and batches, sent to either.

    make postgres
    python tests/benchmarks/bench_followers.py [--posts 200] [--tokens 256 2048] [--rounds 3]

Two `envserver run-api` share a PostgreSQL, each a process of its own, with and without HTTPS. A
third process posts groups of 8 sequences as gzip, a connection for each as environments of the
Atropos wire make them, packed ones 16 at a time over connections that are kept as `envserver join`
does, and fetches batches of 64 groups as gzip: at the leader, then at the follower. CPU is that of
each server's process with its threads and kernel calls.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))
import api_load as load
from api_load import ROOT, Server
from support.commands import free_port, running, until
from support.postgres import find_programs, running_postgres

ROWS = 8
PACKED_AT_ONCE = 16
BATCH = 64


class Pair(NamedTuple):
    leader: Server
    follower: Server
    tls: ssl.SSLContext | None


class Cost(NamedTuple):
    """Milliseconds of CPU for each operation."""

    leader: float
    follower: float


@contextlib.contextmanager
def pair(store: str, folder: Path, *, https: bool) -> Iterator[Pair]:
    """Two servers that share `store`."""
    certificate = folder / "certificate.pem" if https else None
    words: list[object] = ["--store_shared", "--store", store, "--log_level", "warning"]
    if certificate is not None:
        make_certificate(certificate)
        words += ["--server.ssl_certfile", certificate, "--server.advertise_ca_certs", certificate]
    with contextlib.ExitStack() as stack:
        servers = []
        for name in ("leader", "follower"):
            port = free_port()
            url = f"{'https' if https else 'http'}://127.0.0.1:{port}"
            command = ["run-api", *words, "--port", port]
            process = stack.enter_context(running(*command, folder=folder))
            until(lambda url=url, name=name: role(url) == name, process.output)  # type: ignore[misc]
            servers.append(Server(name, url, process.pid))
        tls = ssl.create_default_context(cafile=certificate) if certificate else None
        yield Pair(servers[0], servers[1], tls)


def role(url: str) -> str:
    with contextlib.suppress(httpx.TransportError):
        answer = httpx.get(f"{url}/readyz", verify=False)
        return str(answer.json()["role"]) if answer.is_success else ""
    return ""


def make_certificate(place: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=bench"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(place), "-out", str(place) + ".crt"]
    subprocess.run(command, check=True, capture_output=True)
    with place.open("ab") as file:
        file.write(Path(str(place) + ".crt").read_bytes())


async def measured(servers: Pair, work: Awaitable[None], operations: int) -> Cost:
    *_, seconds = await load.cost_of(work, servers.leader, servers.follower)
    return Cost(*(1000 * one / operations for one in seconds))


async def fetch_all(client: load.Wire, fetches: int) -> None:
    for _ in range(fetches):
        load.sequences_in(await client.fetch())


async def compare(servers: Pair, posts: int, tokens: int) -> dict[str, tuple[Cost, Cost]]:
    """The costs of each operation at the leader and at the follower."""
    found: dict[str, list[Cost]] = {}
    bodies = load.compressed([load.posted(ROWS, tokens, seed) for seed in range(16)])
    packed = [load.packed(index, ROWS, tokens).body for index in range(16)]
    made = 0
    for server in (servers.leader, servers.follower):
        async with load.Wire(server.url, servers.tls) as client:
            await client.start(BATCH * ROWS)
            await client.join()
            await client.post_all(bodies, 16, "/scored_data")
            posting_all = client.post_all(bodies, posts, "/scored_data")
            posting = await measured(servers, posting_all, posts)
            fetches = max(1, posts // BATCH)
            fetching = await measured(servers, fetch_all(client, fetches), fetches)
            numbered = [load.renumbered(packed[n % 16], made + n) for n in range(posts)]
            made += posts
            posting_packed = client.post_packed(numbered, PACKED_AT_ONCE)
            joined = await measured(servers, posting_packed, posts)
        size = f"{ROWS} x {tokens}"
        for name, cost in (
            (f"post {size}, gzip", posting),
            (f"packed post {size}, {PACKED_AT_ONCE} at once", joined),
            (f"batch of {BATCH} groups {size}, gzip", fetching),
        ):
            found.setdefault(name, []).append(cost)
    return {name: (costs[0], costs[1]) for name, costs in found.items()}


def best(rounds: list[dict[str, tuple[Cost, Cost]]]) -> dict[str, tuple[Cost, Cost]]:
    def least(name: str, at: int) -> Cost:
        return Cost(*map(min, zip(*(one[name][at] for one in rounds), strict=True)))

    return {name: (least(name, 0), least(name, 1)) for name in rounds[0]}


def table(title: str, costs: dict[str, tuple[Cost, Cost]]) -> Table:
    columns = ("ms of CPU", "leader alone", "leader", "follower", "taken off")
    shown = load.table(title, *columns)
    for name, (alone, shared) in costs.items():
        cells = [f"{one:.2f}" for one in (alone.leader, *shared)]
        shown.add_row(name, *cells, f"{1 - shared.leader / alone.leader:.0%}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--posts", type=int, default=200)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--rounds", type=int, default=3)
    wanted = parser.parse_args()
    programs = find_programs(ROOT / ".venv-postgres")
    if programs is None:
        raise SystemExit("There is no PostgreSQL: make postgres")
    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="bench-followers-"))
    try:
        with running_postgres(programs) as postgres:
            for https in (False, True):
                with pair(postgres.emptied(), folder, https=https) as servers:
                    for tokens in wanted.tokens:
                        rounds = [
                            asyncio.run(compare(servers, wanted.posts, tokens))
                            for _ in range(wanted.rounds)
                        ]
                        console.print(table("HTTPS" if https else "HTTP", best(rounds)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
