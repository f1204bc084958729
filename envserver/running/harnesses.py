"""Chooses the external agent of a run (`--agent.*`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from envserver_records.errors import ConfigError

from ..environment import Environment, Isolation
from ..harnesses import harness_of
from ..harnesses.installing import installed_place, version_in
from ..rollout_interface import HarnessSpec
from ..sandbox.elsewhere import SandboxSource
from ..sandbox.outer import PLACE
from ..sandbox.wire import NAMESPACE_BACKENDS
from ..settings.runs import HarnessConfig

_RESERVED_MB: Final = 1 << 20
"""Engines of JavaScript reserve up to hundreds of GB that they never use."""


@dataclass(frozen=True)
class ChosenHarness:
    """The program of a run.

    Args:
        folder: where it is installed on this machine; "": nowhere that sandboxes do not see.
    """

    spec: HarnessSpec
    folder: str = ""

    def sandbox(self) -> dict[str, Any]:
        """Returns what its workers' sandbox has besides the usual."""
        return {"shown": self.folder, "reserved_mb": _RESERVED_MB}


def isolation_of(config: HarnessConfig, environment: Environment) -> Isolation:
    """Returns the isolation of a run's workers: for its own agent, as the environment declares.
    Raises ConfigError: the environment does not offer its tasks to other programs.
    """
    if not config.is_set:
        return environment.isolation
    if type(environment).harness_task is Environment.harness_task:
        raise ConfigError(
            f"The environment {environment.name!r} cannot be played by other programs (--agent).",
            hint="It needs the method `harness_task`; without --agent its own agent plays.",
        )
    if config.name is not None:
        harness_of(config.name)
    return "dedicated" if config.url is not None else "sandboxed"


def chosen_harness(config: HarnessConfig, service: SandboxSource | None) -> ChosenHarness | None:
    """Returns the external agent; None: the environment's own.

    Args:
        service: the sandboxes of the run.
    """
    if not config.is_set:
        return None
    arguments, output_bytes = config.arguments, config.output_kb << 10
    if config.command is not None:
        folder = str(config.folder.resolve()) if config.folder is not None else ""
        if folder and not Path(folder).is_dir():
            raise ConfigError(f"--agent.folder: there is no folder {folder!r}.")
        spec = HarnessSpec(
            name="command",
            command=config.command,
            place=_seen_at(folder, service),
            arguments=arguments,
            output_bytes=output_bytes,
        )
        return ChosenHarness(spec, folder)
    if config.url is not None:
        return ChosenHarness(
            HarnessSpec(name="url", url=config.url, base_url=config.base_url or "")
        )
    assert config.name is not None
    harness = harness_of(config.name)
    place = installed_place(harness, config.folder)
    spec = HarnessSpec(
        name=harness.name,
        version=version_in(place),
        place=_seen_at(str(place), service),
        arguments=arguments,
        output_bytes=output_bytes,
    )
    return ChosenHarness(spec, str(place))


def identity_of(config: HarnessConfig) -> dict[str, str]:
    """Returns what identifies the program in the record of an evaluation.
    Raises NotFoundError: there is no such program, or it is not installed.
    """
    chosen = chosen_harness(config, None)
    return {} if chosen is None else chosen.spec.identity()


def _seen_at(folder: str, service: SandboxSource | None) -> str:
    if not folder or service is None or service.backend not in NAMESPACE_BACKENDS:
        return folder
    return PLACE
