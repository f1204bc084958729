"""`swe` from elsewhere: rows of public data sets with a mirror of their repositories, rows whose
repositories are only in the images of containers (the engine is a stand-in), and task folders."""

import asyncio
import io
import json
import subprocess
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import msgspec
import numpy as np
import pytest
from envserver_environments.swe.env import Swe
from envserver_environments.swe.known import PROGRAMS, result_of
from envserver_environments.swe.trees import make_patch, tree_of
from envserver_environments.swe.tripwires import FRAUD, added_suspicions
from envserver_records.errors import SandboxUnavailable
from envserver_records.tasks import Json
from support import fake_engine
from support.cases import cases_of, write_jsonl
from support.scripted_run import ScriptedRun, says
from support.serving import attempt_spec
from support.swe_scripts import SUBMIT, answers, attempt, bash, rewards, swe_of

from envserver import ConfigError, InputError, SandboxConfig, Sandboxes, SandboxSpec, Task
from envserver.proxy.attempts import ProxyAttempt
from envserver.sandbox import service
from envserver.sandbox.attempt_sandboxes import AttemptSandboxes
from envserver.sandbox.opening import WatchedSandboxes
from envserver.sandbox.requests import Open
from envserver.sandbox.service import SandboxService

CASES = cases_of(__file__)
IMAGE = fake_engine.WITH_REPOSITORY
WRONG = "def double(x):\n    return x + 3\n\n\ndef one():\n    return 1\n"
RIGHT = WRONG.replace("x + 3", "x + x")
FILES = {
    "tool/__init__.py": "",
    "tool/core.py": WRONG,
    "tests/test_core.py": "from tool.core import one\n\ndef test_one():\n    assert one() == 1\n",
    "setup.py": "raise SystemExit('never run')\n",
}
FIX = (
    "diff --git a/tool/core.py b/tool/core.py\n--- a/tool/core.py\n+++ b/tool/core.py\n"
    "@@ -1,2 +1,2 @@\n def double(x):\n-    return x + 3\n+    return x + x\n"
)
BREAK = FIX.replace("-    return x + 3\n+    return x + x", "-    return x + x\n+    return x + 3")
TEST_PATCH = (
    "diff --git a/tests/test_core.py b/tests/test_core.py\n"
    "--- a/tests/test_core.py\n+++ b/tests/test_core.py\n@@ -1,4 +1,7 @@\n"
    "-from tool.core import one\n+from tool.core import double, one\n \n def test_one():\n"
    "     assert one() == 1\n+\n+def test_double():\n+    assert double(7) == 14\n"
)
NEW_TESTS = (
    "from tool.core import double\n\nclass TestDouble:\n    def test_seven(self):\n"
    "        assert double(7) == 14\n"
)


def git(place: Path, *words: str) -> str:
    names = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    command = ["git", "-C", str(place), *names, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(place: Path, files: dict[str, str], message: str) -> str:
    for path, text in files.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text)
    git(place, "init", "-q")
    git(place, "add", "-A")
    git(place, "commit", "-qm", message)
    return git(place, "rev-parse", "HEAD")


def write_rows(path: Path, *rows: Json) -> Path:
    return write_jsonl(path, rows)


def bench_row(**changes: Any) -> Json:
    return {
        "instance_id": "acme__tool-1", "repo": "acme/tool", "base_commit": "0" * 40,
        "patch": FIX, "test_patch": TEST_PATCH, "problem_statement": "double(7) is 10.",
        "FAIL_TO_PASS": json.dumps(["tests/test_core.py::test_double"]),
        "PASS_TO_PASS": ["tests/test_core.py::test_one"], **changes,
    }  # fmt: skip


