"""An environment and the settings of its run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from envserver_records.errors import ConfigError, EnvserverError

from ..config import EnvironmentSettings
from ..environment import Environment

S = TypeVar("S", bound=EnvironmentSettings)


@dataclass(frozen=True)
class RunSpec(Generic[S]):
    """One environment to run, with all settings of the run.

    Args:
        settings: checked; `settings.env` is an instance of the environment's own Config.
        reference: the environment as the user named it: a name, or a path to a file.
        environment_class: the class that `reference` names.
    """

    settings: S
    reference: str
    environment_class: type[Environment]

    def make_environment(self) -> Environment:
        """Makes the environment with its settings.

        Raises:
            ConfigError: its constructor fails, or the settings name agents that it does not have.
        """
        from ..rollouts.roles import roles_of
        from ..tools.bugs import place_of

        try:
            environment = self.environment_class(self.settings.env)
            roles_of(environment)
            return environment
        except EnvserverError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"Environment {self.reference!r} cannot be made: {type(error).__name__}: {error} "
                f"{place_of(error)}"
            ) from error
