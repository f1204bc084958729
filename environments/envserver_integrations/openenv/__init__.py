"""`--env openenv:http://host:8000`, `--env openenv:docker://IMAGE`: the environment of an OpenEnv
server."""

from __future__ import annotations

from envserver import Environment, Integration


def _environment(address: str) -> type[Environment]:
    from .env import openenv_environment

    return openenv_environment(address)


INTEGRATION = Integration(what="the environment of an OpenEnv server", environment=_environment)
