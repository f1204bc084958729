"""The reward of a patch: pristine tree, patch, hidden tests, one run in a fresh sandbox.

A program in the sandbox can only fail. A test counts as passed only if a sealed report says so, its
reported values are the expected ones, the tests with random names that must pass and fail did so,
and pytest ended as it must. SandboxError says nothing about the patch.
"""

from __future__ import annotations

import ast
import hashlib
import hmac
import json
import secrets
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from envserver_environments.code.values import BadValue, read_json, read_value
from envserver_environments.demonstrations import table_beside

from envserver import ExecResult, SandboxError, Sandboxes, SandboxLimits, SandboxSpec

from .expected import Answer
from .patches import PatchError, apply_changes, read_patch, split_protected
from .repositories import ImageRules
from .trees import Entry, Tree, tar_of
from .tripwires import FRAUD, added_suspicions
from .veiling import veil

HARNESS, JUDGING = (
    (Path(__file__).parent / name).read_text(encoding="utf-8")
    for name in ("harness.py", "judging.py")
)
_INI = b"[pytest]\n"
_HELD = table_beside(__file__)
_MOST_TEXT = 2 << 20
"""Characters of test files that are sent to the harness; longer ones are run as they are."""
_MOST_QUESTIONS = 3 << 20
"""Characters of all candidates of a task's answers."""
_FAILED_TESTS = 1
"""pytest's exit status for failed tests; some sentinel tests always fail."""
_OURS = frozenset({"lost", "cancelled"})


class HiddenTests(msgspec.Struct, frozen=True, rename={"files": "tests", "gold": "patch"}):
    """The tests that measure a patch, as a task's hidden part has them.

    Args:
        files: test files that are put into the repository, by path.
        fail_to_pass, pass_to_pass: ids of pytest, such as `tests/test_a.py::test_b`.
        hoisted: all answers are literals, and types count; else the repository's own conftest
            files are loaded, too.
        plain: the tests are run as they are, from files; else what answers can be are taken out.
        compared: numbers of the assertions in which objects of other than built-in types may
            decide, since the gold patch's values are such; None: unknown, all may.
        protected: patterns of more files whose changes do not count.
    """

    files: dict[str, str]
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    gold: str
    hoisted: bool = False
    plain: bool = False
    compared: frozenset[int] | None = None
    plugins: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    protected: tuple[str, ...] = ()

    @property
    def ids(self) -> list[str]:
        return [*self.fail_to_pass, *self.pass_to_pass]

    @property
    def paths(self) -> frozenset[str]:
        """Files that tests are in; changes of them do not count."""
        return frozenset(self.files) | {name.split("::")[0] for name in self.ids}


@dataclass
class Verdict:
    """The outcome of grading a patch."""

    solved: bool = False  # every test of both lists passed, and nothing was tampered with
    passed: frozenset[str] = frozenset()  # ids
    refused: str = ""  # why it was not tried: see PatchError, and "empty", "fraud"
    tampered: str = ""  # what was wrong with the run: "exit", "sentinels", "seal", "order"
    changed: int = 0
    dropped: int = 0  # changes that do not count
    suspicions: Counter[str] = field(default_factory=Counter)
    killed_by: str = ""  # the limit that ended the tests
    seconds: float = 0.0
    plain: bool = False  # the tests had their answers beside the code
    compared: frozenset[int] = frozenset()  # see HiddenTests; those of the passed tests


@dataclass(frozen=True)
class Container:
    """The image in which tests run, if they need one."""

    image: str
    rules: ImageRules
    built: Tree  # files beside the repository that its tests need
    python: str  # the image's, with pytest and the dependencies


