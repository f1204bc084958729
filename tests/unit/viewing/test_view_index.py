"""The index of what is on disk: the same lists as a server's, and always that of its files."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from envserver_records.errors import EnvserverError
from envserver_records.records import Group, pack, unpack
from envserver_records.zstd import zstd
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.api import native_group, put_native, sequence
from support.delivered import line, write_lines
from support.extent import examples
from support.views import indexed, opened, write_evaluation, write_groups

from envserver import main
from envserver.export import read_groups
from envserver.export.traces import trace_of
from envserver.export.unified import unified_of
from envserver.store import open_store
from envserver.store.interface import ReadGroups
from envserver.store.listing import GroupQuery, ListedGroup
from envserver.viewing.index_place import index_path
from envserver.viewing.indexing import Indexer
from envserver.viewing.indexing_process import Progress
from envserver.viewing.sources import viewed

QUERIES = st.builds(
    GroupQuery,
    order=st.sampled_from(["newest", "oldest", "best", "worst", "widest", "longest"]),
    environment=st.sampled_from(["", "", "math"]),
    task=st.sampled_from(["", "", "", "task-3"]),
    min_reward=st.none() | st.just(0.25),
    max_reward=st.none() | st.just(0.75),
    spread_above=st.none() | st.just(0.0),
    version_from=st.none() | st.just(2),
    min_length=st.none() | st.just(6),
    flag=st.sampled_from(["", "", "odd"]),
    end=st.sampled_from(["", "", "turns"]),
    text=st.sampled_from(["", "", "g1", "task-2"]),
)
SINGLE = {"env": "code", "policy_version": 2}


def some_groups() -> list[Group]:
    """Groups that differ in all that lists are filtered and sorted by."""
    found = []
    for number in range(24):
        group = native_group(f"g{number}", 1 + number % 3, flags=["odd"] * (number % 2))
        tokens = np.arange(5 + number % 4, dtype=np.int32)
        ones = np.ones(len(tokens))
        row = replace(
            sequence(),
            tokens=tokens,
            mask=ones.astype(np.uint8),
            logprobs=-ones.astype(np.float32),
            calls=ones.astype(np.int32) - 1,
            versions=ones.astype(np.int32),
        )
        rollouts = [
            replace(
                one,
                sequences=[row],
                score=replace(one.score, reward=(number * 7 + place * 3) % 5 / 4),
                usage=replace(one.usage, ended_by="turns" if number % 5 == 0 else "agent"),
            )
            for place, one in enumerate(group.trajectories)
        ]
        found.append(
            replace(
                group,
                trajectories=rollouts,
                task_id=f"task-{number % 7}",
                env="math" if number % 3 else "code",
                policy_version=number // 6,
            )
        )
    return found


def shown(one: ListedGroup) -> Any:
    """A group of a list without what the place of its storing decides."""
    return replace(one.row, state="queued", lease_id=None, created_at=0.0), one.facts


async def all_pages(groups: ReadGroups, query: GroupQuery, limit: int) -> list[Any]:
    found: list[Any] = []
    cursor = ""
    while True:
        page = await groups.list_groups(query, cursor, limit)
        found += map(shown, page.groups)
        if not (cursor := page.cursor):
            return found


def test_a_file_is_listed_as_a_server_lists_the_same_groups(tmp_path: Path) -> None:
    groups = some_groups()
    file = write_groups(tmp_path / "run.jsonl", groups)

    async def compare() -> None:
        async with open_store(tmp_path / "store.db") as store:
            for group in groups:
                await put_native(store, group)
            async with opened(tmp_path / "index", file) as index:
                loop = asyncio.get_running_loop()
                await asyncio.to_thread(check, store, index, loop)

    def check(store: ReadGroups, index: ReadGroups, loop: asyncio.AbstractEventLoop) -> None:
        def answered(groups: ReadGroups, query: GroupQuery, limit: int) -> list[Any]:
            return asyncio.run_coroutine_threadsafe(all_pages(groups, query, limit), loop).result()

        @settings(max_examples=examples(40), deadline=None)
        @given(QUERIES, st.sampled_from([1, 5, 100]))
        def same(query: GroupQuery, limit: int) -> None:
            assert answered(index, query, limit) == answered(store, query, limit)

        same()

    asyncio.run(compare())


def ids(index: Path, *places: Path) -> list[str]:
    async def listed() -> list[str]:
        async with opened(index, *places) as groups:
            page = await groups.list_groups(GroupQuery(), "", 1000)
            return [one.row.group_id for one in page.groups]

    return asyncio.run(listed())


def whole(index: Path, group_id: str, *places: Path) -> Group:
    async def read() -> Group:
        async with opened(index, *places) as groups:
            (body,) = await groups.bodies([group_id])
            return unpack(body, Group)

    return asyncio.run(read())


def compressed(file: Path) -> Path:
    packed = file.with_name(f"{file.name}.gz")
    packed.write_bytes(gzip.compress(file.read_bytes()))
    return packed


def zstandard(file: Path) -> Path:
    packed = file.with_name(f"{file.name}.zst")
    packed.write_bytes(zstd.compress(file.read_bytes()))
    return packed


@pytest.mark.parametrize("packed", [compressed, zstandard])
def test_compressed_files_have_the_same_groups(
    tmp_path: Path, packed: Callable[[Path], Path]
) -> None:
    file = write_lines(tmp_path / "run.jsonl", [line(n) for n in range(3)])
    other = packed(file)
    assert ids(tmp_path / "b", other) == ids(tmp_path / "a", file)
    for group_id in ids(tmp_path / "a", file):
        one, two = whole(tmp_path / "b", group_id, other), whole(tmp_path / "a", group_id, file)
        assert pack(one) == pack(two)
    other.write_bytes(other.read_bytes()[:-20])
    assert indexed(tmp_path / "b", other).problems == 1


@pytest.mark.parametrize(("to", "in_lines"), [("unified", True), ("traces", False)])
def test_trajectories_and_traces_are_groups_of_their_tasks(
    tmp_path: Path, to: str, in_lines: bool
) -> None:
    file = write_lines(tmp_path / "run.jsonl", [line(n, (0.0, 1.0, 0.5)) for n in range(2)])
    out = tmp_path / ("out.jsonl" if in_lines else "out")
    assert main(["export", str(file), "--to", to, "--out", str(out)]) == 0
    groups = [whole(tmp_path / "index", one, out) for one in ids(tmp_path / "index", out)]
    rewards = [one.score.reward for group in groups for one in group.trajectories]
    assert sorted(one for one in rewards if one is not None) == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0]
    answers = {str(one.messages[-1]["content"]) for group in groups for one in group.trajectories}
    assert answers == {f"It is {n}, says the {which}." for n in range(2) for which in range(3)}
    if in_lines:
        assert len(groups) == 2


def test_a_document_of_its_own_is_shown_with_its_actions(tmp_path: Path) -> None:
    stored = next(read_groups([str(write_lines(tmp_path / "run.jsonl", [line(1)]))]))
    trace = trace_of(stored.rollouts[0])
    trace["steps"].insert(
        0, {"i": 0, "type": "tool_call", "text": '{"tool": "run"}', "tool": "run", "args": {"x": 1}}
    )
    trace["steps"].insert(1, {"i": 0, "type": "tool_result", "text": "done"})
    for number, step in enumerate(trace["steps"]):
        step["i"] = number
    trace["outcome"]["num_steps"] = len(trace["steps"])
    file = tmp_path / "trace.json"
    file.write_bytes(orjson.dumps(trace))
    (group_id,) = ids(tmp_path / "index", file)
    (rollout,) = whole(tmp_path / "index", group_id, file).trajectories
    call = rollout.messages[1]["tool_calls"][0]
    assert (call["function"]["name"], rollout.messages[2]["content"]) == ("run", "done")
    unified = unified_of(stored.rollouts[1])
    del unified["metadata"]["sequences"]
    file.write_bytes(orjson.dumps(unified))
    (rollout,) = whole(tmp_path / "index", ids(tmp_path / "index", file)[0], file).trajectories
    assert rollout.messages[0]["content"] == "What is 1 of math?"


def test_what_is_not_a_group_is_skipped_and_told_with_its_place(tmp_path: Path) -> None:
    lines = [orjson.dumps(line(n)) for n in range(3)]
    file = tmp_path / "run.jsonl"
    file.write_bytes(b"\n".join([lines[0], b"{nothing", b'{"a": 1}', b"", lines[1]]) + b"\n")
    (tmp_path / "empty.jsonl").touch()
    assert indexed(tmp_path / "other", tmp_path / "empty.jsonl").groups == 0
    found = indexed(tmp_path / "index", file)
    assert (found.groups, found.problems) == (2, 2)
    assert "run.jsonl, line 2 is not JSON" in found.first_problems[0]
    assert "run.jsonl, line 3 is not a group" in found.first_problems[1]


def test_a_file_that_grows_is_read_on_and_one_that_was_replaced_is_read_anew(
    tmp_path: Path,
) -> None:
    file, index = tmp_path / "run.jsonl", tmp_path / "index"
    lines = [orjson.dumps(line(n)) + b"\n" for n in range(6)]
    file.write_bytes(lines[0] + lines[1] + lines[2][:-200])
    assert indexed(index, file).groups == 2
    with file.open("ab") as more:
        more.write(lines[2][-200:] + lines[3])
    assert (indexed(index, file).groups, indexed(index, file).resets) == (4, 0)
    assert whole(index, "math-train-0-000003", file).task_id == "math-000003"
    file.write_bytes(lines[4] + lines[5])
    assert ids(index, file) == ["math-train-0-000004", "math-train-0-000005"]
    # As long as before, and its beginning and end are the same.
    facts = file.stat()
    file.write_bytes(lines[4] + lines[5].replace(b"says the 0", b"says no one"[:10]))
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    assert indexed(index, file).resets == 1


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
def test_nothing_that_is_in_a_file_ends_the_reading(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "run.jsonl"
    file.write_bytes(b"\n".join([orjson.dumps(line(0)), content, orjson.dumps(line(2)), b""]))
    found = indexed(tmp_path / "index", file)
    assert (found.groups, found.problems) == (2, 1)
    assert "run.jsonl, line 2 is not" in found.first_problems[0]


def test_a_group_without_an_id_is_called_by_its_place(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    file.write_bytes(with_facts(group_id="") + b"\n")
    assert ids(tmp_path / "index", file) == ["run.jsonl-line-1"]


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
        assert ids(index, file) == [f"math-train-0-{n:06d}" for n in range(3)]
        with file.open("ab") as more:
            more.write(b"nothing\n")
        assert "line 4 is not JSON" in indexed(index, file).first_problems[0]


def test_the_second_time_only_the_index_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, index = write_lines(tmp_path / "run.jsonl", [line(1), line(2)]), tmp_path / "index"
    indexed(index, file)

    def fails(*_: object) -> None:
        raise AssertionError("a line was read again")

    monkeypatch.setattr("envserver.viewing.scanning.facts_of_line", fails)
    assert (indexed(index, file).groups, indexed(index, file).resets) == (2, 0)


def test_words_in_the_texts_of_groups_are_found(tmp_path: Path) -> None:
    said = ["It is 42, \u201ctruly\u201d.", "No idea"]
    lines = [line(1), line(2, answers=said), line(3, (0.0,), output="A table", messages=[])]
    file = write_lines(tmp_path / "run.jsonl", lines)

    async def found(groups: ReadGroups, text: str) -> list[str]:
        page = await groups.list_groups(GroupQuery(text=text), "", 10)
        counted = await groups.reward_counts(GroupQuery(text=text))
        assert counted.groups == len(page.groups)
        return [one.facts.task_id[-1] for one in page.groups if one.facts]

    async def search(*places: Path) -> None:
        async with opened(tmp_path / f"{places[0].name}.index", *places) as groups:
            assert await found(groups, "no IDEA") == ["2"]
            assert await found(groups, "\u201ctruly") == ["2"]
            assert await found(groups, "table") == ["3"]
            assert await found(groups, "0002") == ["2"]
            assert await found(groups, "-0.5") == await found(groups, "ended_by") == []

    asyncio.run(search(file))
    asyncio.run(search(zstandard(file)))


def test_equal_ids_and_several_runs_are_told_apart(tmp_path: Path) -> None:
    a = write_lines(tmp_path / "base" / "run.jsonl", [line(1), line(1)])
    b = write_lines(tmp_path / "tuned" / "run.jsonl", [line(1)])
    one = "math-train-0-000001"
    assert ids(tmp_path / "index", a.parent) == [one, f"{one}~2"]
    assert ids(tmp_path / "both", a.parent, b.parent) == [
        f"base/{one}",
        f"base/{one}~2",
        f"tuned/{one}",
    ]


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


def test_an_evaluation_without_groups_is_read_once(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "base", [line(1)])
    (folder / "groups.jsonl").unlink()
    told: list[Progress] = []
    indexer = Indexer(viewed([str(folder)]), tmp_path / "index", told.append)
    assert not (indexer.read_new() or indexer.read_new())
    indexer.close()
    assert len(told) == 1


def test_a_place_that_is_no_longer_there_is_told(tmp_path: Path) -> None:
    file, index = write_lines(tmp_path / "run.jsonl", [line(1)]), tmp_path / "index"

    async def read() -> None:
        async with opened(index, file) as groups:
            file.unlink()
            await groups.bodies(["math-train-0-000001"])

    with pytest.raises(EnvserverError, match=r"run\.jsonl cannot be read"):
        asyncio.run(read())