class Mirror:
    """One repository with two commits: `double` is wrong in the first."""

    def __init__(self, folder: Path) -> None:
        self.path, self.place = folder, folder / "acme__tool"
        self.wrong = commit(self.place, FILES, "commit 0")
        self.right = commit(self.place, {**FILES, "tool/core.py": RIGHT}, "commit 1")

    def bench(self, **changes: Any) -> Json:
        return bench_row(base_commit=self.wrong, **changes)

    def smith(self, **changes: Any) -> Json:
        return {
            "repo": f"swesmith/acme__tool.{self.wrong[:8]}", "image_name": "i",
            "patch": FIX, "problem_statement": "one() is 2",
            "FAIL_TO_PASS": ["tests/test_core.py::test_one"], "PASS_TO_PASS": [], **changes,
        }  # fmt: skip

    def r2e(self, **changes: Any) -> Json:
        content = {"test_file_names": ["test_1.py"], "test_file_codes": [NEW_TESTS]}
        return {
            "repo_name": "tool", "docker_image": "i", "commit_hash": self.right,
            "problem_statement": "[ISSUE] double(7) is 10 [/ISSUE]",
            "execution_result_content": json.dumps(content), "parsed_commit_content": "{}",
            "expected_output_json": json.dumps({"TestDouble.test_seven": "PASSED"}), **changes,
        }  # fmt: skip


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Mirror:
    return Mirror(tmp_path_factory.mktemp("mirror"))


@pytest.mark.asyncio(loop_scope="module")
async def test_rows_of_public_data_sets(rooms: Sandboxes, mirror: Mirror) -> None:
    swe = swe_of(rooms, mirror=mirror.path)
    task = swe.task_from_row(mirror.bench())
    assert await rewards(swe, task, FIX, "", TEST_PATCH) == [1.0, 0.0, 0.0]
    assert set(task.public) == {"mirror", "commit", "problem"}
    look = bash("git log --oneline --all; cat tests/test_core.py")
    _, run = await attempt(rooms, "bash", look, SUBMIT, **task.public)
    assert "test_double" not in answers(run)[0]
    assert answers(run)[0].count("The repository") == 1
    # Rows of sympy name tests without the file: they are in those of the test patch.
    bare = swe.task_from_row(
        mirror.bench(FAIL_TO_PASS='["test_double"]', PASS_TO_PASS=["test_one"])
    )
    assert bare.hidden == task.hidden
    # In SWE-smith the patch is the bug; the tests that show it are taken away from the agent.
    bug = FIX[: FIX.index("@@")] + "@@ -5,2 +5,2 @@\n def one():\n-    return 1\n+    return 2\n"
    task = swe.task_from_row(mirror.smith(patch=bug))
    gold = task.hidden["patch"]
    assert "+    return 1" in gold and task.public["removed"] == ["tests/test_core.py"]
    assert await rewards(swe, task, gold, "", bug) == [1.0, 0.0, 0.0]
    # In R2E-Gym the commit is the repair.
    task = swe.task_from_row(mirror.r2e())
    assert task.public["commit"] == mirror.wrong
    assert await rewards(swe, task, task.hidden["patch"], FIX, "") == [1.0, 1.0, 0.0]