async def grade(
    tree: Tree,
    patch: str,
    tests: HiddenTests,
    sandboxes: Sandboxes,
    limits: SandboxLimits,
    container: Container | None = None,
) -> Verdict:
    verdict = Verdict()
    try:
        kept, dropped = split_protected(read_patch(patch), tests.paths, tests.protected)
        verdict.changed, verdict.dropped = len(kept), len(dropped)
        if not kept:
            verdict.refused = "empty"
            return verdict
        patched = apply_changes(tree, kept)
    except PatchError as error:
        verdict.refused = error.reason
        return verdict
    verdict.suspicions = added_suspicions(tree, patched)
    if verdict.suspicions.keys() & FRAUD - added_suspicions(tree, _solved(tree, tests)).keys():
        verdict.refused = "fraud"
        return verdict
    run = _Run(tests, tree)
    verdict.plain = run.plain
    result = await _run_tests(run, patched, sandboxes, limits, container)
    verdict.killed_by = result.killed_by
    verdict.seconds = result.usage.wall_seconds
    verdict.tampered, verdict.passed = run.read(result)
    verdict.compared = run.compared
    clean = not (verdict.tampered or result.killed_by or result.truncated)
    verdict.solved = clean and verdict.passed >= set(tests.ids)
    if verdict.solved and run.replaced:
        golds = _Run(tests, tree)
        golds.read(await _run_tests(golds, _solved(tree, tests), sandboxes, limits, container))
        if replaced := run.replaced - golds.replaced:
            verdict.suspicions["replacing"] += len(replaced)
            verdict.refused, verdict.solved = "fraud", False
    return verdict


def _solved(tree: Tree, tests: HiddenTests) -> Tree:
    changes = split_protected(read_patch(tests.gold), tests.paths, tests.protected)[0]
    return apply_changes(tree, changes)


async def _run_tests(
    run: _Run,
    patched: Tree,
    sandboxes: Sandboxes,
    limits: SandboxLimits,
    container: Container | None,
) -> ExecResult:
    if container is None:
        preload = tuple(_HELD["preload"])
        spec = SandboxSpec(archive=run.archive(patched), preload=preload, limits=limits)
    else:
        spec = SandboxSpec(archive=run.archive({**container.built, **patched}), limits=limits)
        spec = container.rules.spec(spec, container.image, for_agent=False)
    request, place = run.request(), "/work/grade"
    async with sandboxes.open(spec) as sandbox:
        if container is None:
            result = await sandbox.run_python(HARNESS, stdin=request, cwd=place)
        else:
            words = [container.python, "-I", "-c", HARNESS]
            result = await sandbox.exec(words, stdin=request, cwd=place)
    if result.killed_by in _OURS:
        raise SandboxError(f"The sandbox of the tests was {result.killed_by}.")
    if not run.began(result):
        said = result.stderr[-500:].decode("utf-8", "replace")
        raise SandboxError(f"pytest could not be started in the sandbox: {said}")
    return result


