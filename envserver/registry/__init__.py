"""Finds environments: entry points, .py files, folders, rows, and `SCHEME:NAME` of other
frameworks.

An environment with an interpreter of its own is found as a class that stands for it (`hosted`). A
file, or a folder with `env.py` or `__init__.py`, must define exactly one Environment subclass, or
be followed by `:ClassName`.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from envserver_records.errors import ConfigError, NotFoundError
from envserver_records.sandboxes import SandboxSpec

from ..environment import Environment, Isolation
from ..folders import import_path, is_environment_folder, same_folder
from ..integration_interface import Integration
from ..rows.sources import is_data
from ..rows.typed_tasks import plain
from ..settings.section import EnvironmentConfig
from ..tools.calling import place_of
from . import installed
from .installed import Interpreter, usable_interpreter, with_own_interpreter

ENTRY_POINT_GROUP = installed.ENVIRONMENTS
_US = "envserver"
_AS_ELSEWHERE = {"smolagents": "gaia"}
"""Names of predecessors' environments; an installed environment of this name wins."""


def builtin_names() -> list[str]:
    return sorted(
        point.name for point, package in installed.offered(ENTRY_POINT_GROUP) if package == _US
    )


def entry_point_names() -> dict[str, EntryPoint]:
    """Environments that packages offer to this interpreter. A built-in's name is not replaced by
    another's."""
    points = installed.offered(ENTRY_POINT_GROUP)
    return {point.name: point for point, _ in sorted(points, key=lambda pair: pair[1] == _US)}


def known_names() -> list[str]:
    return sorted({*entry_point_names(), *with_own_interpreter()})


def find(reference: str) -> type[Environment]:
    """Returns the environment class that `reference` names.

    The result is kept: a sandboxed worker does not see the file any more. A relative path is
    another one in another current folder.

    Args:
        reference: an entry point's name (dashes count as underscores),
            `path/to/file.py[:ClassName]`, `folder[:ClassName]`, rows: `rows.jsonl`,
            `hub:owner/name` (see `rows.sources.is_data`), or another framework's:
            `SCHEME:NAME`.

    Raises:
        NotFoundError: nothing has that name; the message holds the nearest one.
        ConfigError: it cannot be imported, defines several environments, or is incomplete.
    """
    path = Path(reference.partition(":")[0])
    return _found(reference, None if path.is_absolute() or not path.exists() else Path.cwd())


@functools.cache
def _found(reference: str, current: Path | None) -> type[Environment]:
    path, _, class_name = reference.partition(":")
    if (parts := installed.split(reference)) is not None:
        return _checked(_integrated_class(*parts), reference)
    if _is_data(reference):
        from ..rows.environment import rows_class

        return rows_class(reference)
    if is_path(path):
        return _load_path(Path(path), class_name, reference)
    points = entry_point_names()
    point = points.get(reference) or points.get(reference.replace("-", "_"))
    point = point or points.get(_AS_ELSEWHERE.get(reference, ""))
    if point is not None:
        return _load_entry_point(point)
    if (package := with_own_interpreter().get(reference)) is not None:
        from .hosted import hosted_class

        return hosted_class(*package, make_environment)
    raise _not_found(reference)


def _integrated_class(scheme: str, rest: str) -> type[Environment]:
    if not rest:
        raise NotFoundError(f"--env {scheme}: needs a name: {scheme}:NAME.")
    found = installed.integration(scheme)
    reference = installed.absolute(scheme, rest)
    own = with_own_interpreter().get(reference)
    python = own[0].interpreter if own is not None else None
    if own is not None and python is not None and python.executable != sys.executable:
        from .hosted import hosted_class

        return hosted_class(*own, make_environment)
    if found.module and importlib.util.find_spec(found.module) is None:
        raise _not_installed(scheme, rest, found)
    return found.environment(reference.partition(":")[2])


