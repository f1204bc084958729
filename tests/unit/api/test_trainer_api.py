"""The native trainer API over real HTTP: runs, leases, policy versions, health, errors."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from envserver_records.errors import ConfigError, StoreError, StoreFull
from envserver_records.records import Group, unpack
from fastapi import FastAPI
from pydantic import ValidationError
from support.api import KEYS, Api, native_group, put_native, running_api, wire_group

from envserver.api import serve_api
from envserver.api.access.rules import RULES
from envserver.server_config import ServerConfig

MSGPACK = "application/vnd.envserver.groups+msgpack"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with running_api(tmp_path / "store.db") as running:
        await running.http.post("/v1/runs", json={"name": "run", "batch_size": 2})
        yield running


async def put(api: Api, *group_ids: str) -> None:
    for group_id in group_ids:
        await put_native(api.store, native_group(group_id))


async def lease(api: Api, **body: Any) -> list[str]:
    answer = await api.http.post("/v1/runs/run/lease", json=body)
    if answer.status_code == 204:
        return []
    assert answer.status_code == 200, answer.text
    return [group["group_id"] for group in answer.json()["groups"]]


def problem(answer: httpx.Response, status: int) -> Any:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert {"type", "title", "status", "detail"} <= set(body)
    assert body["status"] == status
    return body


async def test_runs_are_created_once_and_resumed(api: Api) -> None:
    body = {"name": "other", "batch_size": 4, "settings": {"lr": 0.1}}
    created = await api.http.post("/v1/runs", json=body)
    assert created.status_code == 201
    again = await api.http.post("/v1/runs", json=body)
    assert (again.status_code, again.json()) == (200, created.json())
    changed = await api.http.post("/v1/runs", json={"name": "other", "batch_size": 8})
    assert changed.json() == created.json() | {"batch_size": 8}
    assert await api.get("/v1/runs/other") == changed.json()
    names = [run["name"] for run in (await api.get("/v1/runs"))["runs"]]
    assert {"run", "other"} <= set(names)
    problem(await api.http.get("/v1/runs/nobody"), 404)
    problem(await api.http.post("/v1/runs", json={"name": "atropos"}), 409)
    for name in ("", "a/b", "x" * 200, 5):
        problem(await api.http.post("/v1/runs", json={"name": name}), 422)


async def test_lease_ack_and_nack(api: Api) -> None:
    await put(api, "a", "b", "c")
    first = (await api.http.post("/v1/runs/run/lease", json={})).json()
    assert [group["group_id"] for group in first["groups"]] == ["a", "b"]
    assert await lease(api) == ["c"]
    assert await lease(api) == []
    nack = {"lease_id": first["lease_id"]}
    assert (await api.http.post("/v1/runs/run/nack", json=nack)).status_code == 204
    problem(await api.http.post("/v1/runs/run/ack", json=nack), 409)
    second = (await api.http.post("/v1/runs/run/lease", json={"max_groups": 1})).json()
    assert [group["group_id"] for group in second["groups"]] == ["a"]
    ack = {"lease_id": second["lease_id"]}
    for _ in range(2):
        assert (await api.http.post("/v1/runs/run/ack", json=ack)).status_code == 204
    assert await lease(api, max_groups=9) == ["b"]
    problem(await api.http.post("/v1/runs/run/ack", json={"lease_id": "none"}), 404)
    problem(await api.http.post("/v1/runs/nobody/lease", json={}), 404)


async def test_leases_expire_and_can_be_extended(api: Api) -> None:
    await put(api, "a", "b")
    kept, short = [
        (
            await api.http.post("/v1/runs/run/lease", json={"max_groups": 1, "seconds": seconds})
        ).json()
        for seconds in (600, 0.2)
    ]
    body = {"lease_id": kept["lease_id"], "seconds": 1200}
    extended = await api.http.post("/v1/runs/run/extend", json=body)
    assert extended.json()["expires_at"] > kept["expires_at"] + 500
    assert await lease(api, wait_seconds=20) == ["b"]
    problem(await api.http.post("/v1/runs/run/ack", json={"lease_id": short["lease_id"]}), 409)


async def test_a_lease_waits_for_groups(api: Api) -> None:
    waiting = asyncio.create_task(lease(api, min_groups=2, wait_seconds=30))
    await put(api, "a")
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await put(api, "b")
    assert await waiting == ["a", "b"]
    assert await lease(api, wait_seconds=0.05) == []


async def test_a_client_that_went_away_takes_nothing(api: Api) -> None:
    with pytest.raises(httpx.ReadTimeout):
        body = {"wait_seconds": 30}
        await api.http.post("/v1/runs/run/lease", json=body, timeout=httpx.Timeout(60, read=0.3))
    await put(api, "a")
    assert await lease(api, wait_seconds=20) == ["a"]


async def test_a_lease_as_messagepack_holds_bodies_as_stored(api: Api) -> None:
    await put(api, "a")
    await api.post("/scored_data", wire_group(2, 5))
    answer = await api.http.post("/v1/runs/run/lease", json={}, headers={"accept": MSGPACK})
    assert answer.headers["content-type"] == MSGPACK
    native, posted = msgspec.msgpack.decode(answer.content)["groups"]
    assert (native["format"], native["env"]) == ("group", "math")
    assert unpack(native["body"], Group).group_id == "a"
    assert posted["format"] == "atropos"
    assert list(json.loads(posted["body"])) == KEYS


async def test_a_lease_as_json_has_the_keys_of_the_wire(api: Api) -> None:
    await put(api, "a")
    answer = await api.http.post("/v1/runs/run/lease", json={})
    (group,) = answer.json()["groups"]
    assert list(group["group"]) == KEYS
    assert group["group"]["masks"] == [[-100, -100, 3, 4, 5]] * 2


async def test_groups_are_listed_and_read_without_being_leased(api: Api) -> None:
    await put(api, "a", "math/b", "c")
    await api.post("/scored_data", wire_group(2, 5))
    before = await api.store.counts()
    first = await api.get("/v1/groups?limit=2")
    assert [group["group_id"] for group in first["groups"]] == ["a", "math/b"]
    rest = await api.get(f"/v1/groups?after={first['next']}")
    assert [group["format"] for group in rest["groups"]] == ["group", "atropos"]
    assert rest["next"] is None
    own, posted = rest["groups"]
    assert own | {"seq": 0, "created_at": 0} == own | {
        "seq": 0, "group_id": "c", "env": "math", "format": "group", "size": 2, "tokens": 10,
        "max_length": 5, "policy_version": 7, "env_id": None, "state": "queued", "created_at": 0,
        "rewards": [0.0, 1.0], "reward_mean": 0.5, "ends": {"agent": 2}, "flags": [],
    }  # fmt: skip
    assert (posted["rewards"], posted["turns"], posted["task_id"]) == ([0.5, 0.5], None, "")
    best = await api.get("/v1/groups?order=best&limit=1&environment=math")
    assert best["next"] is None
    rest = await api.get(f"/v1/groups?order=best&environment=math&cursor={best['cursor']}")
    assert [one["group_id"] for one in (*best["groups"], *rest["groups"])] == ["c", "math/b", "a"]
    counts = await api.get("/v1/rewards?environment=math")
    assert (counts["groups"], counts["unscored"], sum(counts["counts"]), counts["counts"][10]) == (
        3, 0, 3, 3,
    )  # fmt: skip
    told = problem(await api.http.get(f"/v1/groups?cursor={best['cursor']}"), 422)
    assert "does not belong to the order" in told["detail"]
    assert (await api.get("/v1/groups/a"))["group"]["masks"] == [[-100, -100, 3, 4, 5]] * 2
    answer = await api.http.get(
        "/v1/groups/math%2Fb", headers={"accept": "application/vnd.envserver.group+msgpack"}
    )
    assert answer.headers["content-type"] == "application/vnd.envserver.group+msgpack"
    assert unpack(msgspec.msgpack.decode(answer.content)["body"], Group).group_id == "math/b"
    assert await api.store.counts() == before
    problem(await api.http.get("/v1/groups/none"), 404)
    for query in ("limit=0", "limit=x", "after=-1", f"after={2**64}"):
        body = problem(await api.http.get(f"/v1/groups?{query}"), 422)
        assert body["errors"][0]["loc"] == ["query", query.partition("=")[0]]


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
    for words, many in (("“½”", 2), ("be\ndivided", 1), ("user", 1), ("task-1", 0)):
        found = await api.get("/v1/groups", params={"words": words, "order": "oldest"})
        more = await api.get(
            "/v1/groups", params={"words": words, "order": "oldest", "cursor": found["cursor"]}
        )
        assert len(found["groups"]) + len(more["groups"]) == many, words


async def test_policy_versions_go_up_and_survive(tmp_path: Path) -> None:
    seen: list[int] = []
    place = tmp_path / "store.db"
    async with running_api(place, on_policy_version=seen.append) as api:
        assert await api.get("/v1/policy-version") == {"version": -1}
        for version in (0, 3, 3):
            answer = await api.post("/v1/policy-version", {"version": version})
            assert answer == {"version": version}
        assert problem(await api.http.post("/v1/policy-version", json={"version": 2}), 409)
        for bad in (-1, 1.5, "4", None, True, 2**40):
            problem(await api.http.post("/v1/policy-version", json={"version": bad}), 422)
    assert seen == [0, 3]
    async with running_api(place, on_policy_version=seen.append) as api:
        assert await api.get("/v1/policy-version") == {"version": 3}
    assert seen == [0, 3, 3]


async def test_errors_name_the_place(api: Api) -> None:
    answer = await api.http.post("/v1/runs/run/lease", json={"max_groups": 0, "more": 1})
    body = problem(answer, 422)
    assert {tuple(error["loc"]) for error in body["errors"]} == {
        ("body", "max_groups"),
        ("body", "more"),
    }
    for content in (b"", b"{", b"[]", b'{"min_groups": 3, "max_groups": 2}'):
        problem(await api.http.post("/v1/runs/run/lease", content=content), 422)
    problem(await api.http.post("/v1/runs/run/lease", content=b'"\xff"'), 400)
    problem(await api.http.get("/v1/nothing"), 404)
    problem(await api.http.delete("/v1/runs"), 405)


async def test_status_and_health(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_api(tmp_path / "s.db", status=lambda: {"rollouts": 5}) as api:
        await api.post("/scored_data", wire_group())
        status = await api.get("/v1/status")
        assert status["server"] == {"rollouts": 5}
        assert status["groups"]["queued"] == 1
        assert status["policy_version"] == -1
        assert (await api.get("/healthz"))["status"] == "ok"
        assert (await api.get("/readyz"))["parts"]["store"]["state"] == "ready"

        async def get_value(key: str) -> None:
            raise StoreError("The disk is gone.")

        monkeypatch.setattr(api.store, "get_value", get_value)
        assert (await api.get("/healthz"))["status"] == "ok"
        assert "The disk is gone." in problem(await api.http.get("/readyz"), 503)["detail"]


async def test_the_document_describes_every_route(api: Api) -> None:
    paths = (await api.get("/openapi.json"))["paths"]
    assert {"/v1/runs/{run}/lease", "/v1/policy-version", "/scored_data", "/healthz"} <= set(paths)
    body = paths["/v1/runs/{run}/lease"]["post"]["requestBody"]["content"]["application/json"]
    assert "wait_seconds" in body["schema"]["properties"]
    listing = paths["/v1/groups"]["get"]["parameters"]
    defaults = {one["name"]: one["schema"].get("default") for one in listing}
    assert defaults | {"after": 0, "limit": 100, "order": "oldest", "flag": ""} == defaults
    content = paths["/v1/groups/{group_id}"]["get"]["responses"]["200"]["content"]
    assert {"application/vnd.envserver.group+msgpack", "application/json"} == set(content)


async def test_the_document_says_what_each_route_of_a_trainer_answers(api: Api) -> None:
    paths = (await api.get("/openapi.json"))["paths"]
    ours = ("/v1/runs", "/v1/groups", "/v1/policy-version", "/v1/status")
    routes = {
        f"{method} {path}": route
        for path, methods in paths.items()
        for method, route in methods.items()
        if path.startswith(ours)
    }
    assert {"post /v1/runs/{run}/close", "get /v1/runs/{run}/stream"} <= set(routes)
    for name, route in routes.items():
        assert route["description"], name
        good = [answer for status, answer in route["responses"].items() if status < "300"]
        assert good, name
        assert all("schema" in one for a in good for one in a.get("content", {}).values()), name
        for status, answer in route["responses"].items():
            if status >= "400":
                assert set(answer["content"]) == {"application/problem+json"}, (name, status)
        if name.startswith("post") and not name.endswith("/close"):
            assert "requestBody" in route, name
            assert {"400", "413", "422", "503"} <= set(route["responses"]), name
    stream = routes["get /v1/runs/{run}/stream"]
    assert set(stream["responses"]["200"]["content"]) == {
        "application/vnd.envserver.stream",
        "text/event-stream",
    }
    assert {"window", "on_hangup", "max_tokens"} <= {one["name"] for one in stream["parameters"]}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.1.1", "example.org"])
async def test_nobody_beyond_this_machine_is_let_in(api: Api, host: str) -> None:
    with pytest.raises(ConfigError, match="tokens"):
        await serve_api(httpx.ASGITransport, host, 0)  # type: ignore[arg-type]


async def test_a_port_that_is_taken_is_named(api: Api) -> None:
    port = int(api.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=str(port)):
        await serve_api(httpx.ASGITransport, "127.0.0.1", port)  # type: ignore[arg-type]


async def test_what_an_application_raises_at_its_start_reaches_the_caller(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @asynccontextmanager
    async def full(app: FastAPI) -> AsyncIterator[None]:
        raise StoreFull("No space.")
        yield

    with pytest.raises(StoreFull, match="No space"):
        await serve_api(FastAPI(lifespan=full), "127.0.0.1", 0)
    assert not caplog.records  # no traceback in anybody's face


async def test_a_start_that_is_cancelled_ends_the_application() -> None:
    seen: list[str] = []
    starting = asyncio.Event()

    @asynccontextmanager
    async def watched(app: FastAPI) -> AsyncIterator[None]:
        seen.append("started")
        starting.set()
        try:
            yield
        finally:
            seen.append("ended")

    serving = asyncio.create_task(serve_api(FastAPI(lifespan=watched), "127.0.0.1", 0))
    await starting.wait()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert seen == ["started", "ended"]


FOREIGN = (
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"origin": "http://evil.example"},
    {"origin": "http://evil.example", "sec-fetch-site": "same-origin"},
    {"origin": "http://127.0.0.1:1"},
    {"origin": "null"},
)


async def test_a_page_of_another_origin_changes_and_reads_nothing(api: Api) -> None:
    for headers in FOREIGN:
        foreign = headers | {"content-type": "text/plain"}
        for rule in RULES:
            path = re.sub(r"{.*?}", "x", rule.path)
            if rule.method == "GET" and not rule.is_change:
                continue
            answer = await api.http.request(rule.method, path, content=b"{}", headers=foreign)
            assert answer.status_code == 403, (headers, rule)
        for path in ("/v1/status", "/latest_example", "/info"):
            answer = await api.http.get(path, headers=foreign)
            assert answer.status_code == 200
            assert not any(name.startswith("access-control") for name in answer.headers)
    assert (await api.get("/v1/policy-version"))["version"] == -1


async def test_pages_of_the_server_itself_may_change_things(api: Api) -> None:
    for headers in (
        {"origin": api.url, "sec-fetch-site": "same-origin"},
        {"origin": api.url},
        {"sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
    ):
        answer = await api.http.post("/v1/policy-version", json={"version": 3}, headers=headers)
        assert answer.status_code == 200


async def test_listed_origins_may_talk_without_credentials(tmp_path: Path) -> None:
    lab, other = {"origin": "https://lab.example"}, {"origin": "https://other.example"}
    wanted = {"access-control-request-method": "POST"}
    server = {"allowed_origins": ["https://lab.example"]}
    async with running_api(tmp_path / "listed.db", server=server) as api:
        preflight = await api.http.options("/v1/policy-version", headers=lab | wanted)
        assert preflight.status_code == 200
        crossing = lab | {"sec-fetch-site": "cross-site"}
        answer = await api.http.post("/v1/policy-version", json={"version": 1}, headers=crossing)
        assert answer.status_code == 200
        for found in (preflight, answer):
            assert found.headers["access-control-allow-origin"] == "https://lab.example"
            assert "access-control-allow-credentials" not in found.headers
        assert (await api.http.options("/batch", headers=other | wanted)).status_code == 400
        read = await api.http.get("/latest_example", headers=other)
        assert "access-control-allow-origin" not in read.headers
        assert (await api.http.get("/batch", headers=other)).status_code == 403
    for origin in ("*", "lab.example", "https://lab.example/"):
        with pytest.raises(ValidationError):
            ServerConfig(allowed_origins=[origin])


async def test_a_rollout_is_read_alone_and_its_tokens_in_parts(api: Api) -> None:
    await put(api, "math/b")
    await api.post("/scored_data", wire_group(2, 5))
    found = await api.get("/v1/groups/math%2Fb/rollouts/1")
    assert (found["number"], found["rollouts"], found["group"]["group_id"]) == (1, 2, "math/b")
    assert found["rollout"]["score"]["reward"] == 1.0
    (row,) = found["rollout"]["sequences"]
    assert (row["length"], row["trained"]) == (5, 3)
    tokens = await api.get("/v1/groups/math%2Fb/rollouts/1/tokens?start=1&count=2")
    assert {name: tokens[name] for name in ("start", "length", "ids", "mask")} == {
        "start": 1, "length": 5, "ids": [2, 3], "mask": [0, 1],
    }  # fmt: skip
    assert [len(tokens[name]) for name in ("texts", "logprobs", "versions", "calls")] == [2] * 4

    for path in ("/rollouts/2", "/rollouts/1/tokens?row=1"):
        assert "has" in problem(await api.http.get(f"/v1/groups/math%2Fb{path}"), 404)["detail"]
    listed = await api.get("/v1/groups")
    posted = next(one["group_id"] for one in listed["groups"] if one["format"] == "atropos")
    told = problem(await api.http.get(f"/v1/groups/{posted}/rollouts/0"), 409)
    assert "over the Atropos wire" in told["detail"]