class _Run:
    """One run of the tests: its secrets, the sandbox's input, and its output."""

    def __init__(self, tests: HiddenTests, tree: Tree) -> None:
        self._tests, self._tree = tests, tree
        self._key = secrets.token_bytes(32)
        self._seen = f"seen_{secrets.token_hex(8)}"
        self._sentinels = {f"test_{secrets.token_hex(8)}": place % 2 == 0 for place in range(8)}
        # Of tests whose answers are all literals, nothing is compared in the sandbox.
        comparable = frozenset[int]() if tests.hoisted else tests.compared
        self._veiled = _Veiled(comparable, exact=tests.hoisted)
        size = sum(map(len, tests.files.values()))
        self.plain = tests.plain or size > _MOST_TEXT
        self._sources = {} if self.plain else self._without_answers()
        names = [*(self._veiled.renamed.get(name, name) for name in tests.ids), *self._sentinels]
        order = secrets.SystemRandom().sample(range(len(names)), len(names))
        self._numbers = dict(zip(names, order, strict=True))
        self.replaced: frozenset[str] = frozenset()
        """Functions and classes of others, by their full name, that were replaced meanwhile."""

    @property
    def compared(self) -> frozenset[int]:
        return frozenset(self._veiled.compared)

    def _without_answers(self) -> dict[str, str]:
        """The Python files of the tests, by path; their answers are kept here."""
        sources = {path: text for path, text in self._tests.files.items() if path.endswith(".py")}
        for path in dict.fromkeys(name.partition("::")[0] for name in self._tests.ids):
            entry = self._tree.get(path)
            if path not in sources and entry is not None:
                sources[path] = entry.data.decode("utf-8", "replace")
        veiled = self._veiled
        return {
            path: veiled.add(path, s, self._seen, self._tests.ids) for path, s in sources.items()
        }

    def archive(self, patched: Tree) -> bytes:
        """The patched tree with the hidden tests (those that are sent in `request` are empty files
        here), and the harness's folder beside it."""
        files = {**self._tests.files, **dict.fromkeys(self._sources, "")}
        whole = {f"repo/{p}": e for p, e in patched.items() if p not in self._tests.deleted}
        whole |= {f"repo/{path}": Entry(text.encode()) for path, text in files.items()}
        names = list(self._sentinels)
        half = len(names) // 2
        whole["grade/pytest.ini"] = Entry(_INI)
        whole[f"grade/{names[0]}.py"] = self._sentinel_file(names[:half])
        whole[f"grade/{names[-1]}.py"] = self._sentinel_file(names[half:])
        return tar_of(whole)

    def _sentinel_file(self, names: list[str]) -> Entry:
        """Half of the tests are functions, half methods that assert as unittest does."""
        lines = ["import unittest"]
        for place, name in enumerate(names):
            number = secrets.randbelow(1000) * 2 + self._sentinels[name]
            if place // 2 % 2:
                lines.append(
                    f"class Test{place}(unittest.TestCase):\n"
                    f"    def {name}(self):\n        self.assertEqual({number} % 2, 1)"
                )
            else:
                lines.append(f"def {name}():\n    assert {number} % 2")
        return Entry("\n\n\n".join(lines).encode())

    def request(self) -> bytes:
        names = list(self._sentinels)
        confined = "." if self._tests.hoisted else "../repo"
        conftests = ["--noconftest"] if self._tests.hoisted else []
        questions = self._veiled.questions.items()
        own = _own_packages([*self._tree, *self._sources])
        return json.dumps(
            {
                "key": self._key.hex(),
                "seen": self._seen,
                "veiled": not self.plain,
                "exact": self._tests.hoisted,
                "judging": JUDGING,
                "sources": self._sources,
                "answers": {n: self._encrypted(n, question) for n, question in questions},
                "numbers": self._numbers,
                "root": "../repo",
                "own": sorted(own),
                "imports": _imports([*self._tests.files.values(), *self._sources.values()], own),
                "files": list(dict.fromkeys(id_.split("::")[0] for id_ in self._tests.ids)),
                "sentinels": [f"{names[0]}.py", f"{names[-1]}.py"],
                "plugins": list(self._tests.plugins),
                "arguments": [*_HELD["arguments"], f"--confcutdir={confined}", *conftests],
            }
        ).encode()

    def _encrypted(self, number: int, question: str) -> str:
        data = question.encode()
        seed = hmac.digest(self._key, b"answer %d" % number, "sha256")
        stream = hashlib.shake_256(seed).digest(len(data))
        return (
            (int.from_bytes(data, "big") ^ int.from_bytes(stream, "big"))
            .to_bytes(len(data), "big")
            .hex()
        )

    def began(self, result: ExecResult) -> bool:
        """Returns whether pytest started, before any code of the repository could run."""
        first = self._opened(result.stdout.partition(b"\n")[0])
        return first is not None and first[2] == "ready"

    def read(self, result: ExecResult) -> tuple[str, frozenset[str]]:
        """Returns what was wrong with the run ("" if nothing), and the ids of the passed tests."""
        names = {number: name for name, number in self._numbers.items()}
        shown = {new: name for name, new in self._veiled.renamed.items()}
        passed: set[str] = set()
        failed: set[str] = set()
        expected, ended, wrong = 1, False, ""
        for line in result.stdout.splitlines():
            record = self._opened(line)
            if record is None:
                wrong = wrong or "seal"
                continue
            place, number, status, values = record
            if place != expected or ended:
                wrong = wrong or "order"
            expected += 1
            if status == "end":
                ended, self.replaced = True, frozenset(values.split())
            name = names.get(number)
            if name is not None:
                good = status == "passed" and (self.plain or self._veiled.accepts(name, values))
                (passed if good else failed).add(shown.get(name, name))
        cut_off = bool(result.killed_by) or result.truncated  # a limit is not tampering
        for name, must_pass in self._sentinels.items():
            if not cut_off and ((name in passed) != must_pass or (name in failed) == must_pass):
                wrong = wrong or "sentinels"
        if not cut_off and (result.exit != _FAILED_TESTS or not ended):
            wrong = wrong or "exit"
        return wrong, frozenset(passed - failed) & frozenset(self._tests.ids)

    def _opened(self, line: bytes) -> tuple[int, int, str, str] | None:
        seal, _, body = line.partition(b" ")
        genuine = hmac.new(self._key, body, hashlib.sha256).hexdigest().encode()
        if not hmac.compare_digest(seal, genuine):
            return None
        place, number, status, values = body.split(b" ", 3)
        return int(place), int(number), status.decode(), values.decode("utf-8", "replace")


