"""`envserver export`: stored rollouts in other forms, those that are wanted, whole or not."""

import asyncio
import contextlib
import gzip
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from envserver_factory.exporting.export import Forbidden
from envserver_records.errors import ConfigError
from envserver_records.records import Conversation, Group, link_of
from envserver_records.tasks import RewardRange, TurnReward
from envserver_records.zstd import zstd
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import to_builtins
from msgspec.structs import replace
from support.api import native_group, put_native, running_api, sequence, wire_group
from support.cases import cases_of
from support.commands import ENVSERVER, read_jsonl
from support.delivered import line, write_lines
from support.extent import examples, first_of
from support.in_process import Run
from support.waiting import PATIENCE

from envserver.export import group_line, problems_of, problems_of_trace, read_groups
from envserver.export.jsonl import OutputFile, lock, open_appending
from envserver.export.stored import group_of, group_record
from envserver.export.unified import unified_of_trace
from envserver.store import GroupPut, open_store

CASES = cases_of(__file__)

SOURCE = Path("in/run.jsonl")


@pytest.fixture
def export(run: Run) -> Run:
    """Exports `in/run.jsonl`, four groups whose rewards are 0, 1, 0.5 and none, or another file."""
    write_lines(SOURCE, (line(n, (0.0, 1.0, 0.5, None)) for n in range(4)))

    def command(line: str, status: int = 0, source: object = SOURCE) -> Any:
        return run(f"export {source} --to {line}", status)

    return command


def rows(folder: str) -> list[dict[str, Any]]:
    return [row for path in sorted(Path(folder).glob("part-*")) for row in read_jsonl(path)]


def manifest(folder: str = "out") -> dict[str, Any]:
    return dict(orjson.loads(Path(folder, "MANIFEST.json").read_bytes()))


