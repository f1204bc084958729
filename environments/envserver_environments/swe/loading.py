"""Rows of SWE-bench, SWE-Gym, SWE-smith and R2E-Gym as tasks, with repositories of a local mirror
(`owner__name`, `owner__name.git`, or only the name). The formats differ in what is the problem and
what the solution:

    SWE-bench, SWE-Gym   base_commit; patch solves it; test_patch adds the tests
    SWE-smith            patch creates the problem; repo ends with the commit (owner__name.1a2b3c4d)
    R2E-Gym              commit_hash is the solution, its parent the problem; the row has the tests
    your own             as SWE-bench, but repo_archive (a tar) and hidden_tests (a folder)
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Literal

from envserver_environments.rows import (
    NumberedRow,
    Row,
    decoded,
    last_message,
    missing,
    published,
    roles_of,
    value_at,
)
from envserver_records.tasks import Json

from envserver import InputError, Task

from .patches import PatchError, apply_changes, is_protected, read_patch
from .repositories import SPEC, archived_tree, git, mirror_tree, python_of
from .trees import Entry, Tree, make_patch

# Tasks in folders, without git and without images:
#
#     task.json   the keys of a SWE-bench row, and where the rest is: `repo_archive` (a tar of the
#                 tree), `hidden_tests` (a folder), each below the folder of task.json; optional
#                 are `protected` (patterns of further files whose changes do not count), `wall`
#                 (seconds for the tests), `python` (">=3.10") and `requires` (packages)
#     repo.tar    the repository at its commit
#     hidden/     files that replace the visible ones for grading
#
# Tests are always run by our own pytest; `test_cmd` is not executed.

TASK = "task.json"
FOLDER = "folder"
"""Key of a row, set here: where its task.json was found."""
_MINIMUM = re.compile(r">=\s*(\d+)\.(\d+)")


def task_folders(path: Path) -> list[Path]:
    """Returns the folders of tasks: `path` itself, or those in it; empty if it holds other data."""
    if (path / TASK).is_file():
        return [path]
    return sorted(found.parent for found in path.glob(f"*/{TASK}")) if path.is_dir() else []


def folder_rows(folders: list[Path]) -> Iterator[NumberedRow]:
    for number, folder in enumerate(folders):
        place = str(folder / TASK)
        try:
            row = json.loads((folder / TASK).read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            yield NumberedRow(number, None, place, f"it is not JSON: {error}")
            continue
        good = {**row, FOLDER: str(folder)} if isinstance(row, dict) else None
        yield NumberedRow(number, good, place, "" if good else "it is not a JSON object")


def read_folder(row: Json, folder: Path) -> tuple[str, Tree, Tree]:
    """Returns the path of a task's archive, the tree in it, and the files for grading."""
    _check_needs(row)
    archive = _below(folder, str(row["repo_archive"]))
    place = _below(folder, str(row.get("hidden_tests") or "hidden"))
    tree = archived_tree(str(archive))
    found = sorted(path for path in place.rglob("*") if path.is_file())
    files = {
        path.relative_to(place).as_posix(): Entry(path.read_bytes())
        for path in found
        if "__pycache__" not in path.parts
    }
    if not files:
        raise InputError("Its hidden tests are not there.")
    return str(archive), tree, files


def rules_of(row: Json) -> Json:
    """Returns the task's own rules for grading: `protected` and `seconds`."""
    protected, wall = row.get("protected") or [], row.get("wall")
    if not isinstance(protected, list) or not all(isinstance(part, str) for part in protected):
        raise InputError("Its protected files are not a list of patterns.")
    rules: Json = {"protected": protected}
    if isinstance(wall, int | float) and wall > 0:
        rules["seconds"] = float(wall)
    return rules


def _below(folder: Path, name: str) -> Path:
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise InputError("A file of the task is outside of its folder.")
    return path


def _check_needs(row: Json) -> None:
    minimum = _MINIMUM.search(str(row.get("python") or ""))
    if minimum and sys.version_info[:2] < (int(minimum[1]), int(minimum[2])):
        raise InputError("It needs a newer Python.")
    for wanted in row.get("requires") or ():
        name = re.split(r"[^\w.-]", str(wanted).strip(), maxsplit=1)[0]
        try:
            importlib.metadata.version(name)
        except (importlib.metadata.PackageNotFoundError, ValueError) as error:
            raise InputError("It needs a package that is not here.") from error


