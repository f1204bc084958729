"""`--env harbor:FOLDER`: a task folder of Harbor (Terminal-Bench 2), or a folder of them."""

from __future__ import annotations

from pathlib import Path

from envserver import Environment, Integration


def _environment(folder: str) -> type[Environment]:
    from .env import harbor_environment

    return harbor_environment(Path(folder))


INTEGRATION = Integration(
    what="task folders of Harbor and Terminal-Bench 2",
    environment=_environment,
    absolute=lambda folder: str(Path(folder).resolve()),
)