def names_in(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


def test_groups_can_be_read_again_and_lose_only_what_was_dropped(export: Run) -> None:
    """Each file is a chain of digests of its own, also where groups are left out."""
    export("atropos --out all.jsonl")
    chainless = [{**one, "chain": 0} for one in read_jsonl(SOURCE)]
    assert [{**one, "chain": 0} for one in read_jsonl(Path("all.jsonl"))] == chainless
    export("atropos --out some --min_reward 0.5 --shard_rows 2", source="all.jsonl")
    files = sorted(Path("some").glob("part-*"))
    assert len(files) > 1
    for file in (Path("all.jsonl"), *files):
        previous = ""
        for written in file.read_bytes().splitlines(keepends=True):
            link = link_of(written)
            assert link is not None and link.intact and link.previous == previous
            previous = link.digest
    export("atropos --out some.jsonl --min_reward 0.5")
    before, after = (list(read_groups([name])) for name in (str(SOURCE), "some.jsonl"))
    assert len(after) == 4
    for old, new in zip(before, after, strict=True):
        wanted = [one for one in old.rollouts if (one.reward or 0) >= 0.5]
        assert [one.rollout_id for one in new.rollouts] == [one.rollout_id for one in wanted]
        for one, other in zip(wanted, new.rollouts, strict=True):
            assert one.messages == other.messages
            assert one.rows[0].tokens.tolist() == other.rows[0].tokens.tolist()
            assert other.rows[0].logprobs.tolist() == [0, 0, 0, *[-0.5] * other.sampled]


def test_unified_records_have_ids_of_their_own_whatever_the_order(export: Run, run: Run) -> None:
    write_lines(Path("backwards.jsonl"), reversed(read_jsonl(SOURCE)))
    write_lines(Path("alone.jsonl"), [line(7, (1.0,))])
    for source, out in ((SOURCE, "a"), ("backwards.jsonl", "b"), ("alone.jsonl", "c")):
        export(f"unified --out {out}", source=source)
    a, b, c = (
        {path.stem: orjson.loads(path.read_bytes()) for path in Path(out).glob("math/*.json")}
        for out in "abc"
    )
    assert len(a) == 16 and a == b
    assert [*c] == ["math-000007"]
    for name, document in a.items():
        assert document["task_id"] == name
        assert problems_of(document) == []
    run("validate a")
    export("unified --out u.jsonl --tokens")
    lines = read_jsonl(Path("u.jsonl"))
    assert {one["task_id"] for one in lines} == a.keys()
    row = lines[0]["metadata"]["sequences"][1]
    assert row["masks"] == [int(one < 0) for one in row["logprobs"]]


def test_pairs_are_of_one_prompt_and_of_different_rewards(export: Run) -> None:
    export("dpo --out out")
    found = rows("out")
    assert len(found) == 4
    for number, pair in enumerate(found):
        assert pair["prompt"] == [{"role": "user", "content": f"What is {number} of math?"}]
        assert [one["role"] for one in pair["chosen"] + pair["rejected"]] == ["assistant"] * 2
        assert (pair["chosen_reward"], pair["rejected_reward"]) == (1.0, 0.0)
    export("dpo --out nobody --where 'reward == 1'")
    assert rows("nobody") == []


def test_traces_stand_by_model_and_label_and_go_into_unified_records(export: Run) -> None:
    call = {"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    one = line(0, (1.0, 0.0))
    one["messages"][0][1:1] = [
        {"role": "assistant", "content": "I add.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    one["envserver"]["rollouts"][1]["limit"] = "turns"
    write_lines(SOURCE, [one])
    export("traces --out out")
    good, bad = (
        orjson.loads(Path("out/maker_model-1", label, "run_001.json").read_bytes())
        for label in ("solved", "failed")
    )
    assert problems_of_trace(good) == problems_of_trace(bad) == []
    types = ["thought", "tool_call", "tool_result", "thought", "final"]
    assert [step["type"] for step in good["steps"]] == types
    assert good["steps"][1]["args"] == {"a": 1}
    assert good["outcome"]["completed"]
    assert bad["outcome"]["error"] and not bad["outcome"]["completed"]

    again = unified_of_trace(good, domain="math")
    assert problems_of(again) == []
    tools = [action["tool"] for action in again["actions"]]
    assert tools == ["reason", "add", "reason", "finalize"]
    good["steps"][1]["i"] = 7
    good["outcome"]["num_steps"] = 1
    assert len(problems_of_trace(good)) == 2


async def test_the_same_groups_come_from_files_folders_stores_and_servers(export: Run) -> None:
    # One is long enough to be stored, and offered, as zstd in several frames.
    outputs = ("short", "A long answer. " * 10_000, "short")
    groups = [native_group(f"g-{n}", output=output) for n, output in enumerate(outputs)]
    store, file = Path("groups.db"), Path("in/run.jsonl")

    async def written(source: object) -> bytes:
        await asyncio.to_thread(export, "atropos --out again.jsonl --overwrite", source=source)
        return Path("again.jsonl").read_bytes()

    async with open_store(store) as opened:
        for group in groups:
            await put_native(opened, group)
    whole = await written(store)
    file.write_bytes(whole)
    assert [one["envserver"]["group_id"] for one in read_jsonl(file)] == ["g-0", "g-1", "g-2"]
    async with running_api(store) as api:
        assert await written(api.url) == await written(store) == whole
    Path("a.jsonl.gz").write_bytes(gzip.compress(whole))
    Path("a.jsonl.zst").write_bytes(zstd.compress(whole))
    Path("evaluation").mkdir()
    Path("evaluation/groups.jsonl").write_bytes(whole)
    Path("evaluation/tasks.jsonl").write_text('{"task_id": "task-1"}\n')
    for source in ("in", "a.jsonl.gz", "a.jsonl.zst", "'in/*.jsonl'", "evaluation"):
        assert await written(source) == whole, source


async def test_groups_of_others_have_a_rollout_for_each_row_stored(where: str, export: Run) -> None:
    posted = wire_group(3, messages=[[{"role": "assistant", "content": f"{n}"}] for n in range(3)])
    body = orjson.dumps(posted)
    facts: dict[str, Any] = {"format": "atropos", "size": 3, "tokens": 9, "max_length": 3}
    async with open_store(where) as store:
        for name in ("w-1", "w-2"):
            await store.put([GroupPut(group_id=name, body=body, env="theirs", **facts)])
        await asyncio.to_thread(export, "messages --out out.jsonl", source=f"'{where}'")
    found = [(row["env"], row["task_id"], row["reward"]) for row in read_jsonl(Path("out.jsonl"))]
    assert found == [("theirs", "w-1", 0.5)] * 3 + [("theirs", "w-2", 0.5)] * 3
    SOURCE.write_bytes(body + b"\n")
    export("unified --out u")
    assert len(names_in("u/atropos")) == 3


def test_a_torn_last_line_is_passed_over_and_a_bad_one_named(export: Run) -> None:
    good = SOURCE.read_bytes()
    SOURCE.write_bytes(good + b'{"tokens":[[1,2')
    export("messages --out out")
    assert len(rows("out")) == 16
    SOURCE.write_bytes(b'{"tokens": 1}\n' + good)
    assert f"{SOURCE}, line 1" in export("messages --out out --overwrite", status=2)
    assert len(rows("out")) == 16
    export("messages --out out --overwrite --skip_bad")
    assert manifest()["counts"]["bad_lines"] == 1


def test_what_cannot_be_is_said_and_leaves_nothing(export: Run) -> None:
    expressions = CASES["wrong_expressions"]
    others = {
        "messages --against nowhere.jsonl": "nowhere.jsonl",
        "papyrus": "papyrus",
        "messages --per_group worst": "per_group",
    }
    lines = {f'messages --where "{where}"': said for where, said in expressions.items()}
    for words, said in (lines | others).items():
        assert said in export(f"{words} --out out", status=2)
        assert names_in(".") == {"in"}


def test_what_is_there_is_not_replaced_unless_it_is_an_export(export: Run) -> None:
    export("messages --out out")
    before = manifest()
    export("dpo --out out", status=2)
    assert manifest() == before
    Path("mine").mkdir()
    Path("mine/letter.txt").write_text("Dear")
    export("dpo --out mine --overwrite", status=2)
    assert names_in("mine") == {"letter.txt"}


def test_expressions_speak_of_all_that_is_known(export: Run) -> None:
    for where, kept in CASES["expressions"].items():
        export(f'messages --out out.jsonl --overwrite --where "{where}"')
        assert len(read_jsonl(Path("out.jsonl"))) == kept, where


def test_the_shortest_and_the_best_of_a_group(export: Run) -> None:
    write_lines(SOURCE, [line(0, (1.0, 1.0, 0.0, 0.5), answers=("a b c d", "a b", "a", "a b c"))])
    for choice, said in (("best", "a b"), ("shortest", "a")):
        export(f"messages --out {choice} --per_group {choice}")
        assert [row["messages"][-1]["content"] for row in rows(choice)] == [said]


def test_duplicates_are_dropped_however_they_are_spaced(export: Run) -> None:
    groups = [
        line(0, (0.0, 1.0, 1.0), answers=("It is 4.", "It  is\n4. ", "It is 5.")),
        line(0, (1.0,), answers=("It is 5.",)),
        line(0, (1.0,), answers=("It is 5.",), env="code"),
    ]
    write_lines(SOURCE, groups)
    export("messages --out out --dedupe")
    assert manifest()["counts"]["dropped"]["duplicate"] == 2
    said = sorted((row["env"], row["messages"][-1]["content"]) for row in rows("out"))
    assert said == [("code", "It is 5."), ("math", "It is 4."), ("math", "It is 5.")]


def test_rollouts_with_a_piece_of_an_evaluation_set_are_left_out(export: Run) -> None:
    secret = "the train leaves the town at nine and comes home when all the birds sleep"
    answers = (f"Well, {secret.upper()}!", f"{secret[:30]} or so", "seven small green frogs sing")
    write_lines(SOURCE, [line(n, (1.0,), answers=(said,)) for n, said in enumerate(answers)])
    short = [{"messages": [{"role": "user", "content": answers[2]}]}]
    for name, data, kept in (
        ("a.jsonl", orjson.dumps({"question": f"It is said that {secret}", "answer": "9"}), "12"),
        ("short.json", orjson.dumps(short), "01"),
        ("plain.txt", f"Once.\n\nIt is said\nthat {secret}".encode(), "12"),
    ):
        Path(name).write_bytes(data)
        export(f"messages --out {name}.out --against {name}")
        assert "".join(row["task_id"][-1] for row in rows(f"{name}.out")) == kept


word = st.text(st.characters(categories=("Lu", "Ll")), min_size=1, max_size=4)


@settings(max_examples=examples(25))
@given(st.lists(word, min_size=13, max_size=30), st.lists(word, max_size=20), st.data())
def test_thirteen_words_in_a_row_are_always_found(
    forbidden: list[str], around: list[str], data: st.DataObject
) -> None:
    known = Forbidden()
    known.add(" ".join(forbidden))
    start = data.draw(st.integers(0, len(forbidden) - 13))
    piece = [*around, *forbidden[start : start + 13], *around]
    assert known.is_in(", ".join(piece))
    assert not known.is_in(" ".join(f"{one}0" for one in piece))


# Many trajectories, in memory that does not grow --------------------------------------------------

MOST_MB = 160
"""Of memory, whatever the number: an interpreter with our imports takes some 60."""

_TELLING_MEMORY = """
import resource, subprocess, sys
status = subprocess.call(sys.argv[1:], stderr=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(status)
"""
"""Linux counts what a process had before it became another program: it comes from a small one."""


@pytest.mark.thorough
@pytest.mark.parametrize("rollouts", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_many_trajectories_are_exported_in_bounded_memory(tmp_path: Path, rollouts: int) -> None:
    words = [f"word{number}" for number in range(4000)]

    def said(number: int) -> list[str]:
        return [" ".join(words[number % 50 + which :: 97]) for which in range(4)]

    groups = (line(n, (0.0, 1.0, 1.0, 0.5), answers=said(n)) for n in range(rollouts // 4))
    write_lines(tmp_path / "run.jsonl", groups)
    (tmp_path / "exam.txt").write_text(" ".join(f"exam{number}" for number in range(20)))
    filters = "--dedupe --where turns<6 --against exam.txt"
    for command in (f"export run.jsonl --to unified --out out --jsonl {filters}", "validate out"):
        program = [sys.executable, "-c", _TELLING_MEMORY, str(ENVSERVER), *command.split()]
        ran = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert int(ran.stdout.split()[-1]) / 1024 < MOST_MB
    counts = orjson.loads((tmp_path / "out/MANIFEST.json").read_bytes())["counts"]
    assert counts["read"] == counts["kept"] == rollouts


# A line of JSONL is the same group again

SAID = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def read_again(group: Group, **facts: Any) -> Group:
    line = orjson.loads(
        group_line(group, include_messages=True, score_range="unit", include_actions=True)
    )
    for rollout in line["envserver"]["rollouts"]:
        rollout.update(facts)
    return group_record(group_of(line, "line 1"))


def test_it_differs_only_in_what_lines_lack() -> None:
    facts: dict[str, Any] = {"trained": True, "model": "m", "turns": 1, "completion_tokens": 3}
    other = Conversation(agent="critic", messages=SAID, tools=[], **facts)
    rollout = native_group(
        "g",
        sequences=[sequence(), replace(sequence(), agent="critic", flags=["mixed_versions"])],
        others=[other],
        actions=[{"step": 1, "tool": "reason", "input": {}, "output": "4"}],
        metrics={"steps": 2.0},
        turn_rewards=[TurnReward(0, 0.5)],
        flags=["truncated"],
        limit="turns",
    ).trajectories[0]
    group = replace(
        native_group("g"),
        trajectories=[rollout, replace(rollout, sequences=[], rollout_id="text-only")],
        reward_range=RewardRange(-1.0, 2.0),
        lost={"engine": 1},
        asked=3,
    )
    again = read_again(group)
    for ours, theirs in zip(group.trajectories, again.trajectories, strict=True):
        for before, after in zip(ours.sequences, theirs.sequences, strict=True):
            for name in ("tokens", "mask", "logprobs", "versions"):
                assert np.array_equal(getattr(before, name), getattr(after, name)), name
            assert (after.agent, after.flags) == (before.agent, before.flags)
            assert set(after.calls) == {-1}
    assert plain(again) == plain(group)


def plain(group: Group) -> Any:
    rollouts = [replace(one, sequences=[]) for one in group.trajectories]
    return to_builtins(replace(group, trajectories=rollouts), enc_hook=str)


@pytest.mark.parametrize("attempt", first_of(1, 2))
def test_threads_may_read_the_first_groups_of_a_process_at_once(attempt: int) -> None:
    """msgspec looks at a type when it first decodes one, which ends a process with two threads."""
    read = subprocess.run(
        [sys.executable, "-c", CASES["at_once"]],
        input=orjson.dumps(line(attempt)),
        capture_output=True,
        timeout=PATIENCE,
    )
    assert (read.returncode, read.stderr) == (0, b"")


# The file that a run appends groups to, and how it replaces an old one ----------------------------


def news(path: Path) -> list[int]:
    """What was appended; the chain of lines is tested in unit/running/test_python_api.py."""
    return [line["new"] for line in read_jsonl(path)]


def test_the_first_line_replaces_old_content_and_later_lines_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("old 1\nold 2\n")
    with open_appending(path) as old, contextlib.closing(OutputFile(path, old, replaces=True)) as f:
        lock(old, path)
        assert path.read_text() == "old 1\nold 2\n"
        f.append(b'{"new":1}\n')
        assert news(path) == [1]
        f.append(b'{"new":2}\n')
        with open_appending(path) as other, pytest.raises(ConfigError, match="Another process"):
            lock(other, path)
    assert news(path) == [1, 2]


@pytest.mark.parametrize("name", ["/dev/full", "pipe"])
def test_what_cannot_be_read_again_is_refused(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is a device or a pipe"):
        open_appending(tmp_path / name)
