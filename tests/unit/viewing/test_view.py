"""`envserver view`: the routes of a server over what is on disk, or over a server elsewhere."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from envserver_records.errors import ConfigError, EngineTimeout, EnvserverError
from support.api import native_group, put_native, running_api
from support.commands import envserver, running
from support.delivered import line, write_lines
from support.views import looking_at, write_evaluation
from support.waiting import PATIENCE

from envserver.api import create_token
from envserver.export.jsonl import FailuresFile
from envserver.rollouts.events import GroupDropped, RolloutFailed
from envserver.running.viewing import viewing
from envserver.store import open_store
from envserver.viewing.failure_files import FailureFiles
from envserver.viewing.sources import viewed


def client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=PATIENCE)


@asynccontextmanager
async def viewed_at(*places: object) -> AsyncIterator[httpx.AsyncClient]:
    """`envserver view` of these places, over HTTP."""
    async with viewing([str(one) for one in places]) as server, client(server.url) as http:
        yield http


async def got(http: httpx.AsyncClient, path: str, **parameters: Any) -> Any:
    answer = await http.get(path, params=parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def told_of(http: httpx.AsyncClient, change: Callable[[], Awaitable[None]]) -> Any:
    """The events `hello` and `group`, the second of which `change` causes."""
    found: dict[str, Any] = {}
    async with asyncio.timeout(PATIENCE), http.stream("GET", "/v1/events") as stream:
        name = ""
        async for text in stream.aiter_lines():
            name = text.removeprefix("event: ") if text.startswith("event: ") else name
            if text.startswith("data: "):
                found[name] = json.loads(text[6:])
                if name == "hello":
                    await change()
                if name == "group":
                    return found["hello"], found["group"]
    raise AssertionError("the stream ended")


def test_a_file_is_shown_and_followed_until_ctrl_c(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "run.jsonl", [line(n) for n in range(3)])

    async def look(url: str) -> None:
        async with client(url) as http:
            rows = (await got(http, "/v1/groups", order="newest"))["groups"]
            assert [row["task_id"] for row in rows] == [f"math-{n:06d}" for n in (2, 1, 0)]
            rollout = await got(http, f"/v1/groups/{rows[0]['group_id']}/rollouts/1")
            assert rollout["rollout"]["messages"][-1]["content"] == "It is 2, says the 1."
            tokens = await got(http, f"/v1/groups/{rows[0]['group_id']}/rollouts/1/tokens")
            assert tokens["ids"] == [1, 2, 5, 10, 11, 12, 13, 14, 15]
            assert (await got(http, f"/v1/groups/{rows[0]['group_id']}"))["group"]["scores"]
            source = await got(http, "/v1/source")
            assert source["kind"] == "file" and "groups" in source["parts"]
            assert source["replay_source"] == str(file)
            assert not (await got(http, "/v1/session"))["needs_login"]
            shell = await http.get("/", headers={"accept": "text/html"})
            assert "script-src 'self'" in shell.headers["content-security-policy"]
            other = await http.get("/v1/groups", headers={"host": "evil.example"})
            assert other.status_code == 421
            assert (await http.post("/v1/groups")).status_code == 405

            async def grow() -> None:
                with file.open("ab") as more:
                    more.write(orjson.dumps(line(3)) + b"\n")

            hello, group = await told_of(http, grow)
            assert group["task_id"] == "math-000003"
            assert group["seq"] == hello["seq"] + 1 == 4

    with running("view", file, folder=tmp_path) as view:
        asyncio.run(look(view.wait_for(r"http://[\d.]+:\d+/")[0]))
        view.send(signal.SIGINT)
        assert view.end() == 0
    assert file.with_name("run.jsonl.index").exists()


@pytest.mark.thorough
async def test_two_look_at_the_same_file_and_the_second_goes_on_alone(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "run.jsonl", [line(1)])

    async def ids_at(url: str) -> list[str]:
        async with client(url) as http:
            return [one["task_id"] for one in (await got(http, "/v1/groups"))["groups"]]

    async def grow() -> None:
        with file.open("ab") as more:
            more.write(orjson.dumps(line(2)) + b"\n")

    async with viewing([str(file)]) as first:
        second = viewing([str(file)])
        server = await second.__aenter__()
        assert await ids_at(first.url) == await ids_at(server.url) == ["math-000001"]
    async with client(server.url) as http:
        assert (await told_of(http, grow))[1]["task_id"] == "math-000002"
    assert await ids_at(server.url) == ["math-000001", "math-000002"]
    await second.__aexit__(None, None, None)


async def test_failures_beside_a_file_are_told_as_a_server_tells_them(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "run.jsonl", [line(1)])
    beside = FailuresFile(file, resume=False)
    group_id = "math-train-0-000007-ab"
    names: dict[str, Any] = {"group_id": group_id, "index": 7, "task_id": "math-000007"}
    failure = EngineTimeout("No answer came.").failure()
    facts: dict[str, Any] = {"attempt": 2, "failure": failure, "final": True, "at": 5.0}
    beside.write(RolloutFailed(**names, rollout_id=f"{group_id}-r1", **facts))
    found = FailureFiles(viewed([str(file)]))
    await found.read_new()
    (row,) = found.log.after(0)
    assert (row.kind, row.fault, row.what) == (failure.kind, "engine", "rollout")
    assert (row.environment, row.rollout, row.attempt, row.time) == ("math", 1, 2, 5.0)
    beside.write(GroupDropped(**names, reason="zero_variance", failed=False, message="", at=6.0))
    with beside.path.open("ab") as file_of_failures:
        file_of_failures.write(b'{"event": "rollout_fai')
    await found.read_new()
    assert [one.what for one in found.log.after(1)] == ["drop"]


async def test_what_cannot_be_shown_is_told(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    for content, words in ((None, "no such file"), ('{"a": 1}\n', "line 1 is not a group")):
        if content is not None:
            file.write_text(content)
        with pytest.raises(EnvserverError, match=words):
            async with viewing([str(file)]):
                pass
    found = envserver("view", tmp_path / "none.jsonl", folder=tmp_path)
    assert found.returncode == 2 and "none.jsonl" in found.stderr
    file = Path(os.fsdecode(bytes(tmp_path) + b"/\xff.jsonl"))
    write_lines(file, [line(0)])
    with pytest.raises(EnvserverError, match="is not UTF-8"):
        viewed([str(file)]).files()


def test_places_are_what_they_hold_and_no_title_has_a_password(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "runs" / "run.jsonl", [line(1)])
    (file.parent / "run.json").write_text('{"parts": 7}')
    with sqlite3.connect(tmp_path / "groups.db") as sql:
        sql.execute("CREATE TABLE t (x)")
    sql.close()
    places = {
        str(file): ("file", "runs/run.jsonl"),
        str(file.parent): ("folder", f"{tmp_path.name}/runs"),
        str(tmp_path / "groups.db"): ("store", f"{tmp_path.name}/groups.db"),
        "postgresql://me:secret@host/db?password=secret": ("store", "postgresql://host/db"),
        "https://me:secret@lab.example:80": ("server", "https://lab.example:80"),
    }
    for place, told in places.items():
        found = viewed([place])
        assert (found.kind, found.title) == told
    os.mkfifo(tmp_path / "pipe")
    for wrong in ([str(tmp_path / "pipe")], [str(file), "https://lab.example"]):
        with pytest.raises(ConfigError):
            viewed(wrong)


def changed(top: dict[str, Any] | None = None, **of_rollouts: Any) -> dict[str, Any]:
    found = line(1) | (top or {})
    for rollout in found["envserver"]["rollouts"]:
        rollout.update(of_rollouts)
    return found


@pytest.mark.parametrize(
    "wrong",
    [
        changed({"masks": [[1]]}),
        changed({"tokens": [["a"], ["b"]]}),
        changed({"messages": [[1], [2]]}),
        changed({"generation_params": 3}),
        changed(usage={"sandbox": 7}),
        changed(versions=[[[1]]]),
        changed(others=[{"agent": "x"}]),
        changed(rows=[0]),
    ],
    ids=range(8),
)
async def test_a_line_that_only_looks_like_a_group_is_told(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    async with looking_at(tmp_path / "index", write_lines(tmp_path / "run.jsonl", [wrong])) as http:
        for path in ("", "/rollouts", "/rollouts/0", "/rollouts/0/tokens"):
            answer = await http.get(f"/v1/groups/math-train-0-000001{path}")
            assert answer.status_code == 422
            assert "run.jsonl, line 1 is not a group" in answer.json()["detail"]


async def test_two_evaluations_are_compared_down_to_the_groups_of_a_task(tmp_path: Path) -> None:
    rewards = {1: (0.0, 1.0), 2: (1.0, 1.0), 3: (0.0, 0.0), 4: (0.0, 0.5)}
    better = {1: (1.0, 1.0), 2: (0.0, 1.0), 3: (0.0, 0.0), 4: (0.0, 0.5)}
    a = write_evaluation(tmp_path / "base", [line(n, rewards[n]) for n in rewards])
    b = write_evaluation(tmp_path / "tuned", [line(n, better[n]) for n in better])
    async with looking_at(tmp_path / "index", a, b) as http:
        found = await got(http, "/v1/evaluations")
        (math,) = found["evaluations"][0]["environments"]
        assert [one["name"] for one in found["evaluations"]] == ["base", "tuned"]
        assert (math["environment"], math["tasks"], math["rollouts"]) == ("math", 4, 8)
        assert math["low"] <= math["reward_mean"] == 0.4375 <= math["high"]
        first = await got(http, "/v1/comparison", limit=1)
        reward = first["parts"][0]["reward"]
        assert (reward["better"], reward["worse"], reward["equal"]) == (1, 1, 2)
        (task,) = first["tasks"]
        assert (task["task_id"], task["difference"]) == ("math-000002", -0.5)
        for side, mean in (("a", 1.0), ("b", 0.5)):
            group = task[f"{side}_group"]
            rows = (await got(http, "/v1/groups", text=group))["groups"]
            assert [(row["group_id"], row["reward_mean"]) for row in rows] == [(group, mean)]
            whole = await got(http, f"/v1/groups/{group}/rollouts")
            assert (whole["group"]["group_id"], len(whole["rollouts"])) == (group, 2)
        seen, cursor = [task["task_id"]], first["cursor"]
        while cursor:
            page = await got(http, "/v1/comparison", limit=1, cursor=cursor)
            seen += [one["task_id"] for one in page["tasks"]]
            cursor = page["cursor"]
        assert seen == [f"math-{n:06d}" for n in (2, 3, 4, 1)]
        assert (await http.get("/v1/comparison?a=nothing")).status_code == 404


@pytest.mark.thorough
async def test_a_store_is_looked_at_while_a_server_has_it(where: str) -> None:
    async with open_store(where) as store:
        await put_native(store, native_group("g1"))
        async with viewed_at(where) as http:
            (row,) = (await got(http, "/v1/groups"))["groups"]
            assert (row["group_id"], row["state"]) == ("g1", "queued")
            assert (await got(http, "/v1/groups/g1/rollouts/0"))["rollouts"] == 2
            assert (await got(http, "/v1/source"))["kind"] == "store"
            more = partial(put_native, store, native_group("g2"))
            assert (await told_of(http, more))[1]["group_id"] == "g2"


async def test_words_are_found_beside_a_group_that_cannot_be_read(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "run.jsonl", [line(n, [1.0], answers=["good"]) for n in range(3)])
    file.write_bytes(file.read_bytes().replace(b"What is 1", b"What is \xff"))
    async with looking_at(tmp_path / "index", file) as http:
        found = await got(http, "/v1/groups", words="good")
    assert [row["seq"] for row in found["groups"]] == [1, 3] and found["searched"] == 3


async def test_the_page_of_another_program_is_not_passed_on() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n<script>alert(1)</script>")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(EnvserverError, match="is not an envserver"):
            async with viewing([f"http://127.0.0.1:{port}"]):
                pass


@pytest.mark.thorough
async def test_a_server_elsewhere_is_read_with_a_token_that_the_browser_never_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tmp_path / "tokens.yaml"
    token, _ = create_token(tokens, "page", "reader")
    async with running_api(tmp_path / "store.db", server={"tokens_file": tokens}) as api:
        await put_native(api.store, native_group("a/b g"))
        monkeypatch.delenv("ENVSERVER_TOKEN", raising=False)
        with pytest.raises(EnvserverError, match="asks for an access token"):
            async with viewing([api.url]):
                pass
        monkeypatch.setenv("ENVSERVER_TOKEN", token)
        async with viewed_at(api.url) as http:
            assert (await got(http, "/v1/source"))["kind"] == "server"
            (row,) = (await got(http, "/v1/groups", order="newest"))["groups"]
            assert row["group_id"] == "a/b g"
            answer = await http.get("/v1/groups/a%2Fb%20g/rollouts/0")
            assert answer.json()["rollouts"] == 2
            assert token not in f"{answer.headers} {answer.text}"
            more = partial(put_native, api.store, native_group("g2"))
            assert (await told_of(http, more))[1]["group_id"] == "g2"
            refused = await http.get("/v1/groups?limit=nothing")
            assert refused.status_code == 422 and refused.json()["errors"]
            for path in ("/batch", "/v1/runs/r/stream", "/v1/tasks", "/v1/nothing"):
                assert (await http.get(path)).status_code == 404, path
            assert (await http.post("/v1/runs", json={"name": "r"})).status_code == 405
            assert (await http.get("/v1/groups", headers={"host": "x.y"})).status_code == 421