@pytest.mark.asyncio(loop_scope="module")
async def test_rows_that_cannot_be_run_are_counted(
    rooms: Sandboxes, mirror: Mirror, tmp_path: Path
) -> None:
    bad: Json = {
        "Its repository is not in the mirror.": mirror.bench(repo="acme/other"),
        "Its commit is not in the mirror.": bench_row(),
        "Its commit is not named by an id.": bench_row(base_commit="--upload-pack=x"),
        "Its gold patch cannot be applied (conflict).": mirror.bench(patch=BREAK),
        "Its tests have no ids of pytest.": mirror.bench(FAIL_TO_PASS='["test_double (t.T)"]'),
        "Its tests are not Python; only tests of pytest run here.": bench_row(
            repo="chartjs/Chart.js",
            image_assets={"problem_statement": ["https://example.org/a.png"]},
            test_patch=TEST_PATCH.replace(".py", ".spec.js"),
            FAIL_TO_PASS=["Chart should draw lines"],
        ),
        "A test that should pass is not in the row's files.": mirror.bench(
            FAIL_TO_PASS=["test_other"]
        ),
        "the gold patch does not pass its tests": mirror.bench(
            FAIL_TO_PASS=["tests/test_core.py::test_x"]
        ),
        "No known field of the row has its base_commit or patch or test_patch or FAIL_TO_PASS"
        " (its fields: problem_statement, issue, repo)": {
            "problem_statement": "",
            "issue": "x",
            "repo": "acme/tool",
        },
        # Without the tests' patch the tests cannot pass; it is not a row of SWE-smith.
        "No known field of the row has its test_patch (its fields: instance_id, repo, base_commit,"
        " patch, test_patch (empty), problem_statement, FAIL_TO_PASS, PASS_TO_PASS)": mirror.bench(
            test_patch=float("nan")
        ),
        "it is not an object with named columns": "no object",
    }
    path = write_rows(tmp_path / "rows.jsonl", mirror.bench(), *bad.values())
    swe = swe_of(rooms, path, mirror=mirror.path)
    assert [task.id for task in swe.tasks("train")] == ["acme__tool-1"]
    causes = {cause.partition(": name it")[0]: n for cause, n in swe.rows.dropped.items()}
    assert causes == dict.fromkeys(bad, 1)
    list(swe.tasks("train"))
    assert swe.rows.dropped.total() == len(bad)  # not twice as many
    # Without a mirror it says so.
    write_rows(path, mirror.bench())
    with pytest.raises(ConfigError, match="mirror"):
        list(swe_of(None, path).tasks("train"))
    with pytest.raises(InputError, match="mirror"):
        Swe().task_from_row(mirror.bench())


def inside(row: Json) -> dict[str, Json]:
    """A row in the forms that trainers give it: below other fields, also as text."""
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "Fix it."}]
    metadata = {"split": "test", "instance_dict": json.dumps(row)}
    return {
        "SkyRL": {"data_source": "swe", "prompt": talk, "instance": row},
        "verl": {"prompt": talk, "extra_info": json.dumps({"index": 3, **row})},
        "NeMo Gym": {"responses_create_params": {"input": [], "metadata": metadata}},
    }


async def test_rows_of_other_layouts_are_the_same_task(mirror: Mirror, tmp_path: Path) -> None:
    row, ids = mirror.bench(), [f"tests/test_core.py::test_{name}" for name in ("double", "one")]
    fields = {**row, "PASS_TO_PASS": []}
    nothing = dict.fromkeys(("image", "image_name", "repo_archive", "hints_text"), float("nan"))
    lower = {"fail_to_pass": str(ids), "pass_to_pass": "", "FAIL_TO_PASS": None}
    no_problem = {"problem_statement": None, "prompt": [{"role": "user", "content": "double(7)"}]}
    rows = {
        "a list": {**fields, "FAIL_TO_PASS": ids},
        "an array": {**fields, "FAIL_TO_PASS": np.array(ids), "PASS_TO_PASS": np.array([])},
        "JSON": {**fields, "FAIL_TO_PASS": json.dumps(ids)},
        "a printed array": {**fields, "FAIL_TO_PASS": str(np.array(ids))},
        **{f"{gap!r}": {**fields, "FAIL_TO_PASS": gap.join(ids)} for gap in (" ", "\n", ", ")},
        "lower case": {**fields, **lower},
        "empty fields": {**fields, **nothing, "FAIL_TO_PASS": ids, "PASS_TO_PASS": float("nan")},
        "an address": {**fields, "FAIL_TO_PASS": ids, "repo": "https://host/acme/tool.git"},
        "a message": {**fields, "FAIL_TO_PASS": ids, **no_problem},
        "fields of R2E-Gym, too": {**mirror.r2e(), **fields, "FAIL_TO_PASS": ids},
        **inside({**fields, "FAIL_TO_PASS": ids}),
    }
    swe = swe_of(None, mirror=mirror.path, check_gold=False)
    for name, one in rows.items():
        task = swe.task_from_row(one)
        assert task.public["problem"].startswith("double(7)"), name
        assert task.hidden["fail_to_pass"] == ids, name
        assert (task.hidden["pass_to_pass"], "bug" in task.public) == ([], False), name
    task = swe.task_from_row({**fields, "patch": FIX.rstrip(), "FAIL_TO_PASS": ids})
    assert any(
        "return x + x\nEND_OF_PATCH\n" in turn["content"] for turn in swe.demonstration(task)
    )
    named = {**fields, "issue_text": "double(7)", "number": "acme__tool-1"}
    for name in ("problem_statement", "instance_id"):
        named.pop(name)
    columns = {"problem_statement": "issue_text", "instance_id": "number"}
    by_id = {key: value for key, value in fields.items() if key != "instance_id"}
    for row, more in ((named, {"columns": columns}), ({**by_id, "id": "acme__tool-1"}, {})):
        path = write_rows(tmp_path / "rows.jsonl", row)
        swe = swe_of(None, path, mirror=mirror.path, check_gold=False, **more)
        assert [task.id for task in swe.tasks("train")] == ["acme__tool-1"]


