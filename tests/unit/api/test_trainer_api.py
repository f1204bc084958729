"""The native trainer API over real HTTP: runs, groups, policy versions, errors, origins."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from envserver_clients.http import SyncEnvClient
from envserver_records.errors import ConfigError, StoreFull
from envserver_records.records import pack
from fastapi import FastAPI
from pydantic import ValidationError
from support.api import (
    GROUP,
    Api,
    join,
    native_group,
    put_native,
    registration,
    running_api,
    stream_group,
    wire_group,
)
from support.conversations import Conversation, conversations
from support.waiting import PATIENCE, settled, until

from envserver.http.access import RULES
from envserver.http.server import serve_api
from envserver.proxy.gate import Gate
from envserver.running.api_serving import api_server
from envserver.running.run_settings import RunApiSettings
from envserver.settings.server import ServerConfig
from envserver.trainers import runs


def problem(answer: httpx.Response, status: int) -> Any:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert {"type", "title", "status", "detail"} <= set(body)
    assert body["status"] == status
    return body


# Groups


async def test_groups_are_listed_in_orders_and_read_as_they_are_stored(api: Api) -> None:
    await api.put("a", "math/b", "c")
    best = await api.get("/v1/groups?order=best&limit=1&environment=math")
    assert best["next"] is None
    rest = await api.get(f"/v1/groups?order=best&environment=math&cursor={best['cursor']}")
    assert [one["group_id"] for one in (*best["groups"], *rest["groups"])] == ["c", "math/b", "a"]
    told = problem(await api.http.get(f"/v1/groups?cursor={best['cursor']}"), 422)
    assert "does not belong to the order" in told["detail"]
    await api.post("/scored_data", wire_group(2, 5))
    (posted,) = (await api.get("/v1/groups?after=3"))["groups"]
    told = problem(await api.http.get(f"/v1/groups/{posted['group_id']}/rollouts/0"), 409)
    assert "over the Atropos API" in told["detail"]


async def test_words_are_found_in_conversations(api: Api) -> None:
    for number in range(300):
        text = "It cannot be\nDIVIDED: “½”" if number == 3 else f"{number}"
        said = [{"role": "assistant", "content": text}]
        await put_native(api.store, native_group(f"group-{number}", messages=said))
    posted = wire_group(2, 5) | {"messages": [[{"role": "user", "content": "divided by “½”"}]] * 2}
    await api.post("/scored_data", posted)
    first = await api.get("/v1/groups?order=newest&words=divided&limit=9")
    assert [group["format"] for group in first["groups"]] == ["atropos"]
    assert first["searched"] == 256
    rest = await api.get(f"/v1/groups?order=newest&words=divided&cursor={first['cursor']}")
    assert ([group["group_id"] for group in rest["groups"]], rest["cursor"]) == (["group-3"], "")
    assert first["searched"] + rest["searched"] == 301


# Posted groups


async def test_a_warning_with_any_names_is_a_valid_header(api: Api) -> None:
    await api.start()
    for name in ("a\r\nset-cookie: b", "\x00é", "x" * 256):
        await api.add_environment(desired_name=name)
    names = ["\u2028", *(f"{number:03}{'x' * 250}" for number in range(200))]
    created = await api.http.post("/v1/runs", json={"name": "many", "environments": names})
    assert created.status_code == 201
    assert "set-cookie" not in created.headers
    assert len(created.headers["x-envserver-warning"]) <= 1000


@pytest.mark.parametrize(("limit", "most"), [("max_waiting_groups", 2), ("max_waiting_gb", 1e-9)])
async def test_posts_are_refused_when_much_waits(tmp_path: Path, limit: str, most: float) -> None:
    async with running_api(tmp_path / "store.db", server={limit: most}) as api:

        async def post() -> httpx.Response:
            return await api.http.post("/scored_data", json=wire_group())

        async def accepted() -> bool:
            return (await post()).status_code == 200

        await api.run("native")
        count = 0
        while (refused := await post()).status_code == 200:
            count += 1
            await asyncio.sleep(0.05)  # the size is asked for a few times a second
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        assert f"--server.{limit} is" in refused.json()["detail"]
        assert (await api.store.counts())["queued"] == count
        lease = await api.lease("native", max_groups=100)
        assert not await accepted()  # what is leased still counts, since it may come back
        await api.end("ack", lease, "native")
        await until(accepted)


# Policy versions


async def test_a_trainer_pauses_and_resumes_with_a_new_version(tmp_path: Path) -> None:
    gate = Gate()

    async def call() -> None:
        async with gate.passing():
            return

    async with running_api(tmp_path / "store.db", gate=gate) as api:
        nothing = {"paused": False, "in_flight": 0, "waiting": 0, "version": -1}
        assert await api.get("/v1/policy") == nothing
        assert not (await api.post("/v1/policy/resume", {}))["paused"]
        async with gate.passing():
            paused = await api.post("/v1/policy/pause", {"timeout_seconds": 0.05})
            assert (paused["paused"], paused["idle"], paused["in_flight"]) == (True, False, 1)
            assert (await api.post("/v1/policy/pause", {"in_flight": "keep"}))["idle"]
        assert (await api.post("/v1/policy/pause", {"in_flight": "abort"}))["idle"]
        waiting = asyncio.create_task(call())
        await asyncio.sleep(0)
        assert (await api.get("/v1/policy"))["waiting"] == 1
        resumed = await api.post("/v1/policy/resume", {"version": 7})
        assert (resumed["paused"], resumed["version"]) == (False, 7)
        await waiting
        wrong = await api.http.post("/v1/policy/pause", json={"in_flight": "drop"})
        assert wrong.status_code == 422
        assert "in_flight" in wrong.text
        await api.post("/v1/policy/pause", {})
        assert await api.status("POST", "/v1/policy/resume", json={"version": 2}) == 409
        assert (await api.get("/v1/policy"))["paused"]


async def test_calls_stay_paused_when_the_server_restarts(tmp_path: Path) -> None:
    place, gate = tmp_path / "store.db", Gate()
    async with running_api(place, gate=Gate()) as api:
        await api.post("/v1/policy/pause", {"in_flight": "abort"})
    async with running_api(place, gate=gate) as api:
        assert (await api.get("/v1/policy"))["paused"]
        joined = await join(api)
        assert (await joined.beat())["pause"]["in_flight"] == "abort"
        await api.post("/v1/policy/resume", {"version": 1})
        assert not gate.paused
        assert (await joined.beat())["pause"] is None
    async with running_api(place, gate=Gate()) as api:
        assert not (await api.get("/v1/policy"))["paused"]
    async with running_api(place) as api:
        assert await api.status("POST", "/v1/policy/pause", json={}) == 404


async def test_run_api_drops_groups_that_are_too_old_and_counts_them(tmp_path: Path) -> None:
    limits = {"max_staleness_at_delivery": 1, "max_queued_groups": 5}
    sections = {"server": {"port": 0}, "store": str(tmp_path / "s.db"), "rollouts": limits}
    async with api_server(RunApiSettings.model_validate(sections)) as server:
        await asyncio.to_thread(train_and_fall_behind, server.url)


def train_and_fall_behind(url: str) -> None:
    with httpx.Client(base_url=url, timeout=PATIENCE) as http, contextlib.ExitStack() as stack:
        welcome = http.post("/v1/environments", json=registration()).json()
        http.headers["x-environment-key"] = welcome["key"]
        place = f"/v1/environments/{welcome['id']}"

        def room() -> int:
            said = {"capacity": 99, "open": 0}
            return int(http.post(f"{place}/heartbeat", json=said).json()["room"])

        assert room() == 5
        client = stack.enter_context(SyncEnvClient(url, run="trainer", batch_size=1))
        client.publish_policy_version(8)
        for index in range(2):  # sampled by version 7
            sent = http.post(f"{place}/groups", content=pack(stream_group(index)), headers=GROUP)
            assert sent.status_code == 200, sent.text
        client.ack(next(client.batches(idle_seconds=PATIENCE)))
        client.publish_policy_version(9)
        assert client.lease() is None

        async def counted() -> bool:
            status = client.status()
            return status["server"]["stale_groups"] == 1 == status["groups"]["dropped"]

        asyncio.run(until(counted))
        assert room() == 2  # no more than are still fresh when they are delivered


# Starting


async def test_what_cannot_be_served_says_why(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []
    starting = asyncio.Event()
    port = int(api.url.rpartition(":")[2])
    for host, at, words in (("0.0.0.0", 0, "tokens"), ("127.0.0.1", port, str(port))):
        with pytest.raises(ConfigError, match=words):
            await serve_api(httpx.ASGITransport, host, at)  # type: ignore[arg-type]

    @asynccontextmanager
    async def full(app: FastAPI) -> AsyncIterator[None]:
        raise StoreFull("No space.")
        yield

    @asynccontextmanager
    async def watched(app: FastAPI) -> AsyncIterator[None]:
        seen.append("started")
        starting.set()
        try:
            yield
        finally:
            seen.append("ended")

    caplog.clear()
    with pytest.raises(StoreFull, match="No space"):
        await serve_api(FastAPI(lifespan=full), "127.0.0.1", 0)
    assert not caplog.records  # no traceback in anybody's face
    serving = asyncio.create_task(serve_api(FastAPI(lifespan=watched), "127.0.0.1", 0))
    await starting.wait()
    serving.cancel()  # a start that is cancelled ends the application
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert seen == ["started", "ended"]


# Pages of other origins

FOREIGN = (
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"origin": "http://evil.example"},
    {"origin": "http://evil.example", "sec-fetch-site": "same-origin"},
    {"origin": "http://127.0.0.1:1"},
    {"origin": "null"},
)


async def test_only_pages_of_the_server_itself_change_things(api: Api) -> None:
    for headers in FOREIGN:
        foreign = headers | {"content-type": "text/plain"}
        for rule in RULES:
            path = re.sub(r"{.*?}", "x", rule.path)
            if rule.method == "GET" and not rule.is_change:
                continue
            sent = {"content": b"{}", "headers": foreign}
            assert await api.status(rule.method, path, **sent) == 403, (headers, rule)
        for path in ("/v1/status", "/latest_example", "/info"):
            answer = await api.http.get(path, headers=foreign)
            assert answer.status_code == 200
            assert not any(name.startswith("access-control") for name in answer.headers)
    assert (await api.get("/v1/policy-version"))["version"] == -1
    for headers in (
        {"origin": api.url, "sec-fetch-site": "same-origin"},
        {"origin": api.url},
        {"sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
    ):
        await api.post("/v1/policy-version", {"version": 3}, headers=headers)


async def test_listed_origins_may_talk_without_credentials(tmp_path: Path) -> None:
    lab, other = {"origin": "https://lab.example"}, {"origin": "https://other.example"}
    wanted = {"access-control-request-method": "POST"}
    server = {"allowed_origins": ["https://lab.example"]}
    async with running_api(tmp_path / "listed.db", server=server) as api:
        preflight = await api.http.options("/v1/policy-version", headers=lab | wanted)
        crossing = lab | {"sec-fetch-site": "cross-site"}
        answer = await api.http.post("/v1/policy-version", json={"version": 1}, headers=crossing)
        for found in (preflight, answer):
            assert found.status_code == 200
            assert found.headers["access-control-allow-origin"] == "https://lab.example"
            assert "access-control-allow-credentials" not in found.headers
        assert await api.status("OPTIONS", "/batch", headers=other | wanted) == 400
        read = await api.http.get("/latest_example", headers=other)
        assert "access-control-allow-origin" not in read.headers
        assert await api.status("GET", "/batch", headers=other) == 403
    with pytest.raises(ValidationError):
        ServerConfig(allowed_origins=["*"])


# Runs and leases of trainers, over real HTTP: who gets which groups, and how they come back

CONVERSATIONS = conversations(Path(__file__).with_name("trainer.txt"))


@pytest.mark.parametrize("title", CONVERSATIONS)
async def test_the_api_answers_trainers_as_its_conversations_say(api: Api, title: str) -> None:
    await Conversation(api).hold(CONVERSATIONS[title])


async def test_there_are_so_many_open_runs(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    large = {"name": "a", "settings": {"notes": "x" * 1_000_000}}
    assert await api.status("POST", "/v1/runs", json=large) == 422
    monkeypatch.setattr(runs, "MOST_OPEN_RUNS", 3)  # one is that of Atropos trainers
    for name in ("one", "two"):
        await api.run(name)
    refused = await api.http.post("/v1/runs", json={"name": "three"})
    assert (refused.status_code, "closes" in refused.json()["hint"]) == (409, True)
    await api.run("one")  # it is there already
    await api.http.post("/v1/runs/one/close")
    await api.run("three")
    assert await api.status("POST", "/v1/runs", json={"name": "one"}) == 409


async def test_status_shows_how_far_each_run_is_behind(tmp_path: Path) -> None:
    now = 1000.0
    async with running_api(tmp_path / "s.db", clock=lambda: now) as api:

        async def shown(name: str) -> tuple[float, ...]:
            facts = (await api.get("/v1/status"))["runs"][name]
            keys = ("queued_groups", "lag_seconds", "open_leases", "leased_groups")
            return tuple(facts[key] for key in keys)

        await api.run("all", delivery="broadcast")
        await api.run("code", environments=["code"])
        await api.put("a")
        now += 10
        await api.put("b")
        now += 5
        assert await shown("all") == (2, 15, 0, 0)
        assert await shown("code") == (0, 0, 0, 0)
        await api.lease("all", max_groups=1)
        assert await shown("all") == (1, 5, 1, 1)


# Leases


async def test_a_lease_that_is_asked_for_four_times_at_once_is_one(api: Api) -> None:
    await api.run(batch_size=1)
    await api.put("a", "b")
    first, *twins = await asyncio.gather(*(api.lease(key="k") for _ in range(4)))
    assert twins == [first] * 3
    assert [group["group_id"] for group in first["groups"]] == ["a"]


async def test_a_lease_waits_for_groups_that_come_are_given_back_or_expire(api: Api) -> None:
    await api.run(batch_size=2)
    with pytest.raises(httpx.ReadTimeout):  # a client that went away takes nothing
        body = {"wait_seconds": 30}
        await api.http.post("/v1/runs/run/lease", json=body, timeout=httpx.Timeout(60, read=0.3))
    waiting = asyncio.create_task(api.leased(min_groups=2, wait_seconds=30))
    await api.put("a")
    await settled()
    assert not waiting.done()
    await api.put("b")
    assert await waiting == ["a", "b"]
    assert await api.leased(wait_seconds=0.05) == []
    await api.put("c")
    for what in ("nack", "expire"):
        held = await api.lease(seconds=0.3 if what == "expire" else 600)
        again = asyncio.create_task(api.lease(wait_seconds=30))
        await settled()
        if what == "nack":
            await api.end("nack", held)
        found = await again
        assert [group["group_id"] for group in found["groups"]] == ["c"]
        await api.end("nack", found)
