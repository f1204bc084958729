"""Limits of connections and requests, and HTTPS, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from envserver_records.errors import ConfigError
from support.api import Api, running_api
from support.waiting import PATIENCE, until

from envserver import ServerConfig
from envserver.api import create_api, create_token, serve_api

GET = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /v1/runs HTTP/1.1\r\nhost: localhost\r\n"


@asynccontextmanager
async def bounded(tmp_path: Path, **server: Any) -> AsyncIterator[Api]:
    async with running_api(tmp_path / "store.db", server=server) as api:
        yield api
        assert await api.status("GET", "/healthz") == 200  # it lives, whatever came


def port_of(api: Api) -> int:
    return int(api.url.rpartition(":")[2])


async def say(api: Api, *parts: bytes, pause: float = 0.0) -> bytes:
    """All that the server answers to `parts`, until it hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(api))
    answer = asyncio.create_task(_all_of(reader))
    try:
        for part in parts:
            if answer.done():
                break
            writer.write(part)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            await asyncio.sleep(pause)
        return await answer
    finally:
        writer.close()


async def _all_of(reader: asyncio.StreamReader) -> bytes:
    parts = []
    async with asyncio.timeout(PATIENCE):
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(65536):
                parts.append(part)
    return b"".join(parts)


def told(answer: bytes) -> tuple[int, str]:
    """Status and kind of the only answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert b"application/problem+json" in head
    problem = json.loads(body)
    status = int(head.split(b" ", 2)[1])
    assert problem["status"] == status
    return status, problem["type"].removeprefix("urn:envserver:error:")


async def test_heads_have_a_size_and_a_number(tmp_path: Path) -> None:
    small = {"max_header_bytes": 2000, "max_headers": 10, "max_url_bytes": 300}
    async with bounded(tmp_path, **small) as api:
        many = b"".join(b"x-%d: 1\r\n" % number for number in range(10))
        assert told(await say(api, GET + many + b"\r\n")) == (431, "headers_too_large")
        large = b"x: " + b"y" * 2000
        assert told(await say(api, GET + large + b"\r\n\r\n")) == (431, "headers_too_large")
        # However slowly it grows, or if it is never ended.
        growing = [GET + large, *[b"z" * 1500] * 3]
        assert told(await say(api, *growing, pause=0.02)) == (431, "headers_too_large")
        long = b"GET /" + b"a" * 300 + b" HTTP/1.1\r\n\r\n"
        assert told(await say(api, long)) == (414, "url_too_long")


async def test_heads_and_bodies_have_a_time(tmp_path: Path) -> None:
    async with bounded(
        tmp_path, header_seconds=0.3, body_idle_seconds=0.3, body_seconds=0.6
    ) as api:
        assert told(await say(api, GET)) == (408, "too_slow")
        assert told(await say(api, GET[:9], *[b"x"] * 9, pause=0.05)) == (408, "too_slow")
        # A second request on the same connection has the same time.
        twice = await say(api, GET + b"\r\n", GET[:9])
        assert b"200 OK" in twice and b"HTTP/1.1 408" in twice
        assert await say(api) == b""  # said nothing: told nothing
        assert told(await say(api, POST + b"content-length: 9\r\n\r\n{")) == (408, "too_slow")
        chunked = POST + b"transfer-encoding: chunked\r\n\r\n"
        assert told(await say(api, chunked, *[b"1\r\n{\r\n"] * 20, pause=0.05)) == (408, "too_slow")


async def test_a_server_may_open_as_many_files_as_the_machine_lets_it(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    async with bounded(tmp_path):
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(65536, hard)


async def test_connections_have_a_number(tmp_path: Path) -> None:
    async with bounded(tmp_path, max_connections=3) as api:
        await api.http.get("/healthz")
        held = [await asyncio.open_connection("127.0.0.1", port_of(api)) for _ in range(2)]
        assert told(await say(api)) == (503, "too_many_connections")
        for _, writer in held:
            writer.close()
            await writer.wait_closed()

        async def is_let_in() -> bool:
            return b"200 OK" in await say(api, GET + b"connection: close\r\n\r\n")

        await until(is_let_in)


async def test_what_nobody_reads_of_a_body_is_not_read_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    create_token(path, "one", "reader")
    async with bounded(tmp_path, tokens_file=path) as api:
        head = POST + b"content-length: 100000000\r\n\r\n"
        answer = await say(api, head + b"x" * 1000, *[b"x" * 65536] * 40)
        assert answer == b"" or b" 401 " in answer  # and it has hung up
        # What is short is read, and the connection goes on.
        both = POST + b"content-length: 5\r\n\r\nhello" + GET + b"connection: close\r\n\r\n"
        answer = await say(api, both)
        assert b" 401 " in answer and b" 200 " in answer


async def test_a_run_has_so_many_leases_open(tmp_path: Path) -> None:
    async with bounded(tmp_path, max_open_leases=2) as api:
        await api.run()
        await api.put(*"abcd")
        first = await api.lease(max_groups=1)
        second = await api.lease(key="k", max_groups=1)
        refused = await api.http.post("/v1/runs/run/lease", json={"max_groups": 1})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        # An answer that was lost is had again all the same.
        repeated = await api.lease(key="k", max_groups=1)
        assert repeated["lease_id"] == second["lease_id"] != first["lease_id"]
        await api.end("ack", first)
        assert len(await api.leased(max_groups=1)) == 1
        assert await api.status("POST", "/v1/runs/run/lease", json={"max_groups": 10**6}) == 422


# HTTPS


async def test_https_with_a_key_under_a_password(tmp_path: Path) -> None:
    authority, password = trustme.CA(), "tls-password-1"
    made = authority.issue_cert("127.0.0.1")
    chain, locked = tmp_path / "chain.pem", tmp_path / "locked.pem"
    made.cert_chain_pems[0].write_to_path(chain)
    locked.write_bytes(
        serialization.load_pem_private_key(made.private_key_pem.bytes(), None).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(password.encode()),
        )
    )
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    tls = {"ssl_certfile": chain, "ssl_keyfile": locked}
    async with running_api(tmp_path / "store.db") as api:
        settings = ServerConfig(**tls, ssl_keyfile_password=password)
        app = create_api(api.store, settings=settings)
        async with (
            await serve_api(app, "127.0.0.1", 0, settings) as server,
            httpx.AsyncClient(verify=trusting, timeout=PATIENCE) as http,
        ):
            assert (await http.get(f"{server.url}/healthz")).status_code == 200
            with pytest.raises(httpx.HTTPError):
                await api.http.get(server.url.replace("https", "http") + "/healthz")
        for more in ({}, {"ssl_keyfile_password": "wrong-password"}):
            settings = ServerConfig(**tls, **more)
            with pytest.raises(ConfigError, match="certificate") as refused:
                await serve_api(app, "127.0.0.1", 0, settings)
            assert "wrong-password" not in str(refused.value)