ROLES, HUBS = published(__file__)
_REPO = {*ROLES["repo"]}

Layout = Literal["own", "bench", "smith", "r2e"]

_ID = re.compile(r"[^:\s]+\.py::\S.*")
_BARE = re.compile(r"[A-Za-z_]\w*(?:(?:\.|::)\w+)*(?:\[.*\])?")
"""A test without its file, as in rows of sympy: it is in the files of the test patch."""
_BETWEEN_IDS = re.compile(r"[\s,;]+(?=[^:\s]+\.py::)")
_TEST_FILE = re.compile(r"^\+\+\+ b/(\S+)", re.MULTILINE)
_COMMIT = re.compile(r"[0-9a-f]{7,40}")
_SMITH_REPOSITORY = re.compile(r"(?:.*/)?(.+?)\.([0-9a-f]{7,40})")
_HOST = re.compile(r"(?:\w+://|git@)[^/:]+[/:]")
_NEEDED: dict[Layout, tuple[str, ...]] = {
    "own": ("patch", "FAIL_TO_PASS"),
    "bench": ("repo", "base_commit", "patch", "test_patch", "FAIL_TO_PASS"),
    "smith": ("repo", "patch", "FAIL_TO_PASS"),
    "r2e": ("repo", "commit_hash"),
}
"""Roles of each layout, besides `problem_statement`."""
_MOST_BYTES = SPEC.limits.disk_mb * 2**20 // 4


def named(row: Row, columns: Mapping[str, str]) -> Row:
    """The row with the names of SWE-bench, as far as it has such values."""
    row = _unwrapped(row)
    roles = roles_of(row, ROLES, columns)
    if "problem_statement" in roles:
        roles["problem_statement"] = last_message(roles["problem_statement"])
    return {name: value_at(row, name) for name in row} | roles


def read_row(
    row: Row,
    task_id: str,
    mirror: Path | None,
    plugins: tuple[str, ...] = (),
    in_image: tuple[str, Tree] | None = None,
) -> Task:
    """`in_image`: an image, and the repository's files in it, instead of a mirror."""
    layout = _layout(row)
    in_mirror = ("repo", "base_commit") if in_image is not None else ()
    needed = ["problem_statement", *(role for role in _NEEDED[layout] if role not in in_mirror)]
    if lacking := [role for role in needed if not row.get(role)]:
        raise missing(row, lacking)
    for field in ("FAIL_TO_PASS", "PASS_TO_PASS"):  # before its repository is looked for
        _names(row, field)
    if row.get(FOLDER):
        mirror = Path(str(row[FOLDER]))
    if in_image is not None:
        task = _from_image(row, layout, task_id, *in_image)
    elif mirror is None:
        raise InputError("There is no mirror with its repository (--env.mirror).")
    else:
        make = {"own": _local, "r2e": _r2e}.get(layout, _mirrored)
        task = make(row, task_id, mirror)
    task.public["problem"] = str(row["problem_statement"]).strip()
    task.hidden["plugins"] = list(plugins)
    return task


def _unwrapped(row: Row) -> Row:
    """The row, with the fields of the object in it that names a repository, if it names none."""
    for value in () if _REPO & row.keys() else row.values():
        inner = decoded(value)
        if isinstance(inner, Mapping) and _REPO & (inner := _unwrapped(dict(inner))).keys():
            return {**row, **inner}
    return row


def _layout(row: Row) -> Layout:
    if row.get("repo_archive"):
        return "own"
    if row.get("expected_output_json") and not row.get("test_patch"):
        return "r2e"
    is_smith = _SMITH_REPOSITORY.fullmatch(str(row.get("repo"))) and not row.get("test_patch")
    return "smith" if is_smith else "bench"


