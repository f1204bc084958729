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

import orjson
import pytest
from envserver_records.errors import EnvserverError
from envserver_records.records import Group, pack, unpack
from envserver_records.zstd import zstd
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.api import native_group, put_native
from support.delivered import line, write_lines
from support.extent import examples
from support.trajectories import sequence
from support.views import indexed, opened, write_groups

from envserver import main
from envserver.export import read_groups
from envserver.export.unified import unified_of
from envserver.store import open_store
from envserver.store.listing import GroupQuery, ListedGroup
from envserver.viewing.index_place import index_path

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
