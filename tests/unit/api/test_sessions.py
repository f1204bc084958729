"""Logins of the page: what its cookie may do, over real HTTP, and what it may not."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from envserver_records.errors import ConfigError, EngineUnavailable
from envserver_records.records import Trajectory
from structlog.testing import capture_logs
from support.api import Api, head_or_answer, running_api
from support.commands import free_port, running, until
from support.sampled import PROMPT, SAMPLED, Engine, group
from support.waiting import PATIENCE, settled
from support.waiting import until as until_async

from envserver.http import access as module
from envserver.http.access import (
    RULES,
    AccessTokens,
    Sessions,
    create_token,
    read_tokens,
    revoke_token,
    session_key,
)
from envserver.http.health import Metrics
from envserver.proxy.gate import Gate, InFlight
from envserver.rollouts.audit import Auditor

OWN = {"sec-fetch-site": "same-origin"}
HTTPS = {"x-forwarded-proto": "https"}
"""A proxy on this machine says that the browser uses HTTPS."""


def guarded(path: Path) -> AbstractAsyncContextManager[Api]:
    return running_api(path.with_name("store.db"), server={"tokens_file": path}, metrics=Metrics())


@pytest.fixture
async def api(path: Path, tokens: dict[str, str]) -> AsyncIterator[Api]:
    async with guarded(path) as running:
        yield running


async def log_in(api: Api, token: str, **headers: str) -> httpx.Response:
    more = {key.replace("_", "-"): value for key, value in headers.items()}
    api.http.cookies.clear()
    answer = await api.http.post("/v1/session", json={"token": token}, headers=OWN | more)
    api.http.cookies.clear()  # each test sends cookies itself
    return answer


def cookie_of(answer: httpx.Response) -> str:
    """The `name=value` that a browser sends back."""
    assert answer.status_code == 200, answer.text
    return answer.headers["set-cookie"].partition(";")[0]


async def status_of(api: Api, cookie: str, path: str = "/v1/status", **headers: str) -> int:
    more = OWN | {"cookie": cookie} | {k.replace("_", "-"): v for k, v in headers.items()}
    return await api.status("GET", path, headers=more)


async def test_a_login_reads_until_it_is_ended(api: Api, tokens: dict[str, str]) -> None:
    assert (await api.get("/v1/session")) == {"needs_login": True, "role": None, "name": None}
    answer = await log_in(api, f" {tokens['trainer']}\n")
    me = {"needs_login": False, "role": "reader", "name": "trainer"}
    assert answer.json() == me
    attributes = answer.headers["set-cookie"].split("; ")[1:]
    assert attributes == ["Path=/", "Max-Age=43200", "HttpOnly", "SameSite=Strict"]
    cookie = cookie_of(answer)
    assert tokens["trainer"] not in cookie
    assert await api.get("/v1/session", headers=OWN | {"cookie": cookie}) == me
    headers = (await api.http.get("/v1/status", headers=OWN | {"cookie": cookie})).headers
    assert headers["cache-control"] == "no-store"  # nothing stays after the login
    gone = await api.http.delete("/v1/session", headers=OWN)
    assert gone.status_code == 204
    name = cookie.partition("=")[0]
    assert gone.headers["set-cookie"].startswith(f"{name}=; Path=/; Max-Age=0;")


async def test_the_cookie_of_any_token_only_reads(api: Api, tokens: dict[str, str]) -> None:
    cookie = cookie_of(await log_in(api, tokens["admin"]))
    allowed = set()
    for rule in RULES:
        place = re.sub(r"{.*?}", "e", rule.path.replace("{number}", "0"))
        headers = OWN | {"cookie": cookie}
        answer = await head_or_answer(api.http, rule.method, place, headers=headers)
        if answer.status_code not in (401, 403, 429):
            allowed.add((rule.method, rule.path))
    reading = {
        (rule.method, rule.path)
        for rule in RULES
        if rule.method == "GET" and rule.path.startswith("/v1/") and not rule.is_change
        if rule.roles is not None and "reader" in rule.roles
    }
    free = {(rule.method, rule.path) for rule in RULES if rule.roles is None}
    assert allowed == reading | free | {("GET", "/openapi.json")}
    assert {("GET", "/v1/groups"), ("GET", "/v1/status")} <= reading
    # A page that asks for what is not there, or not for readers, is not asked to log in again.
    assert await status_of(api, cookie, "/v1/none") == 404
    assert await status_of(api, cookie, "/v1/runs/r/ack") == 404
    assert await status_of(api, cookie, "/v1/tasks") == 403


async def test_the_cookie_counts_for_this_origin_only(api: Api, tokens: dict[str, str]) -> None:
    cookie = cookie_of(await log_in(api, tokens["reader"]))
    for site in ("same-site", "cross-site", "none", "", "same-origin, none"):
        assert await status_of(api, cookie, sec_fetch_site=site) == 401, site
    plain = await api.http.get("/v1/status", headers={"cookie": cookie})
    assert plain.status_code == 401
    twice = [("cookie", cookie), ("sec-fetch-site", "cross-site"), *OWN.items()]
    assert await api.status("GET", "/v1/status", headers=twice) == 401


async def test_only_our_own_page_logs_in(api: Api, tokens: dict[str, str]) -> None:
    good = {"token": tokens["reader"]}
    for headers in (
        {},
        {"sec-fetch-site": "same-site"},
        OWN | {"origin": "http://evil.example"},
        OWN | {"origin": "http://127.0.0.1:1"},  # another port of this machine
        OWN | {"origin": "null"},
    ):
        answer = await api.http.post("/v1/session", json=good, headers=headers)
        assert answer.status_code == 403, headers
        assert "set-cookie" not in answer.headers
    own = OWN | {"origin": api.url}
    assert await api.status("POST", "/v1/session", json=good, headers=own) == 200
    assert await api.status("DELETE", "/v1/session", headers={"origin": "http://x"}) == 403


async def test_logins_add_no_rights_and_end(api: Api, path: Path, tokens: dict[str, str]) -> None:
    answer = await log_in(api, tokens["environment"])
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers
    trainer, reader = [cookie_of(await log_in(api, tokens[role])) for role in ("trainer", "reader")]
    (entry,) = [one for one in read_tokens(path) if one.name == "reader"]
    assert await status_of(api, trainer) == await status_of(api, reader) == 200
    async with (
        asyncio.timeout(PATIENCE),
        api.http.stream("GET", "/v1/events", headers=OWN | {"cookie": reader}) as stream,
    ):
        parts = stream.aiter_bytes()
        assert b"hello" in await anext(parts)
        revoke_token(path, "reader")
        await api.put("late")
        assert b"late" not in b"".join([part async for part in parts])
    assert await status_of(api, reader) == 401
    create_token(path, "reader", "reader")
    assert await status_of(api, reader) == 401
    tree = yaml.safe_load(path.read_text())
    tree["tokens"][-1]["id"] = entry.id  # another token under the same id
    for token in tree["tokens"]:
        if token["name"] == "trainer":
            token["role"] = "environment"  # by hand, while the login lasts
    path.write_text(yaml.safe_dump(tree))
    assert await status_of(api, trainer) == await status_of(api, reader) == 401


async def test_a_login_survives_restarts_but_no_new_key(path: Path, tokens: dict[str, str]) -> None:
    async with guarded(path) as api:
        cookie = cookie_of(await log_in(api, tokens["reader"]))
    async with guarded(path) as api:
        assert await status_of(api, cookie) == 200
    key = path.with_name("tokens.yaml.session-key")
    assert key.stat().st_mode & 0o777 == 0o600
    key.unlink()
    async with guarded(path) as api:
        assert await status_of(api, cookie) == 401


async def test_forged_and_planted_cookies(api: Api, path: Path, tokens: dict[str, str]) -> None:
    cookie = cookie_of(await log_in(api, tokens["reader"]))
    name, _, value = cookie.partition("=")
    token_id, end, signature = value.split(".")
    other = next(one.id for one in read_tokens(path) if one.role == "admin")
    for wrong in (
        "",
        f"{token_id}.{int(end) + 1}.{signature}",
        f"{other}.{end}.{signature}",
        f"{token_id}.{end}.{signature[:-1]}",
        "é.1.é",
        tokens["reader"],
        "x" * 5000,
    ):
        header = f"{name}={wrong}".encode("latin-1", "replace")
        answer = await api.http.get("/v1/status", headers=[*OWN.items(), ("cookie", header)])
        assert answer.status_code in (401, 429), wrong
    # A page of another port cannot lock its reader out with a cookie of the same name.
    assert await status_of(api, f"{name}=junk; {cookie}") == 200
    # A bearer token counts alone: a wrong one is not helped by a cookie.
    assert await status_of(api, cookie, authorization="Bearer x") in (401, 429)


async def test_under_https_the_cookie_is_for_this_host(api: Api, tokens: dict[str, str]) -> None:
    answer = await log_in(api, tokens["reader"], x_forwarded_proto="https")
    secure = cookie_of(answer)
    assert secure.startswith("__Host-envserver_")
    assert answer.headers["set-cookie"].endswith("; Secure")
    assert await status_of(api, secure, x_forwarded_proto="https") == 200
    # One that a subdomain, or a page without HTTPS, may have set does not count.
    assert await status_of(api, secure.removeprefix("__Host-"), x_forwarded_proto="https") == 401
    assert await status_of(api, secure) == 401


async def test_wrong_tokens_are_limited_the_right_not(path: Path, tokens: dict[str, str]) -> None:
    async with guarded(path) as api:
        seen = [(await log_in(api, "evs_wrong")).status_code for _ in range(25)]
        assert seen[:20] == [401] * 20
        assert 429 in seen[20:]
        assert (await log_in(api, tokens["reader"])).status_code == 200


def test_a_login_ends_after_twelve_hours(path: Path, tokens: dict[str, str]) -> None:
    now = [1000.0]
    known = AccessTokens(path)
    sessions = Sessions(known, b"k" * 32, now=lambda: now[0])
    scope = {"type": "http", "scheme": "http", "headers": [(b"sec-fetch-site", b"same-origin")]}
    token = known.find(tokens["reader"])
    assert token is not None
    (morsel,) = SimpleCookie(sessions.cookie(token, scope)).values()
    scope["headers"] = [*scope["headers"], (b"cookie", f"{morsel.key}={morsel.value}".encode())]
    now[0] += 12 * 3600 - 1
    assert sessions.reader(scope) is not None
    now[0] += 1
    assert sessions.reader(scope) is None


def test_the_key_is_made_once_and_is_private(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = session_key(path)
    assert len(key) == 32 and session_key(path) == key
    file = path.with_name("tokens.yaml.session-key")
    assert list(path.parent.iterdir()) == [file]
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="other users"):
        session_key(path)
    file.unlink()

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Read-only")

    monkeypatch.setattr(module.os, "open", refuse)
    assert session_key(path) != session_key(path)  # a mounted secret: logins end with the server


# The audit of `serve` scores a share of the delivered groups again; nothing waits for it


def trajectories(name: str, **changes: Any) -> list[Trajectory]:
    return group(name, **changes).trajectories


def auditing(engine: Engine | None = None, fraction: float = 1.0, **more: Any) -> Auditor:
    return Auditor(engine or Engine(), fraction, 0.05, **{"version": lambda: 7, **more})


async def test_an_audit_finds_what_is_wrong_and_logs_it() -> None:
    right, wrong = trajectories("a")
    wrong.sequences[1].logprobs[PROMPT + 3] -= 0.25
    with capture_logs() as logs:
        async with auditing() as auditor:
            assert auditor.offer(right)
            assert auditor.offer(wrong)
    report = auditor.report()
    assert (report["rollouts"], report["rows"], report["tokens"]) == (2, 3, 3 * SAMPLED)
    assert (report["rows_over_tolerance"], report["tokens_over_tolerance"]) == (1, 1)
    assert report["largest_difference"] == pytest.approx(0.25)
    (log,) = [entry for entry in logs if entry["event"] == "audit_mismatch"]
    assert (log["rollout_id"], log["row"], log["position"]) == ("a-1", 1, PROMPT + 3)
    assert "1 of 3 rows" in auditor.summary()


async def test_an_audit_never_waits_and_chooses_by_id() -> None:
    made = [one for name in "abcdefghij" for one in trajectories(name)]
    async with auditing(fraction=0.5, most_waiting=3) as auditor:
        assert sum([auditor.offer(one) for one in made]) == 3
    report = auditor.report()
    assert report["rollouts"] == 3
    wanted = 3 + report["rollouts_dropped"]
    assert 4 < wanted < 16
    async with auditing(fraction=0.5) as again:
        assert sum(map(again.offer, made)) == wanted


async def test_an_audit_leaves_out_what_another_version_sampled() -> None:
    old, new = trajectories("a", version=3)[0], trajectories("b")[0]
    engine = Engine()
    # The trainer publishes version 8 while the row of version 7 is being scored.
    async with auditing(engine, version=lambda: 7 + (engine.asked > 0)) as auditor:
        auditor.offer(old)
        auditor.offer(new)
    report = auditor.report()
    assert report["rows"] == 0
    assert report["rows_not_compared"] == {"other_version": 1, "weights_changed": 1}


@pytest.mark.parametrize("in_flight", ["keep", "abort"])
async def test_an_audit_waits_while_the_weights_change(in_flight: InFlight) -> None:
    engine, gate = Engine(), Gate()
    async with auditing(engine, gate=gate) as auditor:
        auditor.offer(trajectories("a")[0])
        while not engine.in_flight:
            await asyncio.sleep(0)
        await gate.pause(in_flight, 1)
        await until_async(lambda: auditor.report()["rows_not_compared"])
        assert auditor.report()["rows_not_compared"] == {"weights_changed": 1}
        auditor.offer(trajectories("b")[0])
        await settled()
        asked = engine.asked
        gate.resume()
    assert (asked, engine.asked, auditor.report()["rows"]) == (1, 2, 1)


async def test_an_audit_outlives_an_engine_that_fails() -> None:
    first, second = trajectories("a")[0], trajectories("b")[0]
    first.sequences[0].tokens[0] = 13
    async with auditing(Engine(fails=EngineUnavailable("Gone."))) as auditor:
        auditor.offer(first)
        auditor.offer(second)
    report = auditor.report()
    assert (report["engine_failures"], report["rows"]) == ({"engine_unavailable": 1}, 1)


def test_serve_reports_its_audit(tmp_path: Path) -> None:
    port = free_port()
    words = (
        "serve", "--env", "math", "--model", "sim", "--sim.latency_seconds", 0,
        "--env.group_size", 2, "--env.ensure_scores_are_not_same", "false",
        "--env.total_steps", 4, "--tokens.audit_fraction", 1, "--port", port,
        "--store", "groups.db",
    )  # fmt: skip
    with running(*words, folder=tmp_path) as server:
        server.wait_for("Trainers: ")
        url = f"http://127.0.0.1:{port}/v1/status"

        def audited() -> dict[str, Any] | None:
            status = httpx.get(url, timeout=PATIENCE).json()["server"]["audit"]
            return status if status["rollouts"] == 8 else None

        report = until(audited, server.output, alive=server.process)
        assert report["tokens"] == report["tokens_exactly_equal"] > 0
        server.send(signal.SIGTERM)
        server.wait_for(f"Audit: 0 of {report['rows']} rows differ")
        assert server.end() == 0
