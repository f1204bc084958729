"""A server's certificate that is replaced on disk, as rotation does it: without a restart."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
import trustme
from envserver_records.errors import EngineUnavailable
from envserver_records.servers import AsyncServersClient
from structlog.testing import capture_logs
from support.api import running_api
from support.waiting import PATIENCE, until

from envserver import OpenAIConfig, ServerConfig
from envserver.api.app import create_api
from envserver.http import server as certificates
from envserver.http.server import serve_api
from envserver.models.openai import OpenAIEngine
from envserver.running.engines import look_at

REFUSED = (OSError, asyncio.IncompleteReadError)  # TLS errors are of the first kind
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class House:
    """A server that looks at its certificate often, and what it is given."""

    def __init__(self, folder: Path, authority: trustme.CA) -> None:
        self.chain, self.key = folder / "chain.pem", folder / "key.pem"
        self.clients = folder / "clients.pem"
        self.authority = authority
        self.issue(authority)
        self.settings = ServerConfig(
            ssl_certfile=self.chain,
            ssl_keyfile=self.key,
            ssl_ca_certs=self.clients,
            ssl_cert_reqs="required",
        )

    def issue(self, authority: trustme.CA) -> None:
        """Replaces one file after the other, the key last: in between they do not fit."""
        made = authority.issue_cert("localhost", "127.0.0.1")
        made.cert_chain_pems[0].write_to_path(self.chain)
        made.private_key_pem.write_to_path(self.key)
        authority.cert_pem.write_to_path(self.clients)

    async def open(self, authority: trustme.CA) -> Connection:
        """A connection of a client that has a certificate of `authority`, and wants one of it.

        Raises OSError or an error of TLS: the two do not trust each other.
        """
        context = ssl.create_default_context()
        authority.configure_trust(context)
        authority.issue_cert("client").configure_cert(context)
        host, port = self.server.host, self.server.port
        opened = await asyncio.open_connection(host, port, ssl=context)
        await ask(opened)
        return opened

    async def accepted(self, authority: trustme.CA) -> Connection:
        """The first connection that the two agree on."""
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    return await self.open(authority)
                except REFUSED:
                    await asyncio.sleep(0.02)


async def ask(connection: Connection) -> None:
    reader, writer = connection
    writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))


@pytest.fixture
async def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    monkeypatch.setattr(certificates, "LOOK_SECONDS", 0.02)
    made = House(tmp_path, trustme.CA())
    async with running_api(tmp_path / "store.db") as api:
        app = create_api(api.store, settings=made.settings)
        async with await serve_api(app, "127.0.0.1", 0, made.settings) as made.server:
            yield made


async def test_what_does_not_fit_changes_nothing_and_is_tried_again(house: House) -> None:
    new, before = trustme.CA(), await house.open(house.authority)
    chain = house.chain.read_bytes()
    with capture_logs() as logs:
        for wrong in (chain[: len(chain) // 2], trustme.CA().cert_pem.bytes(), None):
            said = len(logs)
            house.chain.unlink() if wrong is None else house.chain.write_bytes(wrong)
            await until(lambda said=said: len(logs) > said)
            await asyncio.sleep(0.1)
            (await house.open(house.authority))[1].close()
            await ask(before)  # else it is closed as idle on a busy machine
        house.issue(new)
        (await house.accepted(new))[1].close()
        with pytest.raises(REFUSED):
            await house.open(house.authority)
        await ask(before)  # open connections stay
        before[1].close()
    problems = [line["error"] for line in logs if line["event"] == "certificate_not_reloaded"]
    assert len(problems) >= 3
    assert all(one != following for one, following in pairwise(problems))
    assert all("certificate cannot be used" in one for one in problems)


async def test_who_does_not_trust_a_certificate_hears_of_ssl_cert_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, trusted = trustme.CA(), tmp_path / "trusted.pem"
    authority.cert_pem.write_to_path(trusted)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b'{"data": [{"id": "tiny"}]}'
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()

    async def hears() -> list[str]:
        """The hint of engine and server clients for an untrusted certificate."""
        config = OpenAIConfig(base_url=f"{url}/v1", model_name="tiny")
        said = []
        async with OpenAIEngine(config) as engine, AsyncServersClient(url) as http:
            for asking in (look_at(engine, must_answer=True), http.get("/v1/models")):
                try:
                    said.append(str(await asking))
                except (EngineUnavailable, httpx.TransportError) as error:
                    said.append(str(error))
        return said

    async with await asyncio.start_server(answer, "127.0.0.1", ssl=context) as server:
        url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
        for said in await hears():
            assert "SSL_CERT_FILE" in said and "models start" not in said
        monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
        assert await hears() == ["True", "<Response [200 OK]>"]