def _not_installed(scheme: str, rest: str, integration: Integration) -> NotFoundError:
    module = integration.module
    needs = f"{scheme}:{rest} needs the package {module!r}, which is not installed here."
    if integration.backend is None:
        return NotFoundError(needs, hint=f"pip install {module}")
    beside = [name for name in with_own_interpreter() if name.startswith(f"{scheme}:")]
    text = (
        f"{scheme}:{rest} is not installed; others of {scheme} are, so it takes seconds."
        if beside
        else needs
    )
    hint = f"envserver env install {scheme}:{rest} (--with PACKAGE, if it is in one of its own)"
    return NotFoundError(text, hint=hint)


def _not_found(reference: str) -> NotFoundError:
    start, colon, rest = reference.partition(":")
    schemes = sorted(installed.integration_points())
    names = schemes if colon else known_names()
    near = difflib.get_close_matches(start if colon else reference, names, n=1)
    known = [*known_names(), *(f"{scheme}:NAME" for scheme in schemes), "a .py file", "a folder"]
    return NotFoundError(
        f"There is no environment {reference!r}.",
        hint=f"Did you mean {near[0] + colon + rest!r}?" if near else f"Known: {', '.join(known)}.",
    )


def _is_data(reference: str) -> bool:
    """Installed names and code win."""
    if reference in known_names() or is_environment_folder(Path(reference)):
        return False
    if installed.split(reference) is not None:
        return False
    return is_data(reference)


def is_path(reference: str) -> bool:
    """Whether `reference`, without its class name, is a file or folder; installed names win."""
    if reference.endswith(".py") or "/" in reference:
        return True
    names = {*known_names(), *installed.integration_points()}
    return reference not in names and is_environment_folder(Path(reference))


def absolute(reference: str) -> str:
    """`reference` in a form that another process, in another folder, understands."""
    path, colon, class_name = reference.partition(":")
    if (parts := installed.split(reference)) is not None:
        return installed.absolute(*parts)
    if _is_data(reference):
        return reference if path == "hub" else str(Path(reference).resolve())
    if not is_path(path):
        return reference
    made = str(Path(path).resolve())
    return f"{made}{colon}{class_name}" if made.endswith(".py") else f"{made}/{colon}{class_name}"


def make_environment(reference: str, config: dict[str, Any]) -> Environment:
    kind = find(reference)
    return kind(kind.Config.model_validate(config))


def interpreter_of(reference: str) -> Interpreter | None:
    """Returns the interpreter that an environment needs; None: the one of this process."""
    if reference in entry_point_names():
        return None
    package = with_own_interpreter().get(absolute(reference))
    return usable_interpreter(package[0]) if package is not None else None


def defines_environment(path: Path) -> bool:
    """Returns whether a .py file or a folder defines an environment, or several."""
    return bool(_environments_of(import_path(path)))


def _environments_of(modules: list[ModuleType]) -> dict[str, type[Environment]]:
    known: dict[str, type[Environment]] = {}
    for module in modules:
        for name, value in vars(module).items():
            ours = inspect.isclass(value) and same_folder(value.__module__, module.__name__)
            if ours and issubclass(value, Environment):
                known.setdefault(name, value)
    return known


def _load_path(path: Path, class_name: str, reference: str) -> type[Environment]:
    modules = import_path(path)
    known = _environments_of(modules)
    if class_name:
        if class_name not in known:
            raise ConfigError(
                f"{reference}: there is no environment class {class_name!r}.",
                hint=f"It has: {', '.join(known)}.",
            )
        return _checked(known[class_name], reference)
    # What is imported from a file beside it may be a base class.
    homes = {module.__name__ for module in modules}
    defined = {value for value in known.values() if value.__module__ in homes}
    candidates = defined or set(known.values())
    if len(candidates) != 1:
        raise ConfigError(
            f"{reference} defines {len(candidates)} environments; one is needed.",
            hint=f"Name one: {reference}:ClassName"
            if candidates
            else "Subclass envserver.Environment.",
        )
    return _checked(candidates.pop(), reference)


