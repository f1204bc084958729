"""Several environments in one command: `environments:` of a YAML file, or `--env math=2,code=1`.

Each gets settings of its own: what is set for `env` holds for all of them, what stands at its place
in the file is stronger than the rest of the file, and weaker than variables and flags.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from envserver_records.errors import ConfigError
from pydantic import ValidationError

from ..config import MixEntry, MixSettings
from ..registry import find
from ..rollouts.mixing import Share, targets
from ..running.mix import Member
from ..running.options import options_of
from ..running.spec import RunSpec
from .settings import load_settings
from .sources import YamlFile, read_flags

M = TypeVar("M", bound=MixSettings)


def read_mix(
    argv: Sequence[str], *, settings_class: type[M], aliases: Mapping[str, str] | None = None
) -> list[Member[M]] | None:
    """The environments that a command line names, with their settings; None: not several.

    Raises:
        ConfigError, NotFoundError: as for `load_settings`; or they cannot be mixed.
    """
    entries, place = entries_of(argv, settings_class, aliases or {})
    if entries is None:
        return None
    words = without_environment(argv)
    members = []
    for number, entry in enumerate(entries):
        line = _line(words, entry, f"{place}[{number}]", settings_class, aliases)
        environment = line.make_environment()
        share = Share(environment.name, entry.weight, entry.minimum_share)
        members.append(Member(line, environment, share))
    targets(member.share for member in members)  # refuses what cannot be
    return members


def _line(
    words: list[str],
    entry: MixEntry,
    place: str,
    settings_class: type[M],
    aliases: Mapping[str, str] | None,
) -> RunSpec[M]:
    try:
        settings = load_settings(
            [*words, "--env", entry.name],
            settings_class=settings_class,
            aliases=aliases,
            over_file=(place, {"env": entry.env}),
        )
    except ConfigError as error:
        error.message = f"{entry.name}: {error.message}"
        raise
    return RunSpec(settings, entry.name, find(entry.name))


def entries_of(
    argv: Sequence[str], settings_class: type[M], aliases: Mapping[str, str]
) -> tuple[list[MixEntry] | None, str]:
    """What is to be mixed (None: nothing), and where that is said.

    Raises:
        ConfigError: it is said in two places, or cannot be read.
    """
    flags = read_flags(argv, {"env": "environment", **aliases})
    path = next((one.value for one in flags if one.path == "config"), None)
    file = YamlFile(Path(path) if path else None)
    in_file = {one.path: one for one in file.read(options_of(settings_class))}
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
            f"{listed.where}: one environment is named too.",
            hint="Name one by --env, or several by `environments`.",
        )
    if listed.is_text:
        raise ConfigError(
            "--environments is for files.", hint="Several by a flag: --env math=2,code=1."
        )
    return _validated(listed.value, listed.origin), listed.where


def _entry(text: str) -> MixEntry:
    """`math=2`: a name and a weight."""
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
            for fault in error.errors(include_url=False, include_context=False):
                where = ".".join(map(str, (f"environments[{number}]", *fault["loc"])))
                problems.append(f"{origin}: {where}: {fault['msg']}.")
    if problems:
        raise ConfigError("\n".join(problems), problems=problems)
    return entries


def without_environment(argv: Sequence[str]) -> list[str]:
    kept: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--env":
            words = words[1:]
        elif not word.startswith("--env="):
            kept.append(word)
    return kept