# Images.


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for Docker with an image: a repository, what was built in it, and its Python."""
    fake_engine.install(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(service, "_held", {})
    core = f"from tool.built import TWO\n\n\n{WRONG}"
    files = {
        **FILES,
        "tool/core.py": core,
        ".gitignore": "built.py\n",
        "tool/built.py": "TWO = 2\n",
    }
    commit(tmp_path / "testbed", files, "History")
    return tmp_path


@pytest.fixture
async def containers(engine: Path) -> AsyncIterator[Sandboxes]:
    config = SandboxConfig(backend="docker", docker_image=fake_engine.IMAGE)
    async with SandboxService(config) as running:
        yield WatchedSandboxes(running.address)


@pytest.mark.thorough
async def test_rows_with_images_are_tasks(containers: Sandboxes, tmp_path: Path) -> None:
    lines = [
        bench_row(image=IMAGE),
        bench_row(image="acme/unknown:1"),
        bench_row(image=IMAGE, patch=FIX.replace("x + x", "x - x")),
        bench_row(image=IMAGE, test_cmd="/nowhere/python -m pytest"),
        bench_row(image=""),
    ]
    swe = swe_of(containers, write_rows(tmp_path / "rows.jsonl", *lines))
    (task,) = swe.tasks("train")
    assert set(task.public) == {"image", "problem"}
    assert await rewards(swe, task, FIX, "", TEST_PATCH) == [1.0, 0.0, 0.0]
    reasons = (
        "The container engine lacks an image",
        "the gold patch does not pass its tests",
        "pytest could not be started in the sandbox",
        "There is no mirror with its repository (--env.mirror).",
    )
    assert dict(swe.rows.dropped) == dict.fromkeys(reasons, 1)


@pytest.mark.thorough
async def test_agents_work_on_the_copy_and_find_the_place_empty(
    containers: Sandboxes, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", bench_row(image=IMAGE))
    swe = swe_of(containers, rows, check_gold=False)
    (task,) = swe.tasks("train")
    look = (
        "sed -i 's/x + 3/x + x/' tool/core.py; ls -A /testbed | wc -l; git log --format=%s;"
        "cd /tmp; python -c 'import pytest, tool.core; print(tool.core.__file__, tool.core.TWO)'"
    )
    done = bash("true; echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    run = ScriptedRun(map(says, (bash(look), done)), max_turns=2, rooms=containers)
    output = await swe.rollout(task.without_hidden(), run)  # type: ignore[arg-type]
    assert answers(run)[0].split("\n")[1:5] == ["0", "The repository", "/work/tool/core.py 2", ""]
    result = result_of("")
    result.output = output
    assert (await swe.score(task, result)).reward == 1.0
    assert "built.py" not in output["patch"]


@pytest.mark.thorough
async def test_only_names_reach_the_command_line_and_other_walls_have_no_images(
    engine: Path, containers: Sandboxes, tmp_path: Path
) -> None:
    refused = [
        (containers, SandboxSpec(image="-v/:/host"), "is no"),
        (containers, SandboxSpec(image="a b"), "is no"),
        (containers, SandboxSpec(image=IMAGE, image_hides=("/testbed:rw,exec",)), "is no"),
        (containers, SandboxSpec(image=IMAGE, image_hides=("/testbed/../etc",)), "is no"),
    ]
    async with SandboxService(SandboxConfig()) as running:
        others = WatchedSandboxes(running.address)
        refused.append((others, SandboxSpec(image=IMAGE), "needs the backend docker"))
        for rooms, spec, words in refused:
            with pytest.raises(SandboxUnavailable, match=words):
                async with rooms.open(spec):
                    raise AssertionError("it was opened")
        rows = write_rows(tmp_path / "rows.jsonl", bench_row(image=IMAGE))
        with pytest.raises(ConfigError, match="1 x The image of a container needs the backend"):
            list(swe_of(others, rows, check_gold=False).tasks("train"))
    told = [words for words in fake_engine.commands(engine) if words[0] == "run"]
    assert all(words[words.index("python3") + 1] == fake_engine.IMAGE for words in told)


@pytest.mark.thorough
async def test_an_attempt_gets_the_image_of_its_own_task_only(containers: Sandboxes) -> None:
    spec = msgspec.structs.replace(attempt_spec(), task=Task("t", {"image": IMAGE}))
    for images, image, allowed in (
        (True, IMAGE, True),
        (True, "", True),
        (True, fake_engine.IMAGE, False),
        (False, IMAGE, False),
    ):
        async with AttemptSandboxes(containers, SandboxSpec(), 4, images=images) as host:
            attempt = ProxyAttempt("key", spec)
            body = msgspec.msgpack.encode(Open(SandboxSpec(image=image)))
            if allowed:
                await host.answer(attempt, "open", body)
            else:
                with pytest.raises(InputError, match="the image that its task names"):
                    await host.answer(attempt, "open", body)


# Task folders.

OWN = {"tool/__init__.py": "", "tool/core.py": WRONG, "tool/text.py": "A = 1\r\n", "notes": "n\n"}


def patch(new: dict[str, str], removed: tuple[str, ...] = ()) -> str:
    tree = {p: e for p, e in tree_of({**OWN, **new}).items() if p not in removed}
    return make_patch(tree_of(OWN), tree)


GOLD = patch({"tool/core.py": RIGHT})


def write_task(folder: Path, **changes: Any) -> Path:
    """A folder with a task as it is documented."""
    (folder / "hidden" / "tests").mkdir(parents=True)
    (folder / "hidden" / "tests" / "test_core.py").write_text(CASES["hidden"])
    with tarfile.open(folder / "repo.tar", "w") as tar:
        for path, text in OWN.items():
            info = tarfile.TarInfo(f"./{path}")
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    row = bench_row(
        patch=GOLD, test_patch="", repo_archive="repo.tar", hidden_tests="hidden",
        FAIL_TO_PASS=json.dumps([f"tests/test_core.py::{name}" for name in CASES["fail"]]),
        PASS_TO_PASS='["tests/test_core.py::test_one"]', test_cmd=["false"], wall=20,
        python=">=3.10", requires=["pytest>=7"], protected=["notes", "docs/**"],
    )  # fmt: skip
    (folder / "task.json").write_text(json.dumps({**row, **changes}))
    return folder


@pytest.mark.asyncio(loop_scope="module")
async def test_folders_with_tasks_are_read_and_graded(rooms: Sandboxes, tmp_path: Path) -> None:
    swe = swe_of(rooms, write_task(tmp_path / "a"))
    (task,) = swe.tasks("train")
    assert set(task.public) == {"archive", "problem"}
    assert (task.hidden["seconds"], task.hidden["protected"]) == (20.0, ["notes", "docs/**"])
    both = patch({"tool/core.py": RIGHT, "notes": "mine\n", "docs/a/b.md": "x\n"})
    score = await swe.score(task, result_of(both))
    assert (score.reward, score.metrics["changes_dropped"]) == (1.0, 2.0)
    assert (await swe.score(task, result_of(patch({"notes": "m\n"})))).reward == 0.0
    changes: list[Json] = CASES["changes"]
    for number, change in enumerate(changes):
        write_task(tmp_path / "many" / f"t{number}", **change)
    (tmp_path / "many" / "broken").mkdir()
    (tmp_path / "many" / "broken" / "task.json").write_text("{")
    swe = swe_of(rooms, tmp_path / "many")
    assert len(list(swe.tasks("train"))) == 1
    assert swe.rows.dropped.total() == len(changes)
    assert swe.rows.dropped["A file of the task is outside of its folder."] == 1


PROSE = "I fixed it.\n\n"
FORMS = {
    "no prefixes": GOLD.replace(" a/", " ").replace(" b/", " "),
    "Windows line ends": GOLD.replace("\n", "\r\n"),
    "a fence": f"{PROSE}```diff\n{GOLD}```\nDone.",
    "format-patch": f"From 1\nSubject: x\n\n---\n tool/core.py | 2 +-\n\n{GOLD}-- \n2.39.5\n",
    "visible tests": patch({"tool/core.py": RIGHT, "tests/test_core.py": "def test_x(): pass\n"}),
    "a file with Windows line ends": patch(
        {"tool/core.py": RIGHT, "tool/text.py": "A = 2\r\nB = 3\r\n"}),
    "a module that becomes a package": patch(
        {"tool/core/__init__.py": "from .sub.deep import double, one\n",
         "tool/core/sub/__init__.py": "",
         "tool/core/sub/deep.py": "from ...text import A\n" + RIGHT}, ("tool/core.py",)),
    "a rename": "diff --git a/tool/text.py b/tool/words.py\nsimilarity index 100%\n"
    f"rename from tool/text.py\nrename to tool/words.py\n{GOLD}",
    "a comparison of its own": patch({"tool/core.py": RIGHT + "\n\nclass P:\n"
    "    def __eq__(self, other):\n        return isinstance(other, P)\n"}),
    "prints, warnings, logs": patch({"tool/core.py": RIGHT + "\nimport logging, warnings\n"
    "print('hi')\nwarnings.warn('w')\nlogging.error('e')\n"
    "if __name__ == '__main__':\n    exit(1)\n"}),
}  # fmt: skip


@pytest.mark.asyncio(loop_scope="module")
async def test_honest_patches_are_rewarded_in_any_form_and_no_cheat_is(
    rooms: Sandboxes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swe = swe_of(rooms, write_task(tmp_path))
    (task,) = swe.tasks("train")

    async def paid(patches: dict[str, str]) -> dict[str, float | None]:
        scores = await asyncio.gather(*(rewards(swe, task, text) for text in patches.values()))
        return {name: reward for name, (reward,) in zip(patches, scores, strict=True)}

    assert await paid(FORMS) == dict.fromkeys(FORMS, 1.0)
    thoughts = f"<think>\n{patch({'notes': 'x'})}</think>\n{FORMS['a fence']}"
    for said, reward in ((thoughts, 1.0), (f"<think>{GOLD}", 0.0)):
        assert (await swe.score(task, swe.response_from_row(said, []))).reward == reward
    # Also without the search for suspicious code.
    monkeypatch.setattr("envserver_environments.swe.grading.FRAUD", frozenset())
    cheats = {
        name: patch({"tool/core.py": WRONG + dedent(PROGRAMS[name])}) for name in CASES["cheats"]
    }
    assert await paid(cheats) == dict.fromkeys(cheats, 0.0)


def test_what_suspicious_code_is() -> None:
    def is_fraud(added: str) -> bool:
        return bool(added_suspicions(tree_of({}), tree_of({"a.py": added})).keys() & FRAUD)

    assert [added for added in CASES["fraud"] if not is_fraud(added)] == []
    assert [added for added in CASES["no_fraud"] if is_fraud(added)] == []
