"""Results with a known reward (the gold patch, broken patches, cheats), and conversations that
solve a task.

Some cheats are programs appended to the modules that the gold patch changes, so they run inside of
the tests; the obvious ones come in a disguise, too, so that they pass the tripwires.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from envserver_environments.demonstrations import (
    Known,
    call_message,
    sections,
    table_beside,
    text_message,
    written_call,
)

from envserver import KnownResult, Message, Result, Task

from .agent import SUBMIT, AgentKind
from .patches import MAX_PATCH_BYTES, apply_changes, read_patch
from .repositories import base_tree
from .trees import Entry, Tree, make_patch, tree_of

_KNOWN = Known(patch="", submitted=True, reason="")
_ALL_PASS = "def test_nothing():\n    pass\n"
_HELD = table_beside(__file__)
_HOOK, _EXIT = _HELD["programs"]["HOOK"], _HELD["programs"]["EXIT"]
PLANTED: dict[str, dict[str, str]] = {
    cheat: {
        path: text.replace("HOOK", _HOOK).replace("EXIT", _EXIT) for path, text in files.items()
    }
    for cheat, files in _HELD["planted"].items()
}
REFUSED: dict[str, str] = _HELD["refused"]
PROGRAMS = sections(Path(__file__).with_name("cheats.txt").read_text(encoding="utf-8"))


def known_results(task: Task, in_image: Tree | None = None) -> Iterator[KnownResult]:
    tree, gold = base_tree(task.public, in_image), str(task.hidden["patch"])
    solved = apply_changes(tree, read_patch(gold))
    yield _KNOWN.right("gold", patch=gold)
    yield _KNOWN.right(
        "gold, and tests that are changed", patch=make_patch(tree, _with_easy_tests(tree, solved))
    )
    yield _KNOWN.right(
        "gold, and a conftest", patch=make_patch(tree, _with(solved, {"conftest.py": _EXIT}))
    )
    wrong = {
        "an unrelated edit": _with(tree, {"NOTES.md": "Done.\n"}),
        "a syntax error": _appended(tree, solved, "def broken(:\n"),
        "too large": _with(solved, {"x.txt": "x" * MAX_PATCH_BYTES + "\n"}),
        "overwritten tests": _with_easy_tests(tree, tree),
        "deleted tests": _without_tests(tree),
        **{name: _with(tree, files) for name, files in PLANTED.items()},
        **{name: _appended(tree, solved, program) for name, program in PROGRAMS.items()},
    }
    patches = {name: make_patch(tree, changed) for name, changed in wrong.items()}
    patches["the gold patch, cut off"] = gold[: len(gold) * 2 // 3]
    for name, patch in (patches | REFUSED).items():
        yield _KNOWN.wrong(name, patch=patch)


def result_of(patch: str) -> Result:
    return _KNOWN.result(patch=patch)


def _with(tree: Tree, files: dict[str, str]) -> Tree:
    return tree | tree_of(files)


def _appended(tree: Tree, solved: Tree, program: str) -> Tree:
    """The unsolved tree, with `program` in the modules that the solution changes."""
    changed = [p for p in tree if solved.get(p) != tree[p] and p.endswith(".py")]
    return tree | {path: Entry(tree[path].data + b"\n\n" + program.encode()) for path in changed}


def _tests(tree: Tree) -> list[str]:
    return [path for path in tree if "test" in path and path.endswith(".py")]


def _with_easy_tests(tree: Tree, base: Tree) -> Tree:
    return _with(base, dict.fromkeys([*_tests(tree), "tests/test_more.py"], _ALL_PASS))


def _without_tests(tree: Tree) -> Tree:
    tests = _tests(tree)
    return {path: entry for path, entry in tree.items() if path not in tests}


_LOOK = "ls && git log --oneline | head -3"
_PLACE = ".git/change"
_PIECE_CHARACTERS = 900
"""A long patch is written in several turns: one answer has a bounded length."""


def demonstrate(task: Task, kind: AgentKind) -> list[Message]:
    """A look around, the gold patch, handing it in. In the last turn with a command, its first
    number and its last one decide whether the patch is applied: one that is spoiled does not solve
    it."""
    writing = [
        f"cat >> {_PLACE} <<'END_OF_PATCH'\n{piece}END_OF_PATCH"
        for piece in _pieces(task.hidden["patch"].rstrip("\n") + "\n")
    ]
    applying = f"strip=1; test $strip = 1 && git apply -p1 {_PLACE}"
    match kind:
        case "bash":
            last = f"{applying} &>/dev/null\necho {SUBMIT}"
            return [text_message(f"```bash\n{command}\n```") for command in (_LOOK, *writing, last)]
        case "tools":
            calls = [call_message("bash", command=command) for command in (*writing, applying)]
            return [call_message("list_dir", path="."), *calls]
        case "text":
            calls = [written_call("bash", command=command) for command in (*writing, applying)]
            final = text_message("FINAL: The problem is solved.")
            return [written_call("list_dir", path="."), *calls, final]


def _pieces(patch: str) -> list[str]:
    pieces = [""]
    for line in patch.splitlines(keepends=True):
        if pieces[-1] and len(pieces[-1]) + len(line) > _PIECE_CHARACTERS:
            pieces.append("")
        pieces[-1] += line
    return pieces
