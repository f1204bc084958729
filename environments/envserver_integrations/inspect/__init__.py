"""Tasks of Inspect (UK AI Security Institute): `--env inspect:TASK`. See README.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from envserver import Backend, Environment, Integration

REQUIREMENTS = ["inspect-ai==0.3.285", "inspect_evals==0.26.0"]


def environment(spec: str) -> type[Environment]:
    """Returns the class of a task: `inspect_evals/NAME`, `package/NAME` or `path/file.py@NAME`."""
    from .env import environment_of

    return environment_of(spec)


def backend(spec: str, packages: Sequence[str]) -> Backend:
    return Backend(name="inspect", requirements=REQUIREMENTS)


def absolute(spec: str) -> str:
    """Returns `path/file.py@NAME` with the whole path; names of packages stay as they are."""
    path, at, name = spec.partition("@")
    return f"{Path(path).expanduser().resolve()}{at}{name}" if path.endswith(".py") else spec


INTEGRATION = Integration(
    what="tasks of Inspect and inspect_evals",
    environment=environment,
    module="inspect_ai",
    backend=backend,
    absolute=absolute,
)
