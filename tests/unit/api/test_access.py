"""Access tokens, roles, quotas: who may send which request, over real HTTP."""

import asyncio
import contextlib
import hashlib
import json
import re
import resource
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
import trustme
import yaml
from cryptography.hazmat.primitives import serialization
from envserver_records.errors import ConfigError
from envserver_records.records import Group
from support.api import Api, head_or_answer, running_api
from support.waiting import PATIENCE, until

from envserver import OpenAIConfig, ServerConfig, main
from envserver.api.app import create_api
from envserver.http.access import RULES, AccessTokens, Role, create_token, read_tokens, revoke_token
from envserver.http.middleware import Strangers, TooManyRequests
from envserver.http.server import serve_api
from envserver.models.fleet import Fleet
from envserver.models.openai import OpenAIEngine
from envserver.models.replicas import Replica
from envserver.proxy.gate import Gate
from envserver.rollouts.ordered import Orders

ROLES: tuple[Role, ...] = get_args(Role)


class EmptySink:
    """Keeps no group: none is ordered here."""

    async def put(self, group: Group) -> None:
        raise AssertionError(group.group_id)

    async def known(self, group_ids: list[str]) -> set[str]:
        return set()


@asynccontextmanager
async def guarded(path: Path, **server: Any) -> AsyncIterator[Api]:
    async with running_api(
        path.with_name("store.db"),
        server={"tokens_file": path, **server},
        gate=Gate(),
        runners=None,
        fleet=Fleet(OpenAIEngine(OpenAIConfig(base_url="none", model_name="m")), _admit),
        orders=Orders([], EmptySink()),
    ) as api:
        yield api


async def _admit(replica: Replica) -> None:
    """Finds nothing wrong with an engine."""


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def ask(api: Api, token: str | None, method: str, path: str, **more: Any) -> httpx.Response:
    headers = {**(bearer(token) if token else {}), **more.pop("headers", {})}
    return await head_or_answer(api.http, method, path, headers=headers, **more)


async def code(api: Api, token: str | None, method: str, path: str, **more: Any) -> int:
    """The status of the answer."""
    return (await ask(api, token, method, path, **more)).status_code


def filled(path: str) -> str:
    return re.sub(r"{.*?}", "e", path)


# The file


@pytest.mark.parametrize("broken", ["tokens: [", "tokens: [{id: x}]", "- 1", "\0", "tokens: 3"])
def test_a_broken_file_changes_nothing_for_a_server_that_runs(path: Path, broken: str) -> None:
    text, _ = create_token(path, "one", "trainer")
    tokens = AccessTokens(path)
    good = path.read_text()
    path.write_text(broken)
    assert tokens.find(text) is not None
    with pytest.raises(ConfigError):
        AccessTokens(path)
    path.unlink()
    assert tokens.find(text) is not None
    path.write_text(good)
    path.chmod(0o644)
    assert tokens.find(text) is not None
    with pytest.raises(ConfigError, match="chmod 600"):
        AccessTokens(path)
    path.chmod(0o600)
    revoke_token(path, "one")
    assert tokens.find(text) is None
    with pytest.raises(ConfigError, match="no token"):
        AccessTokens(path)


def test_the_command_makes_lists_revokes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--tokens", str(path)]
    more = ["--role", "trainer", "--name", "t", "--expires", "30d", *place]
    assert main(["token", "create", *more]) == 0
    text, told = capsys.readouterr()
    kept = path.read_text()
    assert (
        text.strip() not in told + kept
        and hashlib.sha256(text.strip().encode()).hexdigest() in kept
    )
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]  # nothing is left lying about
    (entry,) = read_tokens(path)
    assert AccessTokens(path).find(text.strip()) == entry
    assert entry.expires_at is not None
    assert entry.expires_at - entry.created_at == timedelta(days=30)
    assert main(["token", "create", *more]) == 2
    for wrong in ("king --name k", "admin --name k --expires 9", "admin --name ../x"):
        assert main(["token", "create", "--role", *wrong.split(), *place]) == 2
    capsys.readouterr()
    assert main(["token", "list", *place]) == 0
    listed = capsys.readouterr().out
    assert {"t", "trainer", entry.id} <= set(listed.split())
    assert entry.sha256 not in listed
    assert main(["token", "revoke", "t", *place]) == 0
    assert read_tokens(path) == []
    assert main(["token", "revoke", "t", *place]) == 2


# Roles


async def test_every_route_is_in_the_table(path: Path, tokens: dict[str, str]) -> None:
    async with guarded(path) as api:
        declared = set()
        document = (await ask(api, tokens["admin"], "GET", "/openapi.json")).json()
        for place, operations in document["paths"].items():
            declared |= {(method.upper(), filled(place)) for method in operations}
        declared.add(("GET", "/openapi.json"))  # is not in itself
        assert declared - {(rule.method, filled(rule.path)) for rule in RULES} == set()


