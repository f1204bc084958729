"""Patches of an agent: what is read, refused, dropped, applied. And tests without answers."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.swe.hoisting import Answer, NotHoistable, hoist
from envserver_environments.swe.patches import (
    MAX_CHANGES,
    MAX_PATCH_BYTES,
    PatchError,
    apply_changes,
    read_patch,
    split_protected,
)
from envserver_environments.swe.sample import sample_tasks
from envserver_environments.swe.trees import Entry, Tree, git_files, make_patch, tar_of, tree_of

OLD = tree_of({"a.py": "one\ntwo\nthree\n", "pkg/b.py": "x = 1\n", "last": "no newline"})


def applied(patch: str, tree: Tree = OLD) -> Tree:
    return apply_changes(tree, read_patch(patch))


def refused(patch: str, tree: Tree = OLD) -> str:
    with pytest.raises(PatchError) as caught:
        applied(patch, tree)
    return caught.value.reason


NEW = [
    {**{p: e.data.decode() for p, e in OLD.items()}, "a.py": "one\nTWO\nthree\nfour\n"},
    {"a.py": "one\ntwo\nthree", "pkg/b.py": "x = 1\n", "last": "no newline\n"},
    {"a.py": "one\ntwo\nthree\n", "pkg/b.py": "x = 1\n", "last": "no newline", "new/c d.py": "c\n"},
    {"pkg/b.py": "--- x\n+++ y\n@@ z\n", "last": "\u00e4\r\n\x0c\u2028\n"},
]


@pytest.mark.parametrize("files", NEW)
def test_git_takes_our_patches_and_we_take_its(files: dict[str, str], tmp_path: Path) -> None:
    """In a repository that was made without git, which git finds in order."""

    def git(*arguments: str, stdin: str = "") -> str:
        ran = subprocess.run(
            ["git", "-C", str(tmp_path), *arguments],
            input=stdin.encode(), capture_output=True, check=True,
        )  # fmt: skip
        return ran.stdout.decode()

    repository, commit = git_files(OLD)
    subprocess.run(["tar", "-x", "-C", str(tmp_path)], input=tar_of(OLD | repository), check=True)
    assert git("status", "--porcelain") == ""
    assert git("rev-parse", "HEAD").strip() == commit
    assert git("log", "--all", "--format=%an").split() == ["Repository"]
    assert git("fsck", "--strict", "--unreachable") == ""
    new = tree_of(files)
    assert applied(make_patch(OLD, new)) == new
    git("apply", "-", stdin=make_patch(OLD, new))
    git("add", "-A")
    assert applied(git("diff", "--cached", "--binary", commit)) == new
    renamed = git("diff", "--cached", "--find-renames=1%", "--find-copies-harder", commit)
    assert applied(renamed) == new


def test_a_repository_is_the_same_bytes_everywhere() -> None:
    backwards = dict(reversed(OLD.items()))
    assert tar_of(OLD | git_files(OLD)[0]) == tar_of(backwards | git_files(backwards)[0])
    assert git_files(OLD)[1] == "4306ce98d2ef9f114632935349d883ee702ad01c"


def test_lines_that_have_moved_are_found() -> None:
    patch = make_patch(OLD, OLD | {"a.py": Entry(b"one\ntwo\n3\n")})
    moved = OLD | {"a.py": Entry(b"\n" * 50 + b"one\ntwo\nthree\n")}
    assert applied(patch, moved)["a.py"].data == b"\n" * 50 + b"one\ntwo\n3\n"
    assert refused(patch, OLD | {"a.py": Entry(b"one\nthree\n")}) == "conflict"


def added(path: str, header: str = "new file mode 100644") -> str:
    return (
        f"diff --git a/x b/x\n{header}\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+x\n".replace(
            "diff --git a/x b/x", f"diff --git a/{path} b/{path}"
        )
    )


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        (added("../x"), "path"),
        (added("a/../../x"), "path"),
        (added("/etc/x"), "path"),
        ("--- /dev/null\n+++ /etc/passwd\n@@ -0,0 +1 @@\n+x\n", "path"),
        ("--- a/a.py\n+++ b/../../a.py\n@@ -1 +1 @@\n-one\n+x\n", "path"),
        ('diff --git "a/\\056\\056/x" "b/\\056\\056/x"\nnew file mode 100644\n', "path"),
        ("diff --git a/a.py b/b.py\nrename from a.py\nrename to ../b.py\n", "path"),
        (added("a\\b"), "path"),
        (added("/".join("d" * 21)), "path"),
        (added("n" * 201), "path"),
        (added("link", "new file mode 120000"), "link"),
        ("diff --git a/a.py b/a.py\nold mode 100644\nnew mode 120000\n", "link"),
        ("diff --git a/a.py b/a.py\nindex 0000000..1111111 120000\n", "link"),
        (added("sub", "new file mode 160000"), "submodule"),
        (added("x", "new file mode 104755"), "malformed"),
        ("diff --git a/x b/x\nnew file mode 100644\nGIT binary patch\nliteral 1\n", "binary"),
        ("diff --git a/x b/x\nBinary files a/x and b/x differ\n", "binary"),
        ("--- a/a.py\n+++ b/a.py\n@@ -1,9 +1,9 @@\n one\n", "malformed"),
        ("--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n?one\n", "malformed"),
        ("diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/last\n@@ -1 +1 @@\n-one\n+x\n", "malformed"),
        (added("a.py"), "conflict"),
        (added("a.py/b"), "conflict"),
        (added("pkg"), "conflict"),
        ("--- a/gone\n+++ b/gone\n@@ -1 +1 @@\n-one\n+x\n", "conflict"),
        ("x" * (MAX_PATCH_BYTES + 1), "size"),
        ("".join(added(f"f{n}") for n in range(MAX_CHANGES + 1)), "size"),
        ("\ud800", "malformed"),
    ],
)
def test_refused(patch: str, reason: str) -> None:
    assert refused(patch) == reason


def test_a_link_is_no_way_out() -> None:
    linked = OLD | {"out": Entry(b"/etc", "link")}
    assert refused(added("out/passwd"), linked) == "conflict"
    assert refused("--- a/out\n+++ b/out\n@@ -1 +1 @@\n-/etc\n+/\n", linked) == "conflict"


SOURCE = ["src/a.py", "contest.py", "attest.py", "latest/x.py", "a/testable.py", "README.md"]
PROTECTED = [
    "tests/test_a.py", "a/tests/data.json", "test_a.py", "a/a_test.py", "conftest.py",
    "a/conftest.py", "pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml", "x.pth",
    "sitecustomize.py", "a/usercustomize.py", ".git/config", "a/.git/hooks/x", ".gitattributes",
    "A/Tests/x", "Conftest.py", "a/__pycache__/b.cpython-311.pyc", "b.so",
    "_pytest/x.py", "tests", "test_a.py/x", ".env",
]  # fmt: skip


def test_tests_and_configurations_are_protected_and_source_is_not() -> None:
    patch = "".join(map(added, (*PROTECTED, *SOURCE)))
    kept, dropped = split_protected(read_patch(patch))
    assert [change.new for change in kept] == SOURCE
    assert [change.new for change in dropped] == PROTECTED


def test_hidden_files_have_their_places_and_a_move_of_a_test_is_dropped_as_a_whole() -> None:
    patch = "".join(map(added, ("checks", "checks/a.py/b", "checks/a.py", "checks/b.py")))
    kept, _ = split_protected(read_patch(patch), frozenset({"checks/a.py"}))
    assert [change.new for change in kept] == ["checks/b.py"]
    tree = OLD | {"tests/test_a.py": Entry(b"t\n")}
    patch = "diff --git a/tests/test_a.py b/src.py\nrename from tests/test_a.py\nrename to src.py\n"
    kept, dropped = split_protected(read_patch(patch))
    assert apply_changes(tree, kept) == tree
    assert len(dropped) == 1


def test_own_tasks_are_small_repositories_and_their_gold_patches_make_the_solution() -> None:
    for task in sample_tasks():
        assert tree_of(task.files) == task.tree
        assert 2 <= len(task.files) <= 12
        assert len(task.problem) > 100
        solved = apply_changes(task.tree, read_patch(task.gold_patch))
        assert {path: solved[path].data.decode() for path in task.gold} == task.gold


def test_answers_are_taken_out() -> None:
    source = (
        "def test_a():\n    x = 2\n    assert x + 1 == 3\n    assert not []\n"
        "    assert x in (1, 2)\n"
        "class TestB:\n    def test_c(self):\n        assert f() >= -1.5\n"
    )
    hoisted = hoist(source, "told")
    assert "3" not in hoisted.source
    assert "1.5" not in hoisted.source
    assert hoisted.source.count("told(") == 4
    assert hoisted.answers == {
        "test_a": (Answer("==", 3), Answer("is", False), Answer("in", (1, 2))),
        "TestB::test_c": (Answer(">=", -1.5),),
    }


@pytest.mark.parametrize(
    "body",
    [
        "    assert f() == g()", "    for x in y:\n        assert x == 1", "    assert 1 < f() < 3",
        "    f()",
    ],
)  # fmt: skip
def test_answers_that_would_stay(body: str) -> None:
    with pytest.raises(NotHoistable):
        hoist(f"def test_a():\n{body}\n", "told")


@pytest.mark.parametrize(
    ("operator", "literal", "right", "wrong"),
    [
        ("==", 1, 1, [True, 1.0, "1", None]),
        ("==", [1, (2,)], [1, (2,)], [[1, [2]], [True, (2,)], (1, (2,))]),
        ("==", {"a": 1}, {"a": 1}, [{"a": True}, {"a": 1, "b": 2}, {}]),
        ("==", {1, 2}, {2, 1}, [{True, 2}, frozenset({1, 2}), [1, 2]]),
        ("is", True, True, [1, "True", None]),
        ("!=", 1, 2, [1]),
        ("<=", 5, 5, [6, "1", None, False]),
        ("in", (1, 2), 2, [3, True]),
    ],
)
def test_answers_are_of_exact_types(
    operator: str, literal: Any, right: Any, wrong: list[Any]
) -> None:
    answer = Answer(operator, literal)
    assert answer.accepts(right)
    assert [value for value in wrong if answer.accepts(value)] == []