def _from_image(row: Row, layout: Layout, task_id: str, image: str, tree: Tree) -> Task:
    if len(tree) * 2 > SPEC.limits.inodes // 2:
        raise InputError("Its repository has too many files.")
    if layout == "r2e":
        raise InputError("Images of R2E-Gym hold their Python in the repository: use a mirror.")
    make = _smith if layout == "smith" else _bench
    task = make(row, task_id, tree, {"image": image})
    task.hidden["python"] = python_of(row)
    return task


def _mirrored(row: Row, task_id: str, mirror: Path) -> Task:
    name, commit, make = str(row["repo"]), row.get("base_commit"), _bench
    if _layout(row) == "smith":
        name, own = _SMITH_REPOSITORY.findall(name)[0]
        commit, make = commit or own, _smith
    repository = _repository(mirror, name)
    commit = _commit(repository, str(commit))
    public = {"mirror": str(repository), "commit": commit}
    return make(row, task_id, _tree(repository, commit), public)


def _bench(row: Row, task_id: str, tree: Tree, public: Json) -> Task:
    tested = _applied(tree, str(row["test_patch"]), "test patch")
    _applied(tree, str(row["patch"]), "gold patch")
    hidden = _tests_of(row, tested) | {
        "tests": _texts({p: e for p, e in tested.items() if tree.get(p) != e}),
        "deleted": [path for path in tree if path not in tested],
    }
    return Task(task_id, public, hidden)


def _local(row: Json, task_id: str, folder: Path) -> Task:
    """A task in files: a tar of the repository, and a folder with its hidden tests."""
    archive, tree, files = read_folder(row, folder)
    _applied(_bounded(tree), str(row["patch"]), "gold patch")
    hidden = _tests_of(row, tree | files) | {"tests": _texts(files), **rules_of(row)}
    return Task(task_id, {"archive": archive}, hidden)


def _smith(row: Row, task_id: str, tree: Tree, public: Json) -> Task:
    bug = str(row["patch"])
    broken = _applied(tree, bug, "patch")
    hidden = _tests_of(row, tree)
    # The tests that show the bug are taken away from the agent, and come back for grading.
    shown = sorted({name.split("::")[0] for name in hidden["fail_to_pass"]})
    hidden["tests"] = _texts({path: tree[path] for path in shown})
    hidden["patch"] = make_patch(broken, tree)
    return Task(task_id, {**public, "bug": bug, "removed": shown}, hidden)


def _r2e(row: Json, task_id: str, mirror: Path) -> Task:
    repository = _repository(mirror, str(row["repo"]))
    solved = _commit(repository, str(row["commit_hash"]))
    content = _object(row.get("parsed_commit_content"))
    commit = _commit(repository, str(content.get("old_commit_hash") or f"{solved}^"))
    tests = _r2e_tests(_object(row.get("execution_result_content")))
    names = [
        str(name).split(" - ")[0]
        for name, status in _object(row["expected_output_json"]).items()
        if status == "PASSED"
    ]
    before, after = _tree(repository, commit), _tree(repository, solved)
    code = {p: e for p, e in after.items() if not is_protected(p)}
    kept = {p: e for p, e in before.items() if is_protected(p)}
    try:
        gold = make_patch(before, {**kept, **code})
    except UnicodeDecodeError as error:
        raise InputError("The solution changes binary files.") from error
    hidden = {
        "tests": tests,
        "fail_to_pass": [place for name in names for place in _located(name, tests)],
        "pass_to_pass": [],
        "patch": gold,
    }
    if not names:
        raise InputError("No test is expected to pass.")
    return Task(task_id, {"mirror": str(repository), "commit": commit}, hidden)


def _r2e_tests(content: Json) -> dict[str, str]:
    names, codes = content.get("test_file_names"), content.get("test_file_codes")
    if not isinstance(names, list) or not isinstance(codes, list) or len(names) != len(codes):
        raise InputError("The row has no test files.")
    return {f"r2e_tests/{Path(str(n)).name}": str(c) for n, c in zip(names, codes, strict=True)}


def _located(name: str, tests: Mapping[str, str]) -> list[str]:
    """The ids of a test that the row calls `Class.test[parameters]`, in each file that has it."""
    head, bracket, parameters = name.partition("[")
    parts = re.split(r"\.|::", head)
    paths = [path for path, source in tests.items() if parts[0] in _defined(source)]
    if not paths:
        raise InputError("A test that should pass is not in the row's files.")
    return ["::".join([path, *parts]) + bracket + parameters for path in paths]