async def test_each_role_may_do_its_own_and_no_more(path: Path, tokens: dict[str, str]) -> None:
    async with guarded(path) as api:
        for rule in RULES:
            place = filled(rule.path)
            for role in ROLES:
                answer = await ask(api, tokens[role], rule.method, place)
                allowed = rule.roles is None or role == "admin" or role in rule.roles
                if rule.path == "/v1/session":  # for browsers, below
                    continue
                assert (answer.status_code != 403) == allowed, (role, rule)
                if not allowed:
                    told = answer.json()
                    assert " or ".join(sorted({*(rule.roles or ()), "admin"})) in told["detail"]
                    if place.startswith("/v1"):
                        assert told["type"] == "urn:envserver:error:forbidden"
                        assert "admin" in told["needed_roles"]
                assert answer.status_code not in (401, 500), (role, rule)


async def test_without_a_token_there_is_only_health(path: Path, tokens: dict[str, str]) -> None:
    expired = create_token(path, "old", "admin", timedelta(seconds=-1))[0]
    gone = create_token(path, "gone", "admin")[0]
    revoke_token(path, "gone")
    said = set()
    good = tokens["admin"]
    mixed = good[:-20] + tokens["reader"][-20:]
    unknown = "evs_" + "0" * 10 + "_" + "a" * 43
    for sent in (None, "nonsense", unknown, expired, gone, mixed, good[:-1], good.upper()):
        async with guarded(path) as api:  # a stranger may not fail too often
            assert await code(api, sent, "GET", "/healthz") == 200
            for method, place in (
                ("GET", "/v1/status"), ("POST", "/scored_data"), ("GET", "/nowhere"),
                ("GET", "/openapi.json"), ("GET", "/readyz"), ("PATCH", "/v1/runs"),
                ("GET", "/r/key/v1"),
            ):  # fmt: skip
                answer = await ask(api, sent, method, place)
                assert answer.status_code == 401, (method, place)
                assert answer.headers["www-authenticate"].startswith("Bearer")
                if sent:
                    said.add(answer.json()["detail"])
                    assert sent not in answer.text
    assert len(said) == 1  # whether it was ever a token is not told


async def test_only_a_bearer_token_counts_before_the_body_and_as_long_as_it_is_there(
    path: Path, tokens: dict[str, str]
) -> None:
    good = tokens["admin"]
    async with guarded(path, max_body_bytes=2000) as api:
        for headers, status in (
            ([("authorization", good)], 401),
            ([("authorization", f"Basic {good}")], 401),
            ([("x-api-key", good)], 401),
            ([("authorization", f"Bearer {good}"), ("authorization", f"Bearer {good}")], 401),
            ([("authorization", f"bearer  {good}")], 200),
        ):
            assert await api.status("GET", "/v1/status", headers=headers) == status
        assert await api.status("GET", "/v1/status", params={"token": good}) == 401
        body = b"x" * 100_000
        for token, status in ((None, 401), (tokens["reader"], 403), (tokens["trainer"], 413)):
            assert await code(api, token, "POST", "/v1/runs", content=body) == status
        revoke_token(path, "reader")  # needs no restart
        assert await code(api, tokens["reader"], "GET", "/v1/status") == 401
        again, _ = create_token(path, "reader", "reader")
        assert await code(api, again, "GET", "/v1/status") == 200


# Quotas


def set_quota(path: Path, name: str, **quota: Any) -> None:
    """Changes the file as a person does."""
    tree = yaml.safe_load(path.read_text())
    for token in tree["tokens"]:
        if token["name"] == name:
            token["quota"] = quota
    path.write_text(yaml.safe_dump(tree))


async def test_who_asks_too_often_waits(path: Path, tokens: dict[str, str]) -> None:
    async with guarded(path, quota={"requests_per_second": 0.01, "burst": 3}) as api:
        for _ in range(3):
            assert await code(api, tokens["reader"], "GET", "/v1/runs") == 200
        answer = await ask(api, tokens["reader"], "GET", "/v1/runs")
        assert answer.status_code == 429
        assert 90 <= int(answer.headers["retry-after"]) <= 100
        assert answer.json()["type"] == "urn:envserver:error:too_many_requests"
        assert await code(api, tokens["trainer"], "GET", "/v1/runs") == 200
        # Its own quota counts more, and at once.
        set_quota(path, "reader", requests_per_second=None)
        for _ in range(5):
            assert await code(api, tokens["reader"], "GET", "/v1/runs") == 200


