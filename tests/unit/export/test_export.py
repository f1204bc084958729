"""`envserver export`: stored rollouts in other forms, those that are wanted, whole or not."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from collections import Counter
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import msgspec
import orjson
import pytest
from envserver_records.records import pack
from envserver_records.seals import link_of
from envserver_records.servers import ServersClient
from envserver_records.zstd import zstd
from hypothesis import given, settings
from hypothesis import strategies as st
from support.api import native_group, put_native, running_api, wire_group
from support.commands import read_jsonl
from support.delivered import line, write_lines
from support.extent import examples

from envserver import main
from envserver.export import problems_of, problems_of_trace, read_groups, stored_server
from envserver.export.decontaminate import Forbidden
from envserver.export.traces import unified_of_trace
from envserver.store import GroupPut, open_store

LETTERS = ("Lu", "Ll")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Four groups; the rewards of each are 0, 1, 0.5 and none."""
    return write_lines(
        tmp_path / "in" / "run.jsonl", (line(n, (0.0, 1.0, 0.5, None)) for n in range(4))
    )


def export(*words: object) -> int:
    return main(["export", *map(str, words)])


def rows(folder: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(folder.glob("part-*.jsonl")) for row in read_jsonl(path)]


def manifest(folder: Path) -> dict[str, Any]:
    return dict(orjson.loads((folder / "MANIFEST.json").read_bytes()))


def test_conversations_come_with_reward_environment_and_task(source: Path, tmp_path: Path) -> None:
    assert export(source, "--to", "messages", "--out", tmp_path / "out") == 0
    found = rows(tmp_path / "out")
    assert len(found) == 16
    assert found[0] == {
        "messages": [
            {"role": "user", "content": "What is 0 of math?"},
            {"role": "assistant", "content": "It is 0, says the 1."},
        ],
        "reward": 1.0,
        "env": "math",
        "task_id": "math-000000",
    }


