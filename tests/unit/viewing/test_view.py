"""`envserver view`: the routes of a server over what is on disk, or over a server elsewhere."""

import asyncio
import gzip
import json
import os
import signal
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from envserver_records.errors import ConfigError, EngineTimeout, EnvserverError
from envserver_records.records import Group, pack, unpack
from envserver_records.zstd import zstd
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.api import native_group, put_native, running_api
from support.commands import envserver, running
from support.delivered import line, write_lines
from support.extent import examples
from support.trajectories import sequence
from support.views import indexed, looking_at, opened, write_evaluation, write_groups
from support.waiting import PATIENCE

from envserver import main
from envserver.export import read_groups
from envserver.export.jsonl import FailuresFile
from envserver.export.unified import unified_of
from envserver.http.access import create_token
from envserver.rollouts.events import GroupDropped, RolloutFailed
from envserver.running.viewing import viewing
from envserver.store import open_store
from envserver.store.listing import GroupQuery, ListedGroup
from envserver.viewing.index import index_path
from envserver.viewing.sources import FailureFiles, viewed


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
    beside.write(GroupDropped(**names, reason="too_long", failed=False, message="", at=6.0))
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
async def test_a_line_that_seems_a_group_is_told(tmp_path: Path, wrong: dict[str, Any]) -> None:
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
        with pytest.raises(EnvserverError, match="requires an access token"):
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


async def test_every_command_that_reads_a_server_sends_the_token_of_a_dotenv_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, _ = create_token(tmp_path / "tokens.yaml", "reads", "reader")
    monkeypatch.delenv("ENVSERVER_TOKEN", raising=False)
    commands = (
        "export {url} --to unified --out out",
        "verify {url} --model sim",
        "rescore {url} --env math --out new.jsonl --processes 1",
        "top {url} --once",
    )
    server = {"tokens_file": tmp_path / "tokens.yaml"}
    async with running_api(tmp_path / "store.db", server=server) as api:
        await put_native(api.store, native_group("g"))
        for text, says in (("", True), (f"FOREIGN=\xe9\xff\0\nENVSERVER_TOKEN={token}\n", False)):
            (tmp_path / ".env").write_bytes(text.encode("latin-1"))
            for command in commands:
                words = command.format(url=api.url).split()
                ran = await asyncio.to_thread(envserver, *words, folder=tmp_path)
                assert ("ENVSERVER_TOKEN holds the token" in ran.stderr) == says, (words, ran)
                assert "Traceback" not in ran.stderr and token not in ran.stderr


# The index of what is on disk: the same lists as a server's, and always that of its files