async def test_bytes_are_counted_in_both_directions(path: Path, tokens: dict[str, str]) -> None:
    set_quota(path, "trainer", megabytes_per_minute=0.01)
    set_quota(path, "reader", megabytes_per_minute=0.01)
    async with guarded(path) as api:
        body = b'{"name": "run"}' + b" " * 20_000
        answer = await ask(api, tokens["trainer"], "POST", "/v1/runs", content=body)
        assert answer.is_success
        answer = await ask(api, tokens["trainer"], "GET", "/v1/runs")
        assert answer.status_code == 429
        assert 50 <= int(answer.headers["retry-after"]) <= 65
        plain = {"accept-encoding": "identity"}
        assert await code(api, tokens["reader"], "GET", "/openapi.json", headers=plain) == 200
        assert await code(api, tokens["reader"], "GET", "/v1/runs") == 429


async def test_streams_are_limited_and_end_with_a_token(path: Path, tokens: dict[str, str]) -> None:
    async with guarded(path, quota={"open_streams": 1}) as api:
        await ask(api, tokens["trainer"], "POST", "/v1/runs", json={"name": "run"})
        sse = {"accept": "text/event-stream"}
        for role, place in (("reader", "/v1/events"), ("trainer", "/v1/runs/run/stream")):
            headers = bearer(tokens[role]) | sse
            async with api.http.stream("GET", place, headers=headers) as first:
                assert first.status_code == 200
                assert await code(api, tokens[role], "GET", place, headers=sse) == 429
        await until(lambda: _opened(api, headers, place))
        async with api.http.stream("GET", place, headers=headers) as stream:
            revoke_token(path, "trainer")
            await api.put("late")
            async with asyncio.timeout(PATIENCE):
                told = b"".join([part async for part in stream.aiter_bytes()])
        assert b"late" not in told


async def _opened(api: Api, headers: dict[str, str], place: str) -> bool:
    async with api.http.stream("GET", place, headers=headers) as stream:
        assert stream.status_code in (200, 429)
        return stream.status_code == 200


async def test_strangers_may_not_fail_for_ever(path: Path, tokens: dict[str, str]) -> None:
    async with guarded(path) as api:
        seen = [await api.status("GET", "/v1/status") for _ in range(30)]
        assert seen[:20] == [401] * 20
        assert 429 in seen[20:]
        # Who shares their address and has a token is not harmed.
        assert await code(api, tokens["reader"], "GET", "/v1/status") == 200


def test_what_is_kept_of_strangers_has_an_end() -> None:
    now = [0.0]
    strangers = Strangers(lambda: now[0])
    for number in range(10_000):
        strangers.failed(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    assert len(strangers._failures) == 4096
    for number in range(20):
        strangers.failed(f"2001:db8:0:1::{number:x}")
    with pytest.raises(TooManyRequests):
        strangers.failed("2001:db8:0:1:ffff::1")
    strangers.failed("2001:db8:0:2::1")
    now[0] = 60.0
    strangers.failed("2001:db8:0:1::7")


# Where it listens


async def test_beyond_this_machine_only_with_tokens(path: Path, tokens: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="loopback"):
        ServerConfig(host="0.0.0.0")
    async with guarded(path) as api:
        settings = ServerConfig(tokens_file=path, host="0.0.0.0")
        app = create_api(api.store, settings=settings)
        async with await serve_api(app, "0.0.0.0", 0, settings) as everywhere:
            url = f"http://127.0.0.1:{everywhere.port}/v1/runs"
            assert await api.status("GET", url) == 401
            answer = await api.http.get(url, headers=bearer(tokens["reader"]))
            assert answer.status_code == 200
    with pytest.raises(ConfigError, match="tokens file"):
        create_api(api.store, settings=ServerConfig(tokens_file=path.with_name("none")))


async def test_names_that_are_not_the_servers_are_refused_where_there_are_no_tokens(
    path: Path, tokens: dict[str, str]
) -> None:
    good = ("127.0.0.1", "localhost:8000", "[::1]:9", "127.9.9.9:1", "trainer.LOCAL:80")
    evil = ("evil.example", "evil.example:80", "localhost.evil.example", "10.0.0.1", "[")
    place = path.with_name("open.db")
    async with running_api(place, server={"allowed_hosts": ["Trainer.local"]}) as api:
        for host in (*good, *evil):
            answer = await api.http.get("/v1/runs", headers={"host": host})
            assert answer.status_code == (200 if host in good else 421), host
            if host in evil:
                assert answer.json()["type"] == "urn:envserver:error:misdirected"
    async with guarded(path) as api:
        headers = bearer(tokens["reader"]) | {"host": "trainer.example"}
        assert await api.status("GET", "/v1/runs", headers=headers) == 200


# Limits of connections and requests, and HTTPS, over real sockets

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
