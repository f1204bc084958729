"""Converts the arguments of the Python API to checked settings.

In: an environment (a name, a path, a class or an instance) and settings by the names of the
command line, as keyword arguments, nested dicts or dotted paths. Out: a `RunSpec`. What holds:
names, checks and messages are those of the command line; environment variables and `.env` are not
read.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from envserver_records.errors import ConfigError, UsageError
from pydantic import BaseModel

from ..config import EnvironmentSettings, MixSettings, Section
from ..environment import Environment
from ..registry import entry_point_names, find
from ..registry.hosted import HostedEnvironment
from ..rollouts.mixing import Share, targets
from .mix import Member, alone, share_total
from .options import Option, expanded, flatten, named_sections, nearest, options_of, preset
from .spec import RunSpec
from .validation import sampling_of_model, validated, with_environment

S = TypeVar("S", bound=EnvironmentSettings)
M = TypeVar("M", bound=MixSettings)
T = TypeVar("T", bound=Section)

AnyEnvironment: TypeAlias = "str | Path | type[Environment[Any]] | Environment[Any]"
"""The name of an installed environment, a path (`my_env.py`, `my_env.py:Class`, a folder), an
Environment subclass, or an instance (its config is used)."""
Mix: TypeAlias = "AnyEnvironment | Sequence[AnyEnvironment] | Mapping[str, float]"
"""One environment, several, or several with their weights."""


def spec_of(
    kind: type[S],
    environment: AnyEnvironment,
    settings: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any] | None = None,
) -> RunSpec[S]:
    """Checks the settings of one environment.

    Args:
        kind: the class of the settings.
        settings: by name, nested (`env={"group_size": 4}`) or dotted (`**{"env.group_size": 4}`); a
            section may be an instance of its class.
        defaults: a tree of values that `settings` override.

    Raises:
        ConfigError: a name or a value is wrong; all problems at once.
        NotFoundError: there is no such environment.
    """
    reference = reference_of(environment)
    found = find(reference)
    given = dict(settings)
    if isinstance(environment, Environment):
        own = environment.config.model_dump(exclude_unset=True)
        given["env"] = own | dict(_plain(given.get("env", {})))
    checked = checked_settings(
        with_environment(kind, reference),
        {**given, "environment": reference},
        defaults=defaults,
    )
    return RunSpec(checked, reference, found)


def checked_settings(
    model: type[T], settings: Mapping[str, Any], *, defaults: Mapping[str, Any] | None = None
) -> T:
    """Makes `model` of settings by name.
    Raises ConfigError: a name or a value is wrong; all problems at once.
    """
    options = options_of(model)
    nested = _plain(settings)
    names = flatten(nested, options)
    options = expanded(options, names)
    options = expanded(options, named_sections(options))
    given = flatten(nested, options)
    if unknown := [path for path in given if path not in options]:
        problems = [_unknown(path, options) for path in unknown]
        raise ConfigError("\n".join(problems), problems=problems)
    values = preset(model) | flatten(_plain(defaults or {}), options)
    values |= sampling_of_model(model, values | given, options) | given
    return validated(model, values, options, lambda path: path)


def members_of(kind: type[M], mix: Mix, settings: Mapping[str, Any]) -> list[Member[M]]:
    """Checks the settings of one environment or several, and makes the environments.

    Raises:
        ConfigError, NotFoundError: see `spec_of`; or an environment cannot be made.
        UsageError: no environment is given.
    """
    if isinstance(mix, Mapping):
        weights = dict(mix)
    elif isinstance(mix, Sequence) and not isinstance(mix, str):
        weights = {reference_of(one): 1.0 for one in mix}
    else:
        return [alone(spec_of(kind, mix, settings))]
    if not weights:
        raise UsageError("No environment is given.")
    specs = [spec_of(kind, reference, settings) for reference in weights]
    if len(specs) > 1:
        shared = share_total([spec.settings for spec in specs], [False] * len(specs))
        specs = [replace(spec, settings=one) for spec, one in zip(specs, shared, strict=True)]
    members = []
    for spec, weight in zip(specs, weights.values(), strict=True):
        environment = spec.make_environment()
        members.append(Member(spec, environment, Share(environment.name, weight)))
    targets(member.share for member in members)  # raises where shares cannot be
    return members


def reference_of(environment: AnyEnvironment) -> str:
    """Returns the name under which another process finds `environment`."""
    if isinstance(environment, Path):
        return str(environment)
    if isinstance(environment, str):
        return environment
    kind = environment if isinstance(environment, type) else type(environment)
    if issubclass(kind, HostedEnvironment):
        return kind.reference
    value = f"{kind.__module__}:{kind.__qualname__}"
    for name, point in entry_point_names().items():
        if point.value == value:
            return name
    try:
        file = inspect.getsourcefile(kind)
    except (OSError, TypeError):
        file = None
    if file is None or not Path(file).is_file():
        raise ConfigError(
            f"Workers cannot import {kind.__qualname__}: it is not in a file.",
            hint="In a notebook, write it to a file (%%writefile my_env.py) and give the path.",
        )
    return f"{Path(file).resolve()}:{_name_in_file(kind)}"


def _name_in_file(kind: type[Environment]) -> str:
    """Returns the name of a class at the top level of its file: `Sums = Environment.from_rows(...)`
    has another one than the class itself."""
    known = vars(sys.modules[kind.__module__])
    named = [name for name, value in known.items() if value is kind]
    return kind.__qualname__ if kind.__qualname__ in named or not named else named[0]


def _plain(value: Any) -> Any:
    """`value` with sections as dicts of what was set in them."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return value


def _unknown(path: str, options: Mapping[str, Option]) -> str:
    near = nearest(path, options)
    return f"There is no setting {path!r}." + (f" Did you mean {near!r}?" if near else "")
