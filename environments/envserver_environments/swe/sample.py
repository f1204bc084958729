"""The built-in tasks: one readable text file each, in `data/`, of sections `=== kind argument`:

=== problem                   the problem statement for the agent
=== file shop/cart.py         a file of the repository
=== hidden tests/test_cart.py a test file that comes in for grading only; its assertions have
                              literals on their right, so that answers can be taken out
=== fail_to_pass              ids of hidden tests that the gold patch makes pass; all others
                              pass before and after
=== gold shop/cart.py         the solution: blocks of lines to be replaced,
                              `<<<<<<<` old `=======` new `>>>>>>>`, or a whole new file
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from envserver_environments.demonstrations import sections

from envserver import Task

from .trees import Tree, make_patch, tar_of, tree_of

SAMPLE = Path(__file__).parent / "data"
_SECTIONS = ("problem", "file", "hidden", "fail_to_pass", "gold")
_BLOCK = re.compile(r"^<<<<<<<\n(.*?)^=======\n(.*?)^>>>>>>>\n", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class SampleTask:
    name: str
    problem: str
    files: dict[str, str]
    hidden: dict[str, str]
    fail_to_pass: tuple[str, ...]
    gold: dict[str, str]
    """Files as the solution has them."""

    @property
    def tree(self) -> Tree:
        return tree_of(self.files)

    @property
    def gold_patch(self) -> str:
        return make_patch(self.tree, self.tree | tree_of(self.gold))

    def task(self) -> Task:
        tests = hidden_ids(self.hidden)
        return Task(
            f"swe-{self.name}",
            {"problem": self.problem, "files": self.files},
            {
                "tests": self.hidden,
                "fail_to_pass": list(self.fail_to_pass),
                "pass_to_pass": [name for name in tests if name not in self.fail_to_pass],
                "patch": self.gold_patch,
                "hoisted": True,
            },
        )


def write_folder(sample: SampleTask, folder: Path) -> None:
    """Writes a task as a folder: task.json, repo.tar and hidden/ (see `loading`)."""
    hidden = sample.task().hidden
    row = {
        "instance_id": sample.name,
        "problem_statement": sample.problem,
        "patch": sample.gold_patch,
        "FAIL_TO_PASS": hidden["fail_to_pass"],
        "PASS_TO_PASS": hidden["pass_to_pass"],
        "repo_archive": "repo.tar",
        "hidden_tests": "hidden",
    }
    for path, text in sample.hidden.items():
        place = folder / "hidden" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    (folder / "task.json").write_text(json.dumps(row, indent=2) + "\n", encoding="utf-8")
    (folder / "repo.tar").write_bytes(tar_of(sample.tree))


def hidden_ids(files: dict[str, str]) -> list[str]:
    return [
        f"{path}::{node.name}"
        for path, source in files.items()
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test")
    ]


@cache
def sample_tasks() -> tuple[SampleTask, ...]:
    return tuple(read_sample_task(path) for path in sorted(SAMPLE.glob("*.txt")))


def read_sample_task(path: Path) -> SampleTask:
    parts: dict[str, dict[str, str]] = {kind: {} for kind in _SECTIONS}
    for title, text in sections(path.read_text(encoding="utf-8")).items():
        kind, _, argument = title.partition(" ")
        if kind not in parts:
            raise ValueError(f"{path.name}: there is no section {kind!r}")
        parts[kind][argument] = text
    files, changes = parts["file"], parts["gold"]
    return SampleTask(
        name=path.stem,
        problem=parts["problem"][""].strip(),
        files=files,
        hidden=parts["hidden"],
        fail_to_pass=tuple(parts["fail_to_pass"][""].split()),
        gold={name: _changed(files.get(name), text, name) for name, text in changes.items()},
    )


def _changed(old: str | None, text: str, name: str) -> str:
    if old is None or not _BLOCK.search(text):
        return text
    for block in _BLOCK.finditer(text):
        if old.count(block[1]) != 1:
            raise ValueError(
                f"{name}: a block to be replaced stands there {old.count(block[1])} times"
            )
        old = old.replace(block[1], block[2])
    return old
