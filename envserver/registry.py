"""Finds environments: by the name of a built-in, of an entry point, or by a path to a .py file.

An entry point of the group `envserver.environments` names an Environment subclass; the built-in
environments are those that this project registers. A .py file must define exactly one Environment
subclass of its own, or be followed by `:ClassName`.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib.util
import inspect
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import get_args

from envserver_records.errors import ConfigError, NotFoundError

from .config import EnvironmentConfig
from .environment import Environment, Isolation

ENTRY_POINT_GROUP = "envserver.environments"


def builtin_names() -> list[str]:
    """Names of the environments that ship with envserver, sorted."""
    return sorted(name for name, point in entry_point_names().items() if _is_ours(point))


def entry_point_names() -> dict[str, EntryPoint]:
    """Environments that installed packages offer. A built-in's name is not replaced by
    another's.
    """
    points = sorted(entry_points(group=ENTRY_POINT_GROUP), key=_is_ours)
    return {point.name: point for point in points}


def _is_ours(point: EntryPoint) -> bool:
    return point.dist is not None and point.dist.name == "envserver"


@functools.cache
def find(reference: str) -> type[Environment]:
    """The environment class that `reference` names.

    Once found, it stays found: a worker behind a wall does not see the file any more.

    Args:
        reference: a built-in's name, an entry point's name, or `path/to/file.py[:ClassName]`.

    Raises:
        NotFoundError: nothing has that name; the message holds the nearest one.
        ConfigError: it cannot be imported, does not say which class is meant, or is not whole.
    """
    path, _, class_name = reference.partition(":")
    if path.endswith(".py"):
        return _only_environment(_import_file(Path(path)), class_name, reference)
    points = entry_point_names()
    if reference in points:
        return _load_entry_point(points[reference])
    names = sorted(points)
    near = difflib.get_close_matches(reference, names, n=1)
    raise NotFoundError(
        f"There is no environment {reference!r}.",
        hint=f"Did you mean {near[0]!r}?"
        if near
        else f"Known: {', '.join([*names, 'a .py file'])}.",
    )


def absolute(reference: str) -> str:
    """`reference` in a form that another process, in another folder, understands."""
    path, colon, class_name = reference.partition(":")
    return f"{Path(path).resolve()}{colon}{class_name}" if path.endswith(".py") else reference


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise NotFoundError(f"There is no file {str(path)!r}.")
    digest = hashlib.sha1(str(path.resolve()).encode(), usedforsecurity=False).hexdigest()[:12]
    name = f"envserver_file_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script ends the program where a module does not
        del sys.modules[name]
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _only_environment(module: ModuleType, class_name: str, reference: str) -> type[Environment]:
    found = {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, Environment)
        and value.__module__ == module.__name__
    }
    if class_name:
        if class_name not in found:
            raise ConfigError(
                f"{reference}: no environment class {class_name!r}.",
                hint=f"It has: {', '.join(found)}.",
            )
        return _sound(found[class_name], reference)
    if len(found) != 1:
        raise ConfigError(
            f"{reference} defines {len(found)} environments, one is needed.",
            hint=f"Name one: {reference}:ClassName" if found else "Subclass envserver.Environment.",
        )
    return _sound(next(iter(found.values())), reference)


def _sound(environment: type[Environment], reference: str) -> type[Environment]:
    """`environment`, when it can be used as it is written.

    Raises:
        ConfigError: a method is missing, its isolation is none, or its Config is none of ours.
    """
    missing = ", ".join(sorted(environment.__abstractmethods__))
    levels = get_args(Isolation)
    if missing:
        raise ConfigError(f"{reference}: {environment.__name__} does not define {missing}.")
    if environment.isolation not in levels:
        raise ConfigError(
            f"{reference}: isolation is {environment.isolation!r}.",
            hint=f"It must be one of {', '.join(levels)}.",
        )
    config = environment.Config
    if not (inspect.isclass(config) and issubclass(config, EnvironmentConfig)):
        raise ConfigError(
            f"{reference}: {environment.__name__}.Config is not derived from Environment.Config.",
            hint="Write: class Config(Environment.Config):",
        )
    return environment


def _load_entry_point(point: EntryPoint) -> type[Environment]:
    try:
        loaded = point.load()
    except Exception as error:
        raise ConfigError(
            f"Entry point {point.name!r} ({point.value}) cannot be imported: {error}"
        ) from error
    if not (inspect.isclass(loaded) and issubclass(loaded, Environment)):
        raise ConfigError(f"Entry point {point.name!r} ({point.value}) is no Environment subclass.")
    return _sound(loaded, point.name)
