"""Patches of an agent: what is read, refused, dropped, applied. And tests without their answers:
what is taken out, and that honest repairs still pass."""

import secrets
import subprocess
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.swe.expected import Answer
from envserver_environments.swe.judging import classes_now, comparisons, equality
from envserver_environments.swe.known import result_of
from envserver_environments.swe.patches import (
    MAX_CHANGES,
    MAX_PATCH_BYTES,
    PatchError,
    apply_changes,
    read_patch,
    split_protected,
)
from envserver_environments.swe.sample import SampleTask, sample_tasks
from envserver_environments.swe.trees import Entry, Tree, git_files, make_patch, tar_of, tree_of
from envserver_environments.swe.veiling import veil
from support.cases import cases_of
from support.swe_scripts import swe_of

from envserver import Sandboxes, Task

CASES = cases_of(__file__)

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


REFUSED = {
    "path": [
        added("../x"),
        "--- /dev/null\n+++ /etc/passwd\n@@ -0,0 +1 @@\n+x\n",
        "--- a/a.py\n+++ b/../../a.py\n@@ -1 +1 @@\n-one\n+x\n",
        'diff --git "a/\\056\\056/x" "b/\\056\\056/x"\nnew file mode 100644\n',
        "diff --git a/a.py b/b.py\nrename from a.py\nrename to ../b.py\n",
        added("a\\b"),
        added("/".join("d" * 21)),
        added("n" * 201),
    ],
    "link": [
        added("link", "new file mode 120000"),
        "diff --git a/a.py b/a.py\nold mode 100644\nnew mode 120000\n",
        "diff --git a/a.py b/a.py\nindex 0000000..1111111 120000\n",
    ],
    "submodule": [
        added("sub", "new file mode 160000"),
    ],
    "malformed": [
        added("x", "new file mode 104755"),
        "--- a/a.py\n+++ b/a.py\n@@ -1,9 +1,9 @@\n one\n",
        "--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n?one\n",
        "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/last\n@@ -1 +1 @@\n-one\n+x\n",
        "\ud800",
    ],
    "binary": [
        "diff --git a/x b/x\nnew file mode 100644\nGIT binary patch\nliteral 1\n",
        "diff --git a/x b/x\nBinary files a/x and b/x differ\n",
    ],
    "conflict": [
        added("a.py"),
        added("a.py/b"),
        added("pkg"),
        "--- a/gone\n+++ b/gone\n@@ -1 +1 @@\n-one\n+x\n",
    ],
    "size": [
        "x" * (MAX_PATCH_BYTES + 1),
        "".join(added(f"f{n}") for n in range(MAX_CHANGES + 1)),
    ],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused(reason: str) -> None:
    for patch in REFUSED[reason]:
        assert refused(patch) == reason, patch[:200]


def test_a_link_is_no_way_out() -> None:
    linked = OLD | {"out": Entry(b"/etc", "link")}
    assert refused(added("out/passwd"), linked) == "conflict"
    assert refused("--- a/out\n+++ b/out\n@@ -1 +1 @@\n-/etc\n+/\n", linked) == "conflict"


SOURCE = ["src/a.py", "contest.py", "attest.py", "latest/x.py", "a/testable.py", "README.md"]
PROTECTED = CASES["protected"]


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


@pytest.mark.parametrize("sample", sample_tasks(), ids=lambda sample: sample.name)
def test_no_answer_of_the_sample_stays_in_its_tests(sample: SampleTask) -> None:
    ids = sample.task().hidden["fail_to_pass"] + sample.task().hidden["pass_to_pass"]
    for path, source in sample.hidden.items():
        names = [name.partition("::")[2] for name in ids if name.startswith(path)]
        veiled = veil(source, "told", names, exact=True)
        assert "assert" not in veiled.source
        assert all(veiled.certain[name] for name in names)


def test_what_is_asserted_by_itself_must_be_true_or_false() -> None:
    source = "def test_a():\n    assert f(1)\n    assert not f(2)\n    assert f(3) in (4, 5)\n"
    veiled = veil(source, "told", ["test_a"], exact=True)
    assert [(one.operator, one.literal) for one in veiled.answers.values() if one] == [
        ("is", True), ("is", False), ("in", (4, 5)),
    ]  # fmt: skip
    assert veil(source, "told", ["test_a"]).source.count("assert f(1)\n    assert not f(2)") == 1


@pytest.mark.parametrize(
    ("operator", "literal", "right", "wrong"),
    [
        ("==", 1, 1, [True, 1.0, "1", None]),
        ("==", [1, (2,)], [1, (2,)], [[1, [2]], [True, (2,)], (1, (2,))]),
        ("is", True, True, [1, "True", None]),
        ("<=", 5, 5, [6, "1", None, False]),
        ("in", (1, 2), 2, [3, True]),
        ("!=", 1, 1.0, [1]),
        ("is not", True, 1, [True]),
        ("contains", 3, [1, 3], [[1], 3]),
    ],
)
def test_answers_are_of_exact_types(
    operator: str, literal: Any, right: Any, wrong: list[Any]
) -> None:
    answer = Answer(operator, literal, exact=True)
    assert answer.accepts(right)
    assert [value for value in wrong if answer.accepts(value)] == []


FILES, HIDDEN = CASES["files"], CASES["hidden"]
GOLD = FILES["shop/things.py"].replace("x * STEP + 1", "x * STEP")
NAMES = [
    *(f"test_stacked[{y}-{2 * y}-{x}]" for y in (1, 2) for x in (1, 2)),
    *(f"test_rows[{name}]" for name in ("1-2", "a-aa", "y2-wanted2", "0.5-1.0")),
    "test_named[one]", "test_named[two]", "test_loops", "test_constants",
    "test_fixture[3]", "test_fixture[5]", "test_package", "test_classes", "test_errors",
    "TestAll::test_methods", "TestLater::test_later",
]  # fmt: skip
OWN_SOURCE = (
    "import inspect\nfrom shop.things import double\n\ndef test_source():\n"
    "    assert 'def test_source' in inspect.getsource(test_source)\n    assert double(1) == 2\n"
)


def patch(source: str) -> str:
    return make_patch(tree_of(FILES), tree_of({**FILES, "shop/things.py": source}))


def public_task(tests: dict[str, str], *names: str, **hidden: Any) -> Task:
    lists = {"fail_to_pass": [f"tests/test_things.py::{name}" for name in names]}
    rest = {"tests": tests, "pass_to_pass": [], "patch": patch(GOLD)}
    return Task("a", {"problem": "?", "files": FILES}, {**lists, **rest, **hidden})


@pytest.mark.asyncio(loop_scope="module")
async def test_what_ordinary_tests_use_still_works(rooms: Sandboxes) -> None:
    swe = swe_of(rooms)
    task = public_task(HIDDEN, *NAMES, plain=False)
    for source, paid in ((GOLD, 1.0), (GOLD.replace("STEP = 2", "STEP = 3"), 0.0)):
        score = await swe.score(task, result_of(patch(source)))
        assert (score.reward, score.metrics["fail_to_pass"]) == (paid, paid)
    # Tests that need their own source are run from files.
    task = public_task({"tests/test_things.py": OWN_SOURCE}, "test_source")
    for source, paid in ((GOLD, 1.0), (FILES["shop/things.py"] + "\n", 0.0)):
        score = await swe.score(task, result_of(patch(source)))
        assert (score.reward, score.metrics["tests_plain"]) == (paid, 1.0)


def test_answers_leave_the_source_line_by_line() -> None:
    found = veil(CASES["veiled"]["source"], "S", ["test_rows[1-one]"], 10)
    assert found.source == CASES["veiled"]["becomes"]
    assert found.renamed["test_rows[2-two]"] == "test_rows[row1]"
    assert found.certain["test_rows[row1]"] == {11}
    assert found.certain["TestNames::test_all"] == {12, 13, 14, 15, 17, 18, 19, 20}
    assert found.answers[11] == Answer("==", "two")
    assert found.answers[17] is None


@pytest.mark.parametrize("literal", [3, 0, True, None, 1.5, "a b", "", b"x", [1, "a"], {"a": 1}])
def test_an_object_that_does_not_know_the_answer_is_found_by_its_decoys(literal: Any) -> None:
    class Anything:
        def __eq__(self, other: object) -> bool:
            return type(other) is type(literal)

    class Same:
        def __eq__(self, other: object) -> bool:
            return type(other) is type(literal) and other == literal

    answer = Answer("==", literal)
    candidates = answer.candidates()
    for value, accepted in ((Anything(), literal is None), (Same(), True)):
        said = comparisons("==", value, candidates)
        assert answer.accepts_comparisons(candidates, said) is accepted
        equal = equality(trusted=classes_before, spaces=[], below=secrets.randbelow)
        assert equal([value], [literal]) is accepted
        assert equal(literal, value) is accepted


classes_before = classes_now()
