"""The agents that an environment declares, and what a person set over that.

In: an environment with its settings. Out: its roles, checked. Pure, and light: scorers import it.
"""

from __future__ import annotations

import difflib
import re

from envserver_records.errors import ConfigError

from ..environment import AgentRole, Environment
from ..settings.section import AgentConfig

_NAME = re.compile(r"[a-z][a-z0-9_]{0,79}")


def roles_of(environment: Environment) -> dict[str, AgentRole]:
    """The agents of `environment` in its order, trained as the settings say.
    Raises ConfigError: a declared name is invalid, or the settings name an undeclared agent.
    """
    declared, settings = environment.agents(), environment.config.agents
    for name in declared:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"Environment {environment.name!r} declares an agent {name!r}.",
                hint="Names are of small letters, digits and _.",
            )
    for name in settings:
        if name not in declared:
            raise _unknown(environment.name, name, list(declared))
    return {name: _role(role, settings.get(name)) for name, role in declared.items()}


def _role(role: AgentRole, config: AgentConfig | None) -> AgentRole:
    if config is None or config.trained is None:
        return role
    return AgentRole(trained=config.trained)


def _unknown(environment: str, name: str, declared: list[str]) -> ConfigError:
    where = f"--env.agents.{name}: there is no agent {name!r} in {environment!r}."
    if not declared:
        return ConfigError(where, hint="Its rollouts have one agent, and it has no name.")
    near = difflib.get_close_matches(name, declared, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Its agents: {', '.join(declared)}."
    return ConfigError(where, hint=hint)
