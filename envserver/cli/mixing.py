"""Several environments in one command: `environments:` of a YAML file, or `--env math=2,code=1`.
`env` applies to all of them; an environment's entry in the file overrides the rest of the file, and
variables and flags override the entry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from envserver_records.errors import ConfigError
from pydantic import ValidationError

from ..registry import find
from ..running.mix import Member, RunSpec, mixed
from ..running.options import config_error, faults, options_of
from ..settings.config import MixEntry, MixSettings
from .command_line import CommandSpec
from .settings import config_file, once, to_stderr

M = TypeVar("M", bound=MixSettings)


def read_mix(command: CommandSpec[M], argv: Sequence[str]) -> list[Member[M]] | None:
    """Returns None if only one environment is given."""
    entries, place = entries_of(command, argv)
    if entries is None:
        return None
    warn = once(to_stderr)
    specs, own = [], []
    for number, entry in enumerate(entries):
        over_file = (f"{place}[{number}]", {"env": entry.env})
        try:
            settings = command.read(argv, environment=entry.name, over_file=over_file, warn=warn)
        except ConfigError as error:
            error.message = f"{entry.name}: {error.message}"
            raise
        specs.append(RunSpec(settings, entry.name, find(entry.name)))
        # Whether the entry itself sets it, and no flag, variable or file overrides it.
        steps = entry.env.get("total_steps")
        own.append(steps is not None and steps == settings.env.total_steps)
    return mixed(specs, [(entry.weight, entry.minimum_share) for entry in entries], own)


def entries_of(command: CommandSpec[M], argv: Sequence[str]) -> tuple[list[MixEntry] | None, str]:
    """Returns the entries of a mix (None: no mix) and their origin."""
    flags = command.flags(argv)
    path = next((one.value for one in flags if one.path == "config"), None)
    file = config_file(Path(path) if path else None)
    in_file = {one.path: one for one in file.read(options_of(command.settings_class))}
    named = [one for one in flags if one.path == "environment"]
    text = str(named[0].value) if len(named) == 1 else ""
    from_flag = text if "," in text or "=" in text else ""
    listed = next((one for one in flags if one.path == "environments"), None)
    listed = listed or in_file.get("environments")
    if listed is None:
        entries = [_entry(part) for part in from_flag.split(",") if part.strip()]
        return entries or None, "--env"
    if named or "environment" in in_file:
        raise ConfigError(
            f"{listed.where}: a single environment is given as well.",
            hint="Give one with --env, or several with `environments`.",
        )
    if listed.is_text:
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
    entries, problems = [], []
    for number, one in enumerate(listed):
        try:
            entries.append(MixEntry.model_validate(one))
        except ValidationError as error:
            for place, what in faults(error):
                where = ".".join(map(str, (f"environments[{number}]", *place)))
                problems.append(f"{origin}: {where}: {what}.")
    if problems:
        raise config_error(problems)
    return entries
