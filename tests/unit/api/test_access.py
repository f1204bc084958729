"""Access tokens, roles, quotas: who may send which request, over real HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
import yaml
from envserver_records.errors import ConfigError
from envserver_records.records import Group
from support.api import Api, head_or_answer, running_api
from support.waiting import PATIENCE, until

from envserver import OpenAIConfig, ServerConfig, main
from envserver.api import create_api, create_token, serve_api
from envserver.api.access.quotas import Strangers, TooManyRequests
from envserver.api.access.rules import RULES
from envserver.api.access.tokens import AccessTokens, Role, read_tokens, revoke_token
from envserver.models import OpenAIEngine, Replica
from envserver.models.fleet import Fleet
from envserver.proxy import Gate
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
    """`path` as a request has it."""
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


def test_the_command_makes_lists_and_revokes(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


async def test_each_role_may_do_its_own_and_nothing_else(
    path: Path, tokens: dict[str, str]
) -> None:
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


async def test_without_a_good_token_there_is_only_health(
    path: Path, tokens: dict[str, str]
) -> None:
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


async def test_streams_have_a_number_and_end_with_their_token(
    path: Path, tokens: dict[str, str]
) -> None:
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