@lru_cache(maxsize=32)
def _defined(source: str) -> frozenset[str]:
    try:
        return frozenset(getattr(node, "name", "") for node in ast.parse(source).body)
    except SyntaxError as error:
        raise InputError("A test file of the row is not Python.") from error


def _object(value: object) -> Json:
    value = decoded(value)
    return value if isinstance(value, dict) else {}


def _names(row: Row, field: str) -> list[str]:
    value = decoded(row.get(field) or [])
    if isinstance(value, str):
        value = _BETWEEN_IDS.split(value.strip())
    if not isinstance(value, list):
        raise InputError(f"{field} is not a list.")
    files = _TEST_FILE.findall(str(row.get("test_patch")))
    is_python = any(file.endswith(".py") for file in files)
    if not all(
        isinstance(name, str) and (_ID.fullmatch(name) or (is_python and _BARE.fullmatch(name)))
        for name in value
    ):
        if files and not is_python:
            raise InputError("Its tests are not Python; only tests of pytest run here.")
        raise InputError("Its tests have no ids of pytest.")
    return list(dict.fromkeys(value))


def _ids(row: Row, field: str, tree: Tree) -> list[str]:
    paths = _TEST_FILE.findall(str(row.get("test_patch")))
    files = {path: tree[path] for path in paths if path.endswith(".py") and path in tree}
    sources = _texts(files)
    ids = [
        place
        for name in _names(row, field)
        for place in ([name] if _ID.fullmatch(name) else _located(name, sources))
    ]
    if any(name.split("::")[0] not in tree for name in ids):
        raise InputError("A file of its tests is not there.")
    if field == "FAIL_TO_PASS" and not ids:
        raise InputError("FAIL_TO_PASS is empty.")
    return ids


def _tests_of(row: Row, tree: Tree) -> Json:
    """The ids of a row's tests, which are in `tree`, and its gold patch."""
    return {
        "fail_to_pass": _ids(row, "FAIL_TO_PASS", tree),
        "pass_to_pass": _ids(row, "PASS_TO_PASS", tree),
        "patch": str(row["patch"]),
    }


def _repository(mirror: Path, name: str) -> Path:
    flat = _HOST.sub("", name).removesuffix(".git").removeprefix("swesmith/").replace("/", "__")
    for candidate in (flat, f"{flat}.git", flat.split("__")[-1], f"{flat.split('__')[-1]}.git"):
        if re.fullmatch(r"[\w.-]+", candidate) and (mirror / candidate).is_dir():
            return (mirror / candidate).resolve()
    found = sorted(mirror.glob(f"*__{re.sub(r'[^A-Za-z0-9_.-]', '', flat)}"))
    if len(found) == 1:
        return found[0].resolve()
    raise InputError("Its repository is not in the mirror.")


def _commit(repository: Path, name: str) -> str:
    if not _COMMIT.fullmatch(name.removesuffix("^")):
        raise InputError("Its commit is not named by an id.")
    try:
        said = git(str(repository), "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    except InputError as error:
        raise InputError("Its commit is not in the mirror.") from error
    return said.decode().strip()


def _tree(repository: Path, commit: str) -> Tree:
    return _bounded(mirror_tree(str(repository), commit))


def _bounded(tree: Tree) -> Tree:
    if sum(len(entry.data) for entry in tree.values()) > _MOST_BYTES:
        raise InputError("Its repository is too large.")
    if len(tree) * 2 > SPEC.limits.inodes // 2:
        raise InputError("Its repository has too many files.")
    return tree


def _applied(tree: Tree, patch: str, what: str) -> Tree:
    try:
        return apply_changes(tree, read_patch(patch))
    except PatchError as error:
        raise InputError(f"Its {what} cannot be applied ({error.reason}).") from error


def _texts(tree: Tree) -> dict[str, str]:
    try:
        return {path: entry.data.decode() for path, entry in sorted(tree.items())}
    except UnicodeDecodeError as error:
        raise InputError("A test file is not text.") from error
