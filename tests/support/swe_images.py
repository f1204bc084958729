"""The shipped tasks of `swe` as container images in SWE-bench's layout, and rows that name them.

An image has the repository with one commit in /testbed, and in the environment `testbed` of
/opt/miniconda3 a Python with pytest (its files are those of this Python). Nothing is fetched.
"""

from __future__ import annotations

import importlib.util
import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from envserver_environments.swe.sample import SampleTask
from envserver_environments.swe.trees import Entry, Tree, git_files, make_patch, tar_of, tree_of

from .docker_engine import Engine

_ENVIRONMENT = "opt/miniconda3/envs/testbed"
_PACKAGES = ("py", "pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")


@contextmanager
def task_images(engine: Engine, tasks: Sequence[SampleTask]) -> Iterator[list[dict[str, Any]]]:
    """Builds an image for each task, and yields their rows; removes the images at the end."""
    names = [f"envserver-test/sweb.eval.{task.name.lower()}:latest" for task in tasks]
    base = "envserver-test/sweb.base:latest"
    try:
        _build(engine, base, engine.python_image, tar_of(_environment()))
        rows = []
        for task, name in zip(tasks, names, strict=True):
            history, commit = git_files(task.tree)
            _build(engine, name, base, tar_of({**task.tree, **history}, "testbed/"))
            rows.append(row_of(task, name, commit))
        yield rows
    finally:
        engine.run("rmi", "--force", *names, base)


def row_of(task: SampleTask, image: str, commit: str) -> dict[str, Any]:
    """The row of SWE-bench's form: the hidden tests come as a patch."""
    made = task.task().hidden
    return {
        "instance_id": f"envserver__{task.name}",
        "repo": f"envserver/{task.name}",
        "base_commit": commit,
        "image_name": image,
        "problem_statement": task.problem,
        "patch": task.gold_patch,
        "test_patch": make_patch(task.tree, {**task.tree, **tree_of(task.hidden)}),
        "FAIL_TO_PASS": json.dumps(made["fail_to_pass"]),
        "PASS_TO_PASS": json.dumps(made["pass_to_pass"]),
    }


def _environment() -> Tree:
    """The environment that tests run in: the image's Python, and pytest."""
    place = f"{_ENVIRONMENT}/lib/python3.11/site-packages"
    files = {
        f"{_ENVIRONMENT}/bin/python": Entry(b"/usr/bin/python3", "link"),
        f"{_ENVIRONMENT}/pyvenv.cfg": Entry(b"home = /usr/bin\nversion = 3.11.2\n"),
    }
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        origin = Path(spec.origin)
        whole = origin.parent.rglob("*.py") if origin.name == "__init__.py" else [origin]
        root = origin.parent.parent if origin.name == "__init__.py" else origin.parent
        for path in whole:
            files[f"{place}/{path.relative_to(root)}"] = Entry(path.read_bytes())
    return files


def _build(engine: Engine, name: str, base: str, layer: bytes) -> None:
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        for file, data in (
            ("Dockerfile", f"FROM {base}\nADD layer.tar /\n".encode()),
            ("layer.tar", layer),
        ):
            entry = tarfile.TarInfo(file)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    done = engine.run("build", "--tag", name, "-", input=context.getvalue(), text=False)
    assert done.returncode == 0, done.stderr