def _checked(environment: type[Environment], reference: str) -> type[Environment]:
    missing = ", ".join(sorted(environment.__abstractmethods__))
    levels = get_args(Isolation)
    if missing:
        raise ConfigError(f"{reference}: {environment.__name__} does not define {missing}.")
    for name, declared in vars(Environment).items():
        if inspect.isfunction(declared) and not name.startswith("_"):
            _check_method(environment, name, declared, reference)
    if environment.isolation not in levels:
        raise ConfigError(
            f"{reference}: isolation is {environment.isolation!r}.",
            hint=f"It must be one of {', '.join(levels)}.",
        )
    sandbox = environment.sandbox
    if not (sandbox is None or isinstance(sandbox, SandboxSpec) or hasattr(sandbox, "__get__")):
        raise ConfigError(
            f"{reference}: {environment.__name__}.sandbox is {sandbox!r}, not a SandboxSpec."
        )
    config = environment.Config
    if not (inspect.isclass(config) and issubclass(config, EnvironmentConfig)):
        raise ConfigError(
            f"{reference}: {environment.__name__}.Config is not derived from Environment.Config.",
            hint="Write: class Config(Environment.Config):",
        )
    try:
        config.model_rebuild()  # its class statement has not built it
    except Exception as error:  # pydantic's, or one of a type of the author's
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{reference}: {environment.__name__}.Config cannot be built: {reason}"
        ) from error
    return plain(environment)


def _check_method(
    environment: type[Environment], name: str, declared: Callable[..., Any], reference: str
) -> None:
    """Raises ConfigError for a method that cannot be called as `declared` is, or not waited for."""
    method = inspect.getattr_static(environment, name)
    if method is declared or not inspect.isfunction(method):
        return
    wanted = ", ".join(inspect.signature(declared).parameters)
    may_wait = "Await" in str(declared.__annotations__) or inspect.iscoroutinefunction(declared)
    waits = inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
    try:
        signature = inspect.signature(method, follow_wrapped=False)
    except (TypeError, ValueError):  # a decorator left a `__signature__` that is not one
        signature = inspect.signature(declared)
    try:
        signature.bind(*wanted.split(", "))
    except TypeError as error:
        problem = f"cannot be called with ({wanted}): {error}"
    else:
        if may_wait or not waits:
            return
        problem = "cannot be `async`"
    problem = f"{environment.__name__}.{name} {problem} {place_of(ConfigError(''), method)}"
    raise ConfigError(f"{reference}: {problem}", hint=f"Write: def {name}({wanted}):")


def misspelt(environment: type[Environment]) -> list[str]:
    """Returns a line for each name of the class that nothing calls and that is almost one of
    Environment's."""
    kinds = [kind for kind in environment.__mro__ if not kind.__module__.startswith("envserver.")]
    own = {name: value for kind in kinds for name, value in vars(kind).items()}
    known = [name for name in dir(Environment) if not name.startswith("_") and name not in own]
    return [
        f"{environment.__name__}.{name} is not one of Environment's: did you mean {near[0]!r}? "
        + place_of(ConfigError(""), value)
        for name, value in own.items()
        if inspect.isfunction(value)
        and not (name.startswith("_") or hasattr(Environment, name))
        and (near := difflib.get_close_matches(name, known, n=1, cutoff=0.85))
    ]


def _load_entry_point(point: EntryPoint) -> type[Environment]:
    try:
        loaded = point.load()
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"Entry point {point.name!r} ({point.value}) cannot be imported: {error}"
        ) from error
    if not (inspect.isclass(loaded) and issubclass(loaded, Environment)):
        raise ConfigError(
            f"Entry point {point.name!r} ({point.value}) is not an Environment subclass."
        )
    return _checked(loaded, point.name)
