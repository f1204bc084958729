"""`envserver_clients.sft` and `envserver_clients.dpo` before torch is needed: what is read, and
what is refused.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from envserver_clients import dpo, sft
from envserver_clients.finetuning.calls import Call, are_valid, calls_in
from envserver_clients.finetuning.card import base_name
from envserver_clients.finetuning.command import tell
from envserver_clients.finetuning.data import Part, digest_of, parts_of, rows_of
from rich.console import Console

from envserver import ConfigError

ROW = {"prompt": "a", "completion": "b"}


def write(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_folder_says_by_its_files_what_is_made_of_it(tmp_path: Path) -> None:
    places = (tmp_path / "sft" / "bash" / f"{name}.jsonl" for name in ("train", "val"))
    bash = Part("bash", *((write(place, ROW),) for place in places))
    reason = Part("reason", (write(tmp_path / "sft" / "reason" / "train.jsonl", ROW),), ())
    write(tmp_path / "sft" / "SUMMARY.json", {})
    assert parts_of(tmp_path / "sft") == [bash, reason]
    assert parts_of(tmp_path / "sft", tool="reason") == [reason]
    assert parts_of(tmp_path / "sft", whole=True) == [
        Part(None, bash.train + reason.train, bash.validation)
    ]
    splits = [write(tmp_path / "router" / f"{name}.jsonl", ROW) for name in ("train", "validation")]
    write(tmp_path / "router" / "test.jsonl", ROW)
    assert parts_of(tmp_path / "router") == [Part(None, (splits[0],), (splits[1],))]
    shards = [write(tmp_path / "export" / f"part-0000{n}.jsonl", ROW) for n in (0, 1)]
    write(tmp_path / "export" / "MANIFEST.json", {})
    assert parts_of(tmp_path / "export") == [Part(None, tuple(shards), ())]
    with pytest.raises(ConfigError, match=r"no rows of the tool none: it has bash, reason"):
        parts_of(tmp_path / "sft", tool="none")


def test_rows_come_out_of_every_kind_of_file(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    chat = [{"role": "user", "content": "a"}]
    plain = write(tmp_path / "a.jsonl", ROW, {"messages": chat})
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    table = tmp_path / "c.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": chat, "reward": 1.0}]), table)
    found = list(rows_of([plain, packed, table]))
    assert [row for _, row in found] == [
        *([ROW, {"messages": chat}] * 2),
        {"messages": chat, "reward": 1.0},
    ]
    assert found[-1][0].endswith("c.parquet, row 1")
    copy = write(tmp_path / "elsewhere" / "other.jsonl", ROW, {"messages": chat})
    assert digest_of([plain]) == digest_of([copy]) != digest_of([plain, copy])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--data nowhere.jsonl", "neither a file nor a folder"),
        ("--data rows.jsonl --lora-rank 0", "lora_rank"),
        ("--data rows.jsonl --preset tools", "Preset tools does not exist"),
        ("--data rows.jsonl --config wrong.yaml", "rank"),
        ("--data rows.jsonl --config unknown.yaml", "has trainer"),
    ],
)
@pytest.mark.parametrize("command", [sft, dpo])
def test_what_is_wrong_is_said_with_status_2(
    command, words: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl", ROW)
    (tmp_path / "wrong.yaml").write_text("defaults: {rank: 4}\n")
    (tmp_path / "unknown.yaml").write_text("trainer: {}\n")
    assert command.main(["--model", "m", "--output", "out", *words.split()]) == 2
    assert why in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_card_never_shows_a_path_and_an_error_keeps_the_brackets_of_an_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert base_name(str(tmp_path), None) == tmp_path.name
    assert base_name("org/model", None) == base_name(str(tmp_path), "org/model") == "org/model"
    tell(Console(stderr=True), ConfigError("No trl.", hint="pip install 'envserver[train,data]'"))
    told = capsys.readouterr().err
    assert told.startswith("envserver: No trl. pip install 'envserver[train,data]'")


PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
PARAMETERS |= {"additionalProperties": False}
ADD = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}


@pytest.mark.parametrize(
    ("text", "calls", "valid"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', 1, True),
        ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', 1, True),
        ('{"type": "function", "name": "add", "parameters": {"a": 1}}<|eom_id|>', 1, True),
        ('x {"function": {"name": "add", "arguments": "{\\"a\\": 1}"}} y', 1, True),
        ('{"name": "add", "arguments": {"a": "1"}}', 1, False),
        ('{"name": "add", "arguments": {"a": 1, "b": 2}}', 1, False),
        ('{"name": "add", "arguments": {"a": 1}', 0, False),
    ],
)
def test_calls_are_found_in_chat_templates_and_checked(text: str, calls: int, valid: bool) -> None:
    found = calls_in(text)
    assert len(found) == calls and are_valid(found, [ADD]) == valid
    if valid:
        assert found == [Call("add", {"a": 1})]
