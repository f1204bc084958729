"""What a follower takes off the leader: CPU of both for posts and batches, sent to either.

    make postgres
    python tests/benchmarks/bench_followers.py [--posts 200] [--tokens 256 2048] [--rounds 3]

Two `envserver run-api` share a PostgreSQL, each a process of its own, with and without HTTPS. A
third process posts groups of 8 sequences as gzip, a connection for each as environments of the
Atropos API make them, packed ones 16 at a time over connections that are kept as `envserver join`
does, and fetches batches of 64 groups as gzip: at the leader, then at the follower. CPU is that of
each server's process with its threads and kernel calls.
"""

import asyncio
import contextlib
import json
import ssl
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import api_load as load
from api_load import Server
from rich.table import Table
from support.commands import free_port, running, until

PACKED_AT_ONCE = 16
BATCH = 64


class Pair(NamedTuple):
    leader: Server
    follower: Server
    tls: ssl.SSLContext | None


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
            process = stack.enter_context(running("run-api", *words, "--port", port, folder=folder))
            until(lambda url=url, name=name: role(url) == name, process.output)  # type: ignore[misc]
            servers.append(Server(name, url, process.pid))
        tls = ssl.create_default_context(cafile=certificate) if certificate else None
        yield Pair(servers[0], servers[1], tls)


def role(url: str) -> str:
    return str(json.loads(load.body_of(f"{url}/readyz") or "{}").get("role", ""))


def make_certificate(place: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=bench"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(place), "-out", str(place) + ".crt"]
    subprocess.run(command, check=True, capture_output=True)
    with place.open("ab") as file:
        file.write(Path(str(place) + ".crt").read_bytes())


async def compare(servers: Pair, posts: int, tokens: int, costs: list[load.Costs]) -> None:
    """The costs of each operation at the leader and at the follower."""
    made = 0
    for server, of_both in zip((servers.leader, servers.follower), costs, strict=True):
        async with load.Wire(server.url, servers.tls) as client:
            await load.post_and_fetch(client, load.Costs(), tokens, 16)
            await client.join()
            for _ in range(max(1, posts // BATCH)):
                await load.post_and_fetch(client, of_both, tokens, BATCH)
            posting = client.post_packed(load.posts(tokens, made, posts), PACKED_AT_ONCE)
            made += posts
            await of_both.measure(f"packed post, {PACKED_AT_ONCE} at once", posts, posting)


def table(title: str, at_leader: load.Costs, at_follower: load.Costs) -> Table:
    shown = load.table(title, "ms of CPU", "leader alone", "leader", "follower", "taken off")
    for name in at_leader.of:
        (alone, _), shared = at_leader.best(name), at_follower.best(name)
        cells = [f"{one:.2f}" for one in (alone, *shared)]
        shown.add_row(name, *cells, f"{1 - shared[0] / alone:.0%}")
    return shown


def main() -> None:
    wanted = load.asked(__doc__, posts=200, tokens=[256, 2048], rounds=3)
    with load.postgres() as postgres, tempfile.TemporaryDirectory() as folder:
        for https in (False, True):
            with pair(postgres.emptied(), Path(folder), https=https) as servers:
                for tokens in wanted.tokens:
                    costs = [load.Costs(servers.leader, servers.follower) for _ in range(2)]
                    for _ in range(wanted.rounds):
                        asyncio.run(compare(servers, wanted.posts, tokens, costs))
                    kind = "HTTPS" if https else "HTTP"
                    load.show(table(f"{kind}, groups of 8 x {tokens}", *costs))


if __name__ == "__main__":
    main()