FILE, INDEX = Path("run.jsonl"), Path("index")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def some_groups() -> list[Group]:
    """Groups that differ in all that lists are filtered and sorted by."""
    found = []
    for number in range(24):
        group = native_group(f"g{number}", 1 + number % 3, flags=["odd"] * (number % 2))
        size = 5 + number % 4
        for place, one in enumerate(group.trajectories):
            one.sequences = [sequence([*range(size)], [1] * size, version=1)]
            one.score.reward = (number * 7 + place * 3) % 5 / 4
            one.usage.ended_by = "turns" if number % 5 == 0 else "agent"
        env = "math" if number % 3 else "code"
        facts: dict[str, Any] = {"task_id": f"task-{number % 7}", "policy_version": number // 6}
        found.append(replace(group, env=env, **facts))
    return found


def shown(one: ListedGroup) -> Any:
    """A group of a list without what the place of its storing decides."""
    return replace(one.row, state="queued", lease_id=None, created_at=0.0), one.facts


async def test_a_file_is_listed_as_a_server_lists_the_same_groups() -> None:
    """The code of lists is the store's; what it sorts and filters by is made here."""
    groups = some_groups()
    write_groups(FILE, groups)
    async with open_store(Path("store.db")) as store, opened(INDEX, FILE) as index:
        for group in groups:
            await put_native(store, group)
        query = GroupQuery(order="best", min_reward=0.25)
        pages = [await one.list_groups(query, "", 100) for one in (store, index)]
    stored, found = ([shown(one) for one in page.groups] for page in pages)
    assert len(stored) > 10 and found == stored


def listed(*places: Path, index: Path = INDEX) -> dict[str, Group]:
    """The groups of an index that is brought up to date, by id, in its order."""

    async def read() -> dict[str, Group]:
        async with opened(index, *places) as groups:
            page = await groups.list_groups(GroupQuery(), "", 1000)
            ids = [one.row.group_id for one in page.groups]
            return {one: unpack(body, Group) for one in ids for body in await groups.bodies([one])}

    return asyncio.run(read())


@pytest.mark.parametrize("pack_file", [gzip.compress, zstd.compress])
def test_compressed_files_have_the_same_groups(pack_file: Callable[[bytes], bytes]) -> None:
    write_lines(FILE, [line(n) for n in range(3)])
    other = Path("run.jsonl.gz" if pack_file is gzip.compress else "run.jsonl.zst")
    other.write_bytes(pack_file(FILE.read_bytes()))
    one, two = listed(other, index=Path("b")), listed(FILE)
    assert list(map(pack, one.values())) == list(map(pack, two.values()))
    assert [*one] == [*two] and len(one) == 3
    other.write_bytes(other.read_bytes()[:-20])
    assert indexed(Path("b"), other).problems == 1


@pytest.mark.parametrize(("to", "out"), [("unified", "out.jsonl"), ("traces", "out")])
def test_trajectories_and_traces_are_groups_of_their_tasks(to: str, out: str) -> None:
    write_lines(FILE, [line(n, (0.0, 1.0, 0.5)) for n in range(2)])
    assert main(["export", str(FILE), "--to", to, "--out", out]) == 0
    groups = listed(Path(out)).values()
    rollouts = [one for group in groups for one in group.trajectories]
    rewards = sorted(one.score.reward for one in rollouts if one.score.reward is not None)
    assert rewards == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0]
    answers = {str(one.messages[-1]["content"]) for one in rollouts}
    assert answers == {f"It is {n}, says the {which}." for n in range(2) for which in range(3)}
    assert to == "traces" or len(groups) == 2


def test_a_document_of_its_own_is_shown_with_its_actions() -> None:
    unified = unified_of(next(read_groups([str(write_lines(FILE, [line(1)]))])).rollouts[1])
    del unified["metadata"]["sequences"]
    unified["actions"] = [{"step": 1, "tool": "run", "input": {"x": 1}, "output": "done"}]
    Path("one.json").write_bytes(orjson.dumps(unified))
    (group,) = listed(Path("one.json")).values()
    question, asked, answered, *_ = group.trajectories[0].messages
    assert question["content"] == "What is 1 of math?" and answered["content"] == "done"
    assert asked["tool_calls"][0]["function"]["name"] == "run"


def test_a_file_that_was_replaced_is_read_anew() -> None:
    lines = [orjson.dumps(line(n)) + b"\n" for n in range(6)]
    FILE.write_bytes(lines[0] + lines[1])
    assert indexed(INDEX, FILE).groups == 2
    FILE.write_bytes(lines[4] + lines[5])
    assert [*listed(FILE)] == ["math-train-0-000004", "math-train-0-000005"]
    # As long as before, and its beginning and end are the same.
    facts = FILE.stat()
    FILE.write_bytes(lines[4] + lines[5].replace(b"says the 0", b"says no one"[:10]))
    os.utime(FILE, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    assert indexed(INDEX, FILE).resets == 1


def with_facts(**facts: Any) -> bytes:
    changed = line(1)
    changed["envserver"] |= facts
    return json.dumps(changed).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000 + b"]" * 100_000,
        b'{"tokens":' + b"[" * 100_000 + b"]" * 100_000 + b',"scores":[]}',
        b'{"tokens":[[1]],"scores":[1],"group_id":"\xff"}',
        with_facts(group_id="a\ud800b"),
        with_facts(policy_version=2**70),
        with_facts(rollouts=None),
        b"[1, 2]",
        b"null",
        b'{"actions": [1], "metadata": {"sequences": 3}}',
        b'{"actions": [{"tool": 1}], "metadata": {"start_ts": "x", "end_ts": []}}',
        b'{"actions": [{}], "metadata": {"sequences": [{"messages": [1]}], "flags": 3}}',
        b'{"actions": [{}], "metadata": {"sequences": [1]}}',
        b'{"steps": [], "outcome": {}}',
    ],
    ids=lambda content: content[:20].decode(errors="replace"),
)
def test_nothing_that_is_in_a_file_ends_the_reading(content: bytes) -> None:
    FILE.write_bytes(b"\n".join([orjson.dumps(line(0)), content, orjson.dumps(line(2)), b""]))
    found = indexed(INDEX, FILE)
    assert (found.groups, found.problems) == (2, 1)
    assert "run.jsonl, line 2 is not" in found.first_problems[0]


