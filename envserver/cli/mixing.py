"""Several environments in one command: `environments:` of a YAML file, or `--env math=2,code=1`.
`env` applies to all of them; an environment's entry in the file overrides the rest of the file, and
variables and flags override the entry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from envserver_records.errors import ConfigError
from pydantic import TypeAdapter, ValidationError

from ..running.mix import Member, alone, mixed
from ..running.options import config_error, faults, options_of
from ..settings.config import MixEntry, MixSettings
from .command_line import CommandSpec, read_run_spec
from .settings import once, to_stderr

M = TypeVar("M", bound=MixSettings)


def read_mix(command: CommandSpec[M], argv: Sequence[str]) -> list[Member[M]]:
    """Returns the environments of the command, often only one."""
    entries, place = entries_of(command, argv)
    if entries is None:
        return [alone(read_run_spec(command, argv))]
    warn = once(to_stderr)
    specs, own = [], []
    for number, entry in enumerate(entries):
        over_file = (f"{place}[{number}]", {"env": entry.env})
        try:
            spec = read_run_spec(
                command, argv, environment=entry.name, over_file=over_file, warn=warn
            )
        except ConfigError as error:
            error.message = f"{entry.name}: {error.message}"
            raise
        specs.append(spec)
        # Whether the entry itself sets it, and no flag, variable or file overrides it.
        steps = entry.env.get("total_steps")
        own.append(steps is not None and steps == spec.settings.env.total_steps)
    return mixed(specs, [(entry.weight, entry.minimum_share) for entry in entries], own)


def entries_of(command: CommandSpec[M], argv: Sequence[str]) -> tuple[list[MixEntry] | None, str]:
    """Returns the entries of a mix (None: no mix) and their origin."""
    sources = command.sources(argv)
    in_file = {value.path: value for value in sources.in_file(options_of(command.settings_class))}
    named = [flag.value for flag in sources.flags if flag.path == "environment"]
    listed = next((flag for flag in sources.flags if flag.path == "environments"), None)
    listed = listed or in_file.get("environments")
    if listed is None:
        text = str(named[0]) if len(named) == 1 else ""
        parts = text.split(",") if "," in text or "=" in text else []
        return [_entry(part) for part in parts if part.strip()] or None, "--env"
    if named or "environment" in in_file:
        raise ConfigError(
            f"{listed.where}: a single environment is given as well.",
            hint="Give one with --env, or several with `environments`.",
        )
    if listed.kind != "file":
        raise ConfigError(
            "--environments is only allowed in files.", hint="For several, use --env math=2,code=1."
        )
    return _validated(listed.value, listed.origin), listed.where


def _entry(text: str) -> MixEntry:
    name, equals, weight = text.strip().partition("=")
    try:
        value = float(weight) if equals else 1.0
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"--env: {text.strip()!r}: a weight must be a positive number.")
    return MixEntry(name=name, weight=value)


def _validated(listed: Any, origin: str) -> list[MixEntry]:
    if not isinstance(listed, list):
        raise ConfigError(f"{origin}: environments must be a list of name, weight, env.")
    try:
        return TypeAdapter(list[MixEntry]).validate_python(listed)
    except ValidationError as error:
        problems = []
        for (number, *place), what in faults(error):
            where = ".".join(map(str, (f"environments[{number}]", *place)))
            problems.append(f"{origin}: {where}: {what}.")
        raise config_error(problems) from None
