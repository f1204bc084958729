"""Exports for the hub: the folder as it would be pushed, its card, and what must not be in it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.delivered import line, write_lines
from support.hub import running_hub
from support.in_process import Run
from support.waiting import PATIENCE

OUT = Path("out")
PUSH = "--push_to_hub me/rollouts --dry_run"


def groups(path: str = "groups.jsonl", model: str = "m", env: str = "math", **facts: Any) -> None:
    """A file of two groups of two rollouts, with rewards 0 and 1."""
    lines = [line(number, answers=("It is 42.",) * 2, env=env) for number in range(2)]
    for number, one in enumerate(lines):
        one["envserver"] |= {"policy_version": number, "model": model, **facts}
    write_lines(Path(path), lines)


@pytest.fixture
def card(run: Run) -> Callable[..., str]:
    """Exports `groups.jsonl` as for the hub, and returns the card."""

    def made(words: str = "", to: str = "messages", source: str = "groups.jsonl") -> str:
        run(f"export {source} --to {to} {PUSH} --out out {words}")
        return (OUT / "README.md").read_text()

    return made


def header(card: str) -> dict[str, Any]:
    return dict(yaml.safe_load(card.split("---\n")[1]))


@pytest.mark.parametrize("to", ["messages", "parquet"])
def test_a_dry_run_writes_what_datasets_can_load(card: Callable[..., str], to: str) -> None:
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("pyarrow")
    groups()
    told = card("--min_reward 0.5", to)
    ((files,),) = [config["data_files"] for config in header(told)["configs"]]
    loaded = datasets.load_dataset(str(OUT), cache_dir="cache")
    assert list(loaded) == [files["split"]] == ["train"]
    assert loaded["train"].num_rows == 2
    assert set(loaded["train"]["reward"]) == {1.0}
    said = [(one["role"], one["content"]) for one in loaded["train"][0]["messages"]]
    assert said == [("user", "What is 0 of math?"), ("assistant", "It is 42.")]
    for name in loaded["train"].column_names:
        assert f"| `{name}` |" in told
    listed = {file["path"] for file in json.loads((OUT / "MANIFEST.json").read_text())["files"]}
    written = {path.relative_to(OUT).as_posix() for path in OUT.rglob("*") if path.is_file()}
    assert listed == written - {"MANIFEST.json"}


def test_a_card_tells_what_it_is_made_of(
    card: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody_else")
    groups(split="test")
    exam = "one two three four five six seven eight nine ten eleven twelve thirteen"
    Path("exam.txt").write_text(exam)
    found = card(
        f"--against {tmp_path}/exam.txt --where 'turns < 6'", source=f"{tmp_path}/groups.jsonl"
    )
    told = header(found)
    assert told["pretty_name"] == "rollouts" and told["license"] == "unknown"
    assert told["configs"][0]["data_files"][0]["split"] == "test"
    assert "math" in told["tags"] and told["size_categories"] == ["n<1K"]
    for part in (
        "| `math` | 4 | 2 | 0.500 |",
        "4 rows; 24 tokens in 4 training rows, of which 12 were sampled",
        "- Models: `m`; policy versions: 0 to 1",
        "- `where`: `turns < 6`",
        "13 words in a row in common with `exam.txt`",
        "0.9 to 1.0",
    ):
        assert part in found
    # Nothing of this machine and no secret is in the folder.
    everything = b"".join(path.read_bytes() for path in OUT.rglob("*") if path.is_file())
    assert str(tmp_path).encode() not in everything
    assert b"hf_of_nobody_else" not in everything


def test_names_from_the_data_are_no_markup_and_end_no_header(card: Callable[..., str]) -> None:
    hostile = "x`|\n---\nlicense: mit\n# y <script>"
    groups(env=hostile, model=hostile)
    found = card(f"--title '{hostile}'")
    assert header(found)["license"] == "unknown"
    assert header(found)["tags"][-1] == "x-license-mit-y-script"
    body = found.split("\n---\n", 1)[1]
    assert "`x'' --- license: mit # y <script>`" in body
    assert not any(line.startswith(("---", "# y", "license")) for line in body.splitlines())
    told = header(card("--overwrite", "html"))  # pages have no splits
    assert "configs" not in told and told["viewer"] is False


def test_what_cannot_be_pushed_is_refused_before_any_work(run: Run) -> None:
    groups()
    for words, says in {
        "--push_to_hub no-owner --dry_run --out out": "OWNER/NAME",
        "--dry_run --out out": "--dry_run needs --push_to_hub",
        "--push_to_hub me/x --dry_run --out one.jsonl": "Only a folder",
    }.items():
        assert says in run(f"export groups.jsonl --to messages {words}", status=2)
        assert [path.name for path in Path().iterdir()] == ["groups.jsonl"]


def test_a_push_is_one_commit_of_the_folder(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    groups(f"{tmp_path}/groups.jsonl")
    words = "export groups.jsonl --to messages --out out --push_to_hub me/x"
    with running_hub() as hub:
        subprocess.run(
            [sys.executable, "-m", "envserver", *words.split()], cwd=tmp_path, check=True,
            env={**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_of_a_stand_in"},
            timeout=PATIENCE,
        )  # fmt: skip
    [(token, body)] = [one[1:] for one in hub.asked if one[0] == "/api/repos/create"]
    assert token == "Bearer hf_of_a_stand_in"
    assert json.loads(body)["type"] == "dataset"
    [commit] = [body for path, _, body in hub.asked if path == "/api/datasets/me/x/commit/main"]
    pushed = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert hub.committed() == pushed
    assert b"hf_of_a_stand_in" not in commit
