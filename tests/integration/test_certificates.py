"""A server's certificate that is replaced on disk, as rotation does it: without a restart."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest
import trustme
from structlog.testing import capture_logs
from support.api import running_api
from support.waiting import PATIENCE

from envserver import ServerConfig
from envserver.api import certificates, create_api, serve_api
from envserver.api.server import RunningServer

GET = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"


class Files:
    """What a server is given, replaced one file after the other."""

    def __init__(self, folder: Path) -> None:
        self.chain, self.key = folder / "chain.pem", folder / "key.pem"
        self.clients = folder / "clients.pem"

    def issue(self, authority: trustme.CA) -> None:
        """The key last: in between they do not fit."""
        made = authority.issue_cert("localhost", "127.0.0.1")
        made.cert_chain_pems[0].write_to_path(self.chain)
        made.private_key_pem.write_to_path(self.key)
        authority.cert_pem.write_to_path(self.clients)

    def settings(self) -> ServerConfig:
        return ServerConfig(
            ssl_certfile=self.chain,
            ssl_keyfile=self.key,
            ssl_ca_certs=self.clients,
            ssl_cert_reqs="required",
        )


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    """Of a client that has a certificate of `authority`, and wants one of it."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    authority.issue_cert("client").configure_cert(context)
    return context


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, server: RunningServer, authority: trustme.CA) -> Connection:
        """Raises OSError or an error of TLS: the two do not trust each other."""
        opened = cls(
            *await asyncio.open_connection(server.host, server.port, ssl=trusting(authority))
        )
        await opened.ask()
        return opened

    async def ask(self) -> None:
        self._writer.write(GET)
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await self._reader.readexactly(length)

    async def close(self) -> None:
        self._writer.close()


@pytest.fixture
def authorities() -> tuple[trustme.CA, trustme.CA]:
    return trustme.CA(), trustme.CA()


@pytest.fixture
def files(tmp_path: Path, authorities: tuple[trustme.CA, trustme.CA]) -> Files:
    made = Files(tmp_path)
    made.issue(authorities[0])
    return made


@pytest.fixture
async def server(
    tmp_path: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RunningServer]:
    monkeypatch.setattr(certificates, "LOOK_SECONDS", 0.02)
    async with running_api(tmp_path / "store.db") as api:
        app = create_api(api.store, settings=files.settings())
        async with await serve_api(app, "127.0.0.1", 0, files.settings()) as running:
            yield running


async def accepted(server: RunningServer, authority: trustme.CA) -> Connection:
    """The first connection that the two agree on."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await Connection.open(server, authority)
            except (OSError, asyncio.IncompleteReadError):  # ssl's own are of the first kind
                await asyncio.sleep(0.02)


async def test_new_connections_have_the_new_certificate_and_open_ones_stay(
    server: RunningServer, files: Files, authorities: tuple[trustme.CA, trustme.CA]
) -> None:
    old, new = authorities
    before = await Connection.open(server, old)
    for authority, former in ((new, old), (old, new)):
        files.issue(authority)
        after = await accepted(server, authority)
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await Connection.open(server, former)
        await before.ask()
        await after.close()
    await before.close()


async def test_what_does_not_fit_changes_nothing_and_is_tried_again(
    server: RunningServer, files: Files, authorities: tuple[trustme.CA, trustme.CA]
) -> None:
    old, new = authorities
    chain = files.chain.read_bytes()
    with capture_logs() as logs:
        for wrong in (chain[: len(chain) // 2], trustme.CA().cert_pem.bytes(), None):
            said = len(logs)
            files.chain.unlink() if wrong is None else files.chain.write_bytes(wrong)
            async with asyncio.timeout(PATIENCE):
                while len(logs) == said:
                    await asyncio.sleep(0.02)
            await asyncio.sleep(0.1)
            await (await Connection.open(server, old)).close()
        files.issue(new)
        await (await accepted(server, new)).close()
    problems = [line["error"] for line in logs if line["event"] == "certificate_not_reloaded"]
    assert len(problems) >= 3
    assert all(one != following for one, following in pairwise(problems))
    assert all("certificate cannot be used" in one for one in problems)