class _Veiled:
    """The answers of ordinary tests: see `veiling`. Those not in `comparable` (see
    `HiddenTests.compared`) are not in the sandbox at all."""

    def __init__(self, comparable: frozenset[int] | None, *, exact: bool) -> None:
        self.compared: set[int] = set()
        self._comparable, self._exact = comparable, exact
        self.renamed: dict[str, str] = {}
        self.questions: dict[int, str] = {}
        self._answers: dict[int, Answer | None] = {}
        self._candidates: dict[int, list[Any]] = {}
        self._certain: dict[str, frozenset[int]] = {}
        self._size = 0

    def add(self, path: str, source: str, seen: str, ids: list[str]) -> str:
        inner = [name.partition("::")[2] for name in ids if name.startswith(f"{path}::")]
        tests = veil(source, seen, inner, len(self._answers), exact=self._exact)
        self._answers |= tests.answers
        for number, answer in tests.answers.items():
            is_comparable = answer is not None and (
                self._comparable is None or number in self._comparable
            )
            candidates = answer.candidates() if answer is not None and is_comparable else []
            question = repr((answer.operator if answer else "", candidates))
            if candidates and self._size + len(question) < _MOST_QUESTIONS:
                self._size += len(question)
                self._candidates[number], self.questions[number] = candidates, question
        self._certain |= {f"{path}::{name}": sure for name, sure in tests.certain.items()}
        self.renamed |= {f"{path}::{k}": f"{path}::{name}" for k, name in tests.renamed.items()}
        return tests.source

    def accepts(self, name: str, values: str) -> bool:
        """Returns whether a test reported the right values, and all that it must report."""
        shapes = _shapes(values)
        certain = self._certain.get(name, self._certain.get(name.partition("[")[0], frozenset()))
        numbers = {
            shape[0]
            for shape in shapes
            if isinstance(shape, list) and shape and type(shape[0]) is int
        }
        return numbers >= certain and all(map(self._accepts, shapes))

    def _accepts(self, shape: Any) -> bool:
        match shape:
            case [int(number), "equal" | "objects" as kind, said] if number in self._answers:
                holds = self._answers[number] is None and said is True
                return holds and (kind == "equal" or self._may_compare(number))
            case [int(number), kind, said]:
                answer = self._answers.get(number)
                if answer is None:
                    return False
                if kind == "value":
                    return answer.accepts(_value(said))
                candidates = self._candidates.get(number, [])
                holds = isinstance(said, list) and answer.accepts_comparisons(candidates, said)
                return holds and self._may_compare(number)
        return False

    def _may_compare(self, number: int) -> bool:
        """Returns whether an object of another class may decide an assertion."""
        if self._comparable is not None and number not in self._comparable:
            return False
        self.compared.add(number)
        return True


class _Unreadable:
    """Differs from every value that a test could expect."""


def _shapes(text: str) -> list[Any]:
    try:
        shapes = read_json(text)
    except BadValue:
        return [_Unreadable]
    return shapes if isinstance(shapes, list) else [_Unreadable]


def _value(shape: Any) -> Any:
    try:
        return read_value(shape)
    except BadValue:
        return _Unreadable()


def _imports(sources: Iterable[str], own: set[str]) -> list[str]:
    """Returns what test modules import and the repository does not have; some are not modules."""
    names: set[str] = set()
    for source in sources:
        with suppress(SyntaxError, ValueError):  # of data, or it will not run
            for node in ast.walk(ast.parse(source)):
                match node:
                    case ast.Import(names=items):
                        names |= {item.name for item in items}
                    case ast.ImportFrom(module=str(module), names=items, level=0):
                        names |= {module, *(f"{module}.{item.name}" for item in items)}
    return sorted(name for name in names if name.partition(".")[0] not in own)


def _own_packages(paths: Iterable[str]) -> set[str]:
    tops = {path.removeprefix("src/").split("/")[0] for path in paths if path.endswith(".py")}
    return {top.removesuffix(".py") for top in tops}
