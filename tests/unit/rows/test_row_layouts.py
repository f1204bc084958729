"""Rows are found in every layout of folders and files that data sets are published in."""

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from envserver_records.errors import ConfigError, NotFoundError
from support.cases import cases_of, write_jsonl

from envserver.rows.sources import Source

CASES = cases_of(__file__)
ROWS = [{"question": f'{number} +\n1, "so"?', "answer": str(number + 1)} for number in range(25)]


def answers(data: Path | str, split: str = "train") -> list[int]:
    rows = Source(str(data)).open(split)
    return [int(rows.read(number)["answer"]) for number in range(rows.count)]


@pytest.mark.parametrize(
    "files",
    [
        "train.jsonl validation.jsonl test.jsonl",
        "data/train.jsonl data/dev.jsonl data/test.jsonl",
        "train/a.jsonl valid/a.jsonl eval/a.jsonl",
        "only/gsm_training.ndjson only/gsm_val.ndjson only/gsm_testing.ndjson",
        "train-00000-of-00001.json validation-00000-of-00001.json test-00000-of-00001.json",
    ],
)
def test_splits_are_those_that_names_of_files_and_folders_say(tmp_path: Path, files: str) -> None:
    for number, name in enumerate(files.split()):
        write_jsonl(tmp_path / name, [{"answer": str(number)}])
    (tmp_path / "README.md").write_text("x")
    write_jsonl(tmp_path / "about_the_videos.json", [{"answer": "9"}])
    found = [answers(tmp_path, split) for split in ("train", "validation", "test")]
    assert found == [[0], [1], [2]]


def test_several_files_of_a_split_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = ("test.jsonl", "test2.jsonl", "test10.jsonl")
    for number, name in enumerate(names):
        write_jsonl(tmp_path / "set" / name, [{"answer": str(number)}])
    assert answers(tmp_path / "set", "test") == [0, 1, 2]
    for number in range(12):
        write_jsonl(tmp_path / "shards" / f"part-{number}.jsonl", [{"answer": str(number)}])
    assert answers(tmp_path / "shards") == answers(f"{tmp_path}/shards/*.jsonl") == [*range(12)]


def test_what_is_not_there_is_named_with_what_is(tmp_path: Path) -> None:
    for name in ("main", "socratic"):
        write_jsonl(tmp_path / name / "test.jsonl", ROWS[:3])
    with pytest.raises(ConfigError, match="several configurations: main, socratic"):
        answers(tmp_path, "test")
    assert len(answers(tmp_path / "main", "test")) == 3
    assert Source(str(tmp_path), subset="socratic").open("test").count == 3
    with pytest.raises(NotFoundError, match=r"no rows of the split 'train'\. It has test"):
        answers(tmp_path / "main")
    with pytest.raises(NotFoundError, match="No file matches"):
        answers(f"{tmp_path}/no*.jsonl")


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "parquet", "arrow"])
def test_every_kind_of_file_is_read_also_packed(tmp_path: Path, kind: str, packed: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    plain = tmp_path / f"rows.{kind}"
    write: dict[str, Callable[[], object]] = {
        "jsonl": lambda: write_jsonl(plain, ROWS),
        "json": lambda: plain.write_text(json.dumps({"rows": ROWS})),
        "csv": lambda: _put_table(plain, ","),
        "tsv": lambda: _put_table(plain, "\t"),
        "parquet": lambda: arrow.parquet.write_table(arrow.Table.from_pylist(ROWS), plain),
        "arrow": lambda: _put_arrow(plain),
    }
    pytest.importorskip("pyarrow.parquet")
    write[kind]()
    path = plain.with_name(plain.name + packed)
    if packed == ".gz":
        path.write_bytes(gzip.compress(plain.read_bytes()))
    elif packed:
        path.write_bytes(arrow.compress(plain.read_bytes(), codec="zstd", asbytes=True))
    assert answers(path) == [*range(1, 26)]
    if packed:
        path.write_bytes(path.read_bytes()[:20])
        with pytest.raises(ConfigError, match="cannot be unpacked"):
            answers(path)


@pytest.mark.parametrize("name", CASES)
def test_json_holds_rows_by_split_by_id_or_under_a_key(tmp_path: Path, name: str) -> None:
    case, path = CASES[name], tmp_path / "rows.json"
    path.write_text(case["held"])
    if "missing" in case:
        with pytest.raises(NotFoundError, match=case["missing"]):
            answers(path, case["split"])
    else:
        assert answers(path, case["split"]) == case["answers"]


def _put_table(path: Path, separator: str) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=separator).writerows(
            [ROWS[0].keys(), *(row.values() for row in ROWS)]
        )


def _put_arrow(path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.Table.from_pylist(ROWS)
    with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def test_folders_that_the_library_datasets_saves_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(str(tmp_path / "one"), num_shards=3)
    both = datasets.DatasetDict({"train": made, "validation": made.select(range(5))})
    both.save_to_disk(str(tmp_path / "two"))
    assert answers(tmp_path / "one") == answers(tmp_path / "two") == [*range(1, 26)]
    assert answers(tmp_path / "two", "validation") == [*range(1, 6)]
