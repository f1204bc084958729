"""`swe` with repositories that are only in the images of containers; the engine is a stand-in."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from envserver_environments.swe.cheats import result_of
from envserver_environments.swe.env import Swe
from envserver_environments.swe.images import image_of
from envserver_records.errors import SandboxUnavailable
from support import fake_engine
from support.serving import attempt_spec

from envserver import (
    ConfigError,
    InputError,
    Reply,
    SandboxConfig,
    Sandboxes,
    SandboxSpec,
    Task,
)
from envserver.proxy.attempts import ProxyAttempt
from envserver.sandbox import Open, SandboxService, WatchedSandboxes, service
from envserver.sandbox.attempt_sandboxes import AttemptSandboxes

ROW = "ENVSERVER_TEST_SWE_ROW"
IMAGE = fake_engine.WITH_REPOSITORY
DOCKER = SandboxConfig(backend="docker", docker_image=fake_engine.IMAGE)
FILES = {
    "tool/__init__.py": "",
    "tool/core.py": "from tool.built import TWO\n\n\ndef double(x):\n    return x + TWO\n",
    "tests/test_core.py": "from tool.core import double\n\n\ndef test_two():\n"
    "    assert double(2) == 4\n",
    ".gitignore": "built.py\n",
}
FIX = (
    "diff --git a/tool/core.py b/tool/core.py\n--- a/tool/core.py\n+++ b/tool/core.py\n"
    "@@ -4,2 +4,2 @@\n def double(x):\n-    return x + TWO\n+    return x * TWO\n"
)
TEST_PATCH = (
    "diff --git a/tests/test_core.py b/tests/test_core.py\n"
    "--- a/tests/test_core.py\n+++ b/tests/test_core.py\n@@ -3,3 +3,7 @@\n \n def test_two():\n"
    "     assert double(2) == 4\n+\n+\n+def test_seven():\n+    assert double(7) == 14\n"
)


def row(**changes: Any) -> dict[str, Any]:
    return {
        "instance_id": "acme__tool-1", "repo": "acme/tool", "base_commit": "0" * 40,
        "image": IMAGE, "patch": FIX, "test_patch": TEST_PATCH,
        "problem_statement": "double(7) is 9.",
        "FAIL_TO_PASS": json.dumps(["tests/test_core.py::test_seven"]),
        "PASS_TO_PASS": ["tests/test_core.py::test_two"], **changes,
    }  # fmt: skip


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for Docker with an image: a repository, what was built in it, and its Python."""
    fake_engine.install(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(service, "_held", {})
    repository = tmp_path / "testbed"
    for path, text in {**FILES, "tool/built.py": "TWO = 2\n"}.items():
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_text(text)
    names = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for words in (
        ("init", "-q"),
        ("add", "-A"),
        (*names, "commit", "-qm", "History"),
    ):
        subprocess.run(["git", "-C", str(repository), *words], check=True)
    return tmp_path


@pytest.fixture
async def containers(engine: Path) -> AsyncIterator[Sandboxes]:
    async with SandboxService(DOCKER) as running:
        yield WatchedSandboxes(running.address)


def swe_of(rooms: Sandboxes, rows: Path, *lines: dict[str, Any], **config: Any) -> Swe:
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    swe = Swe(Swe.Config(data_set="swe_bench", data_path=rows, **config))
    swe.sandboxes = rooms
    return swe


class Scripted:
    """A `run` whose model says one thing after the other."""

    def __init__(self, rooms: Sandboxes, *commands: str) -> None:
        self.max_turns, self.told = len(commands), ""
        self.open_sandbox = rooms.open
        self._said = iter(f"So:\n```bash\n{command}\n```" for command in commands)

    def log_action(
        self, tool: str, input: Any = None, output: Any = None, *, error: str = ""
    ) -> None: ...

    def log_metric(self, name: str, value: float) -> None:
        """Nobody looks at it."""

    async def chat(self, messages: list[dict[str, Any]], **_: Any) -> Reply:
        self.told = messages[-1]["content"]
        said = next(self._said)
        return Reply(said, [], "stop", {"role": "assistant", "content": said})


async def test_rows_with_images_are_tasks(containers: Sandboxes, tmp_path: Path) -> None:
    lines = [
        row(),
        row(image="acme/unknown:1"),
        row(image="--privileged"),
        row(patch=FIX.replace("x * TWO", "x - TWO")),
        row(test_cmd="/nowhere/python -m pytest"),
        row(expected_output_json="{}"),
        row(image=""),
    ]
    swe = swe_of(containers, tmp_path / "rows.jsonl", *lines)
    (task,) = swe.tasks("train")
    assert set(task.public) == {"image", "problem"}
    scores = [await swe.score(task, result_of(patch)) for patch in (FIX, "", TEST_PATCH)]
    assert [score.reward for score in scores] == [1.0, 0.0, 0.0]
    assert dict(swe.dropped) == {
        "The container engine lacks an image": 1,
        "No sandbox could be made": 1,
        "the gold patch does not pass its tests": 1,
        "pytest could not be started in the sandbox": 1,
        "Images of R2E-Gym hold their Python in the repository: use a mirror.": 1,
        "There is no mirror with its repository (--env.mirror).": 1,
    }


async def test_agents_work_on_the_copy_and_find_the_place_empty(
    engine: Path, containers: Sandboxes, tmp_path: Path
) -> None:
    swe = swe_of(containers, tmp_path / "rows.jsonl", row())
    (task,) = swe.tasks("train")
    run = Scripted(
        containers,
        "sed -i 's/x + TWO/x * TWO/' tool/core.py; ls -A /testbed | wc -l; git log --format=%s;"
        "cd /tmp; python -c 'import pytest, tool.core; print(tool.core.__file__, tool.core.TWO)'",
        "true; echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    )
    output = await swe.rollout(task.without_hidden(), run)  # type: ignore[arg-type]
    assert run.told.split("\n")[1:5] == ["0", "The repository", "/work/tool/core.py 2", ""]
    result = result_of("")
    result.output = output
    assert (await swe.score(task, result)).reward == 1.0
    assert "built.py" not in output["patch"]


async def test_other_walls_have_no_images(tmp_path: Path) -> None:
    async with SandboxService(SandboxConfig()) as running:
        rooms = WatchedSandboxes(running.address)
        with pytest.raises(SandboxUnavailable, match="needs the backend docker"):
            async with rooms.open(SandboxSpec(image=IMAGE)):
                raise AssertionError("it was opened")
        swe = swe_of(rooms, tmp_path / "rows.jsonl", row(), check_gold=False)
        with pytest.raises(ConfigError, match="1 x The image of a container needs the backend"):
            list(swe.tasks("train"))


async def test_nothing_but_names_reaches_the_command_line(
    engine: Path, containers: Sandboxes
) -> None:
    for spec in (
        SandboxSpec(image="-v/:/host"),
        SandboxSpec(image="a b"),
        SandboxSpec(image=IMAGE, image_hides=("/testbed:rw,exec",)),
        SandboxSpec(image=IMAGE, image_hides=("/testbed/../etc",)),
    ):
        with pytest.raises(SandboxUnavailable, match="is no"):
            async with containers.open(spec):
                raise AssertionError("it was opened")
    told = [words for words in fake_engine.commands(engine) if words[0] == "run"]
    assert all(words[words.index("python3") + 1] == fake_engine.IMAGE for words in told)


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


def test_rows_say_their_image_or_a_template_does() -> None:
    template = "hub/sweb.{owner}_1776_{name}:latest"
    assert image_of({"image_name": "a/b"}, template) == "a/b"
    assert image_of({"instance_id": "Acme__Tool-1"}, template) == "hub/sweb.acme_1776_tool-1:latest"
    assert image_of({"instance_id": "Acme__Tool-1"}, "") == ""


@pytest.mark.skipif(ROW not in os.environ, reason=f"{ROW} names no file with a row")
async def test_an_image_of_a_real_engine(docker_image: str, tmp_path: Path) -> None:
    """ENVSERVER_TEST_SWE_ROW: a file with a row whose image the engine has."""
    line = json.loads(Path(os.environ[ROW]).read_text())
    config = SandboxConfig(backend="docker", docker_image=docker_image)
    async with SandboxService(config) as running:
        swe = swe_of(WatchedSandboxes(running.address), tmp_path / "rows.jsonl", line)
        assert len(list(swe.tasks("test"))) == 1, swe.dropped
