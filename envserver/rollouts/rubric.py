"""Another way of scoring than the environment's own: a class in a file, loaded by the scorers.

    class Shorter:
        def __init__(self, environment):
            self.environment = environment

        def score(self, task, result):
            score = self.environment.score(task, result)
            return Score(reward=score.reward * (0.5 if result.turns > 4 else 1.0))

`score` is as of `Environment` and may be `async`; `score_group`, where there is one, has the last
word on a group; `environment.judge` asks a model (`--judge.*`); `prepare_scoring` loads libraries
before the first score. The constructor takes the environment, or nothing. A subclass of Environment
is a rubric, too: it is made with the environment's settings.
"""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

from envserver_records.errors import ConfigError, EnvserverError, NotFoundError

from ..environment import Environment
from ..folders import import_path


def with_rubric(environment: Environment, reference: str) -> Environment:
    """`environment`, scoring as the class says that `reference` names.

    Args:
        reference: `path/to/file.py:Class`, or without the class where the file has only one.

    Raises:
        NotFoundError: there is no such file.
        ConfigError: it cannot be imported, has no such class, or that has no `score`.
    """
    made = _made(rubric_class(reference), environment, reference)
    if isinstance(made, Environment):
        if hasattr(environment, "sandboxes"):
            made.sandboxes = environment.sandboxes
        if hasattr(environment, "judge"):
            made.judge = environment.judge
        return made
    scorer = copy.copy(environment)  # the rubric's own goes on scoring as it did
    for name in ("score", "score_group", "prepare_scoring"):
        if callable(method := getattr(made, name, None)):
            setattr(scorer, name, method)
    return scorer


def rubric_class(reference: str) -> type[Any]:
    """The class that `reference` names. Raises like `with_rubric`."""
    path, _, name = reference.partition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise NotFoundError(
            f"There is no rubric {reference!r}.", hint="Name it as path/to/file.py:Class."
        )
    (module,) = import_path(Path(path))
    found = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value)
        and value.__module__ == module.__name__
        and callable(getattr(value, "score", None))
    }
    if name in found:
        return found[name]
    if name or len(found) != 1:
        known = ", ".join(found) or "none"
        wanted = f"no class {name!r} with a `score`" if name else f"{len(found)} such classes"
        raise ConfigError(
            f"{reference}: there is {wanted}.", hint=f"Classes with a `score`: {known}."
        )
    return next(iter(found.values()))


def _made(kind: type[Any], environment: Environment, reference: str) -> Any:
    try:
        if issubclass(kind, Environment):
            config = environment.config.model_dump(mode="json")
            known = {key: config[key] for key in kind.Config.model_fields if key in config}
            return kind(kind.Config.model_validate(known))
        takes_one = bool(inspect.signature(kind).parameters)
        return kind(environment) if takes_one else kind()
    except EnvserverError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"The rubric {reference} cannot be made: {type(error).__name__}: {error}",
            hint="Its constructor takes the environment, or nothing.",
        ) from error