def test_the_manifest_tells_files_checksums_and_counts(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = (source, "--to", "messages", "--out", out, "--shard_rows", 5)
    assert export(*words, "--where", "reward >= 0.5", "--per_group", "best") == 0
    told = manifest(out)
    assert told["counts"] == {
        "groups": 4,
        "read": 16,
        "kept": 4,
        "rows": 4,
        "dropped": {
            "where": 8,
            "min_reward": 0,
            "contaminated": 0,
            "not_chosen": 4,
            "duplicate": 0,
        },
        "bad_lines": 0,
    }
    assert told["filter"]["where"] == "reward >= 0.5"
    assert export(*words, "--overwrite") == 0
    told = manifest(out)
    assert [(one["path"], one["rows"]) for one in told["files"]] == [
        *((f"part-0000{number}.jsonl", 5) for number in range(3)),
        ("part-00003.jsonl", 1),
    ]
    for one in told["files"]:
        data = (out / one["path"]).read_bytes()
        assert (one["bytes"], one["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}


def without_chain(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key != "chain"}


def test_lines_of_an_export_are_chained_by_digests(source: Path, tmp_path: Path) -> None:
    """Each file is a chain of its own, also where groups of the source's chain are left out."""
    export(source, "--to", "atropos", "--out", tmp_path / "all.jsonl")
    words = ("--min_reward", 0.5, "--shard_rows", 2)
    export(tmp_path / "all.jsonl", "--to", "atropos", "--out", tmp_path / "some", *words)
    files = [tmp_path / "all.jsonl", *sorted((tmp_path / "some").glob("part-*"))]
    assert len(files) > 2
    for file in files:
        previous = ""
        for written in file.read_bytes().splitlines(keepends=True):
            link = link_of(written)
            assert link is not None and link.intact and link.previous == previous
            previous = link.digest


def test_groups_can_be_read_again_and_lose_only_what_was_dropped(
    source: Path, tmp_path: Path
) -> None:
    export(source, "--to", "atropos", "--out", tmp_path / "all.jsonl")
    assert [without_chain(one) for one in read_jsonl(tmp_path / "all.jsonl")] == read_jsonl(source)
    export(source, "--to", "atropos", "--out", tmp_path / "some.jsonl", "--min_reward", 0.5)
    before, after = list(read_groups([str(source)])), list(read_groups([f"{tmp_path}/some.jsonl"]))
    assert len(after) == 4
    for old, new in zip(before, after, strict=True):
        wanted = [one for one in old.rollouts if (one.reward or 0) >= 0.5]
        assert [one.rollout_id for one in new.rollouts] == [one.rollout_id for one in wanted]
        for one, other in zip(wanted, new.rollouts, strict=True):
            assert one.messages == other.messages
            assert one.rows[0].tokens.tolist() == other.rows[0].tokens.tolist()
            assert other.rows[0].logprobs.tolist() == [0, 0, 0, *[-0.5] * other.sampled]


def test_unified_records_have_ids_of_their_own_whatever_the_order(
    source: Path, tmp_path: Path
) -> None:
    backwards = write_lines(tmp_path / "backwards.jsonl", reversed(read_jsonl(source)))
    alone = write_lines(tmp_path / "alone.jsonl", [line(7, (1.0,))])
    for path, out in ((source, "a"), (backwards, "b"), (alone, "c")):
        assert export(path, "--to", "unified", "--out", tmp_path / out) == 0
    documents = {
        folder: {
            path.relative_to(tmp_path / folder): orjson.loads(path.read_bytes())
            for path in (tmp_path / folder).glob("math/*.json")
        }
        for folder in ("a", "b", "c")
    }
    assert len(documents["a"]) == 16
    assert documents["a"] == documents["b"]
    assert [str(path) for path in documents["c"]] == ["math/math-000007.json"]
    for path, document in documents["a"].items():
        assert document["task_id"] == path.stem
        assert problems_of(document) == []
    assert main(["validate", str(tmp_path / "a")]) == 0
    assert export(source, "--to", "unified", "--out", tmp_path / "u.jsonl", "--tokens") == 0
    lines = read_jsonl(tmp_path / "u.jsonl")
    assert {one["task_id"] for one in lines} == {path.stem for path in documents["a"]}
    row = lines[0]["metadata"]["sequences"][1]
    assert row["masks"] == [int(one < 0) for one in row["logprobs"]]


def test_pairs_are_of_one_prompt_and_of_different_rewards(source: Path, tmp_path: Path) -> None:
    assert export(source, "--to", "dpo", "--out", tmp_path / "out") == 0
    found = rows(tmp_path / "out")
    assert len(found) == 4
    for number, pair in enumerate(found):
        assert pair["prompt"] == [{"role": "user", "content": f"What is {number} of math?"}]
        assert [one["role"] for one in pair["chosen"] + pair["rejected"]] == ["assistant"] * 2
        assert (pair["chosen_reward"], pair["rejected_reward"]) == (1.0, 0.0)
    export(source, "--to", "dpo", "--out", tmp_path / "none", "--where", "reward == 1")
    assert rows(tmp_path / "none") == []


def test_unified_records_have_what_hooks_did_and_which_hosts_were_asked(tmp_path: Path) -> None:
    hook = {"at": "request", "reason": "shorter", "changed": ["messages"]}
    request = {"method": "GET", "host": "api.test", "port": 80, "path": "/x", "status": 200}
    one = line(0, (1.0,), hooks=[hook], egress=[request])
    source = write_lines(tmp_path / "run.jsonl", [one, line(1, (1.0,))])
    assert export(source, "--to", "unified", "--out", tmp_path / "u.jsonl") == 0
    told, untold = (one["metadata"] for one in read_jsonl(tmp_path / "u.jsonl"))
    assert (told["hooks"], told["egress"]) == ([hook], [request])
    assert not {"hooks", "egress", "cost"} & untold.keys()


def test_traces_stand_by_model_and_label_and_go_into_unified_records(tmp_path: Path) -> None:
    call = {"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    one = line(0, (1.0, 0.0))
    one["messages"][0][1:1] = [
        {"role": "assistant", "content": "I add.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    one["envserver"]["rollouts"][1]["limit"] = "turns"
    source = write_lines(tmp_path / "run.jsonl", [one])
    assert export(source, "--to", "traces", "--out", tmp_path / "out") == 0
    folder = tmp_path / "out" / "maker_model-1"
    good, bad = (
        orjson.loads((folder / label / "run_001.json").read_bytes())
        for label in ("solved", "failed")
    )
    assert problems_of_trace(good) == problems_of_trace(bad) == []
    types = ["thought", "tool_call", "tool_result", "thought", "final"]
    assert [step["type"] for step in good["steps"]] == types
    assert good["steps"][1]["args"] == {"a": 1}
    assert good["outcome"]["completed"]
    assert bad["outcome"]["error"]
    assert not bad["outcome"]["completed"]
    again = unified_of_trace(good, domain="math")
    assert problems_of(again) == []
    assert [action["tool"] for action in again["actions"]] == [
        "reason",
        "add",
        "reason",
        "finalize",
    ]
    good["steps"][2] |= {"text": "no such number", "error": "no such number"}
    assert problems_of_trace(good) == []
    failed = unified_of_trace(good, domain="math")
    assert problems_of(failed) == []
    assert failed["actions"][1]["error"] == "no such number"
    good["steps"][1]["i"] = 7
    good["outcome"]["num_steps"] = 1
    assert len(problems_of_trace(good)) == 2


def test_a_server_that_sends_frame_by_frame_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    body = pack(native_group("g"))
    packed = msgspec.msgpack.encode(
        {"group_id": "g", "env": "math", "format": "group", "policy_version": 7, "body": body}
    )

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/groups":
            listed = {"groups": [{"group_id": "g", "state": "queued"}], "next": None}
            return httpx.Response(200, json=listed)
        if "zstd" not in request.headers["accept-encoding"]:
            return httpx.Response(200, content=packed)
        frames = (zstd.compress(part) for part in (packed[:20], packed[20:]))
        return httpx.Response(200, headers={"content-encoding": "zstd"}, content=frames)

    client = partial(ServersClient, transport=httpx.MockTransport(answer))
    monkeypatch.setattr(stored_server, "ServersClient", client)
    assert len(list(read_groups(["http://envserver.test"]))) == 1


def test_the_same_groups_come_from_files_folders_stores_and_servers(tmp_path: Path) -> None:
    groups = [native_group(f"g-{number}") for number in range(3)]
    # Long enough to be stored, and offered, as zstd in several frames.
    groups[1] = native_group("g-1", output="A long answer. " * 10_000)

    async def stored() -> None:
        async with open_store(tmp_path / "groups.db") as store:
            for group in groups:
                await put_native(store, group)

    async def served() -> None:
        async with running_api(tmp_path / "groups.db") as api:
            for source in (api.url, str(tmp_path / "groups.db")):
                words = (source, "--to", "atropos", "--out", tmp_path / "live.jsonl", "--overwrite")
                assert await asyncio.to_thread(export, *words) == 0
                assert (tmp_path / "live.jsonl").read_bytes() == whole

    asyncio.run(stored())
    file = tmp_path / "in" / "a.jsonl"
    file.parent.mkdir()
    assert export(tmp_path / "groups.db", "--to", "atropos", "--out", file) == 0
    whole = file.read_bytes()
    assert [one["envserver"]["group_id"] for one in read_jsonl(file)] == ["g-0", "g-1", "g-2"]
    asyncio.run(served())
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(whole))
    (tmp_path / "a.jsonl.zst").write_bytes(zstd.compress(whole))
    evaluation = tmp_path / "evaluation"
    evaluation.mkdir()
    (evaluation / "groups.jsonl").write_bytes(whole)
    (evaluation / "tasks.jsonl").write_text('{"task_id": "task-1"}\n')
    for source in ("in", "a.jsonl.gz", "a.jsonl.zst", "in/*.jsonl", "evaluation"):
        out = tmp_path / "again.jsonl"
        assert export(tmp_path / source, "--to", "atropos", "--out", out, "--overwrite") == 0
        assert out.read_bytes() == whole


def test_groups_of_others_have_a_rollout_for_each_row_in_either_database(
    where: str, tmp_path: Path
) -> None:
    posted = wire_group(3, messages=[[{"role": "assistant", "content": f"{n}"}] for n in range(3)])
    facts: dict[str, Any] = {"format": "atropos", "size": 3, "tokens": 9, "max_length": 3}

    async def stored() -> None:
        async with open_store(where) as store:
            for name in ("w-1", "w-2"):
                body = orjson.dumps(posted)
                await store.put([GroupPut(group_id=name, body=body, env="theirs", **facts)])
            words = (where, "--to", "messages", "--out", tmp_path / "out.jsonl")
            assert await asyncio.to_thread(export, *words) == 0

    asyncio.run(stored())
    rows = read_jsonl(tmp_path / "out.jsonl")
    found = [(row["env"], row["task_id"], row["reward"]) for row in rows]
    assert found == [("theirs", "w-1", 0.5)] * 3 + [("theirs", "w-2", 0.5)] * 3
    (tmp_path / "wire.jsonl").write_bytes(orjson.dumps(posted) + b"\n")
    assert export(tmp_path / "wire.jsonl", "--to", "unified", "--out", tmp_path / "u") == 0
    assert len(list((tmp_path / "u" / "atropos").iterdir())) == 3


def test_a_torn_last_line_is_passed_over_and_a_bad_one_named(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = source.read_bytes()
    source.write_bytes(good + b'{"tokens":[[1,2')
    out = tmp_path / "out"
    assert export(source, "--to", "messages", "--out", out) == 0
    assert len(rows(out)) == 16
    source.write_bytes(b'{"tokens": 1}\n' + good)
    assert export(source, "--to", "messages", "--out", out, "--overwrite") == 2
    assert f"{source}, line 1" in capsys.readouterr().err
    assert len(rows(out)) == 16
    assert export(source, "--to", "messages", "--out", out, "--overwrite", "--skip_bad") == 0
    assert manifest(out)["counts"]["bad_lines"] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--where", "rewrd > 1"), "Did you mean reward?"),
        (("--where", "reward >"), "is not an expression"),
        (("--where", "reward.real > 1"), "attribute"),
        (("--where", "__import__('os').getpid()"), "__import__"),
        (("--where", "(lambda: 1)()"), "lambda"),
        (("--where", "open('/etc/passwd')"), "open"),
        (("--where", "len(turns) > 1"), "math-train-0-000000-r0"),
        (("--against", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--to", "papyrus"), "papyrus"),
        (("--per_group", "worst"), "per_group"),
    ],
)
def test_what_cannot_be_is_said_and_leaves_nothing(
    source: Path, tmp_path: Path, words: tuple[str, str], said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    to = () if words[0] == "--to" else ("--to", "messages")
    assert export(source, *to, "--out", tmp_path / "out", *words) == 2
    assert said in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


def test_what_is_there_is_not_replaced_unless_it_is_an_export(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert export(source, "--to", "messages", "--out", out) == 0
    before = manifest(out)
    assert export(source, "--to", "dpo", "--out", out) == 2
    assert manifest(out) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("Dear")
    assert export(source, "--to", "dpo", "--out", tmp_path / "mine", "--overwrite") == 2
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter.txt"]


def test_expressions_speak_of_all_that_is_known(source: Path, tmp_path: Path) -> None:
    for number, (where, kept) in enumerate(
        (
            ("reward >= 0.8 and turns < 6 and 'lossy_detok' not in flags", 4),
            ("reward < 0.3", 4),
            ("reward is None", 4),
            ("components['right'] == 0.5 and components['style'] is None", 4),
            ("env == 'math' and task_id in ['math-000001', 'math-000002']", 8),
            ("any(message['role'] == 'tool' for message in messages)", 0),
            ("length > 5 and sampled == 6 and not failed", 8),
        )
    ):
        out = tmp_path / f"{number}.jsonl"
        assert export(source, "--to", "messages", "--out", out, "--where", where) == 0
        assert len(read_jsonl(out)) == kept, where


def test_the_shortest_and_the_best_of_a_group(tmp_path: Path) -> None:
    answers = ("a b c d", "a b", "a", "a b c")
    source = write_lines(tmp_path / "run.jsonl", [line(0, (1.0, 1.0, 0.0, 0.5), answers=answers)])
    for choice, said in (("best", "a b"), ("shortest", "a")):
        out = tmp_path / f"{choice}.jsonl"
        export(source, "--to", "messages", "--out", out, "--per_group", choice)
        assert [row["messages"][-1]["content"] for row in read_jsonl(out)] == [said]


def test_duplicates_are_dropped_however_they_are_spaced(tmp_path: Path) -> None:
    groups = [
        line(0, (0.0, 1.0, 1.0), answers=("It is 4.", "It  is\n4. ", "It is 5.")),
        line(0, (1.0,), answers=("It is 5.",)),
        line(0, (1.0,), answers=("It is 5.",), env="code"),
    ]
    source = write_lines(tmp_path / "run.jsonl", groups)
    out = tmp_path / "out"
    assert export(source, "--to", "messages", "--out", out, "--dedupe") == 0
    assert manifest(out)["counts"]["dropped"]["duplicate"] == 2
    said = [(row["env"], row["messages"][-1]["content"]) for row in rows(out)]
    assert Counter(said) == Counter(
        [("math", "It is 4."), ("math", "It is 5."), ("code", "It is 5.")]
    )


def test_rollouts_with_a_piece_of_an_evaluation_set_are_left_out(tmp_path: Path) -> None:
    secret = "the train leaves the town at nine and comes home when all the birds sleep"
    answers = (f"Well, {secret.upper()}!", f"{secret[:30]} or so", "seven small green frogs sing")
    source = write_lines(
        tmp_path / "run.jsonl",
        [line(n, (1.0,), answers=(said,)) for n, said in enumerate(answers)],
    )
    sets = {
        "rows.jsonl": orjson.dumps({"question": f"It is said that {secret}", "answer": "9"}),
        "short.json": orjson.dumps([{"messages": [{"role": "user", "content": answers[2]}]}]),
        "plain.txt": f"Once.\n\nIt is said\nthat {secret}".encode(),
    }
    for name, data in sets.items():
        (tmp_path / name).write_bytes(data)
        out = tmp_path / f"{name}.out.jsonl"
        words = ("--to", "messages", "--out", out, "--against", tmp_path / name)
        assert export(source, *words) == 0
        left = {int(row["task_id"][-1]) for row in read_jsonl(out)}
        assert left == ({0, 1} if name == "short.json" else {1, 2})


word = st.text(st.characters(categories=LETTERS), min_size=1, max_size=4)


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


@pytest.mark.skipif(find_spec("inspect_ai") is not None, reason="inspect_ai is installed")
def test_logs_of_inspect_need_its_library(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(source, "--to", "inspect", "--out", tmp_path / "logs") == 2
    assert "[inspect]" in capsys.readouterr().err
    assert not (tmp_path / "logs").exists()