LINES = b"".join(orjson.dumps(line(n)) + b"\n" for n in range(3))
ENDS = [at for at, byte in enumerate(LINES) if byte == ord("\n")]


@settings(max_examples=examples(30), deadline=None)
@given(st.sets(st.integers(0, len(LINES)) | st.sampled_from(ENDS), max_size=4))
def test_however_a_file_grows_its_groups_are_the_same(cuts: set[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file, index = Path(folder) / "run.jsonl", Path(folder) / "index"
        for cut in sorted({*cuts, len(LINES)}):
            file.write_bytes(LINES[:cut])
            found = indexed(index, file)
            assert (found.problems, found.resets) == (0, 0)
        assert [*listed(file, index=index)] == [f"math-train-0-{n:06d}" for n in range(3)]
        with file.open("ab") as more:
            more.write(b"nothing\n")
        assert "line 4 is not JSON" in indexed(index, file).first_problems[0]


@pytest.mark.parametrize("packed", [False, True])
async def test_words_in_the_texts_of_groups_are_found(packed: bool) -> None:
    said = ["It is 42, \u201ctruly\u201d.", "No idea"]
    lines = [line(1), line(2, answers=said), line(3, (0.0,), output="A table", messages=[])]
    file = write_lines(FILE, lines)
    if packed:
        file = Path("run.jsonl.zst")
        file.write_bytes(zstd.compress(FILE.read_bytes()))
    async with opened(INDEX, file) as groups:
        wanted_of = {"no IDEA": "2", "\u201ctruly": "2", "table": "3", "0002": "2"}
        for text, wanted in {**wanted_of, "-0.5": "", "ended_by": ""}.items():
            page = await groups.list_groups(GroupQuery(text=text), "", 10)
            counted = await groups.reward_counts(GroupQuery(text=text))
            assert counted.groups == len(page.groups)
            assert [one.facts.task_id[-1] for one in page.groups if one.facts] == [*wanted]


def test_equal_ids_and_several_runs_are_told_apart() -> None:
    base, tuned = Path("base"), Path("tuned")
    write_lines(base / "run.jsonl", [line(1), line(1)])
    write_lines(tuned / "run.jsonl", [line(1)])
    one = "math-train-0-000001"
    assert [*listed(base)] == [one, f"{one}~2"]
    both = [*listed(base, tuned, index=Path("both"))]
    assert both == [f"base/{one}", f"base/{one}~2", f"tuned/{one}"]


def test_an_index_lies_beside_its_file_or_in_the_cache_and_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_lines(tmp_path / "runs" / "run.jsonl", [line(1)])
    beside = file.with_name("run.jsonl.index")
    assert index_path([str(file)]) == beside
    indexed(beside, file)
    assert index_path([str(file)]) == beside
    assert beside.stat().st_mode & 0o077 == 0, "others may not be allowed to read the file"
    with sqlite3.connect(beside) as sql:
        sql.execute("PRAGMA user_version = 99")
    sql.close()
    assert indexed(beside, file).groups == 1, "an index of another version is made anew"
    beside.write_bytes(beside.read_bytes()[:5000].ljust(20_000, b"?"))
    assert indexed(beside, file).groups == 1, "a damaged one, too"
    beside.write_text("somebody's own")
    cached = index_path([str(file)])
    assert cached.is_relative_to(tmp_path / "cache")
    assert beside.read_text() == "somebody's own"
    beside.unlink()
    beside.symlink_to(tmp_path / "elsewhere")
    assert index_path([str(file)]) == cached


async def test_a_place_that_is_no_longer_there_is_told() -> None:
    write_lines(FILE, [line(1)])
    async with opened(INDEX, FILE) as groups:
        FILE.unlink()
        with pytest.raises(EnvserverError, match=r"run\.jsonl cannot be read"):
            await groups.bodies(["math-train-0-000001"])
