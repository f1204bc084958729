"""Rewards from the values of Inspect's scorers.

    "C" 1, "P" 0.5, "I" and "N" 0, true 1, false 0, "yes"/"true" 1, "no"/"false" 0
    a number, or a string that is one: itself
    a dict or list: one value per entry, SCORER/KEY
    NaN or None: Inspect's "unscored"

`--env.lowest_value` to `--env.highest_value` become 0 to 1. The reward is the mean of the values by
`--env.weights`; without weights, the one scorer's value, and of a dict or list the mean.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import inspect_ai._eval.loader as inspect_loader
import inspect_ai._util.entrypoints as entrypoints
from envserver_records.tasks import Json
from inspect_ai import Task
from inspect_ai._util.decorator import parse_decorators
from inspect_ai._util.registry import registry_lookup
from inspect_ai.dataset import Sample
from inspect_ai.util._display import init_display_type
from pydantic_core import to_json, to_jsonable_python

from envserver import ConfigError, EnvserverError, NotFoundError, Score

_WORDS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
_YES_NO = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}


def as_score(
    values: Mapping[str, Any], weights: Mapping[str, float], bounds: tuple[float, float]
) -> Score:
    """The score of a rollout, without a reward if Inspect left it unscored. `weights` are by SCORER
    or SCORER/KEY; empty: there is one scorer. `bounds` become 0 and 1."""
    parts = {name: _parts(name, value, bounds) for name, value in values.items()}
    components = {each: number for part in parts.values() for each, number in part.items()}
    means = {name: sum(part.values()) / len(part) for name, part in parts.items() if part}
    weights = weights or dict.fromkeys(values, 1.0)
    known = {**means, **components}
    unknown = [name for name in weights if name not in known]
    if unknown:
        raise ConfigError(
            f"--env.weights names {', '.join(unknown)}, which no scorer of the task gave.",
            hint=f"There are: {', '.join(known)}.",
        )
    reward = math.fsum(known[name] * weight for name, weight in weights.items())
    reward /= math.fsum(weights.values())
    numbers = {name: number for name, number in components.items() if not math.isnan(number)}
    return Score(reward=None if math.isnan(reward) else reward, components=numbers)


def _parts(name: str, value: Any, bounds: tuple[float, float]) -> dict[str, float]:
    if isinstance(value, Mapping):
        named = {f"{name}/{key}": part for key, part in value.items()}
        return {each: _number(each, part, bounds) for each, part in named.items()}
    if isinstance(value, list | tuple):
        return _parts(name, dict(enumerate(value)), bounds)
    return {name: _number(name, value, bounds)}


def _number(name: str, value: Any, bounds: tuple[float, float]) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        if (word := _WORDS.get(value, _YES_NO.get(value.lower()))) is not None:
            return word
        try:
            value = float(value)
        except ValueError:
            message = f"The scorer {name} gave {value[:80]!r}, which is not a number."
            raise ConfigError(message) from None
    if not isinstance(value, int | float):
        raise ConfigError(f"The scorer {name} gave a {type(value).__name__}.")
    if math.isnan(value):
        return math.nan
    low, high = bounds
    if not low <= value <= high:
        raise ConfigError(
            f"The scorer {name} gave {value:g}, which is not between {low:g} and {high:g}.",
            hint="--env.lowest_value and --env.highest_value set the range.",
        )
    return (float(value) - low) / (high - low)


init_display_type("none")
# Inspect would import all installed packages of evaluations to look for hooks and the like; a
# package that a task names is still found.
entrypoints._inspect_ai_eps_loaded.append(None)


def check_exists(spec: str) -> str:
    """Imports the code of a task; returns the docstring of its function."""
    path, _, name = spec.partition("@")
    with _failures_of(spec):
        if path.endswith(".py"):
            if not Path(path).is_file():
                raise NotFoundError(f"There is no file {path}.")
            names = [each for each, *_ in parse_decorators(Path(path), "task")]
            if name not in names and (name or len(names) != 1):
                raise NotFoundError(
                    f"{path} defines no task {name!r}." if name else f"{path}: which task?",
                    hint=f"Its tasks: {', '.join(f'{path}@{each}' for each in names) or 'none'}.",
                )
            inspect_loader.load_file_tasks(Path(path))
            name = name or names[0]
            return str(getattr(registry_lookup("task", name), "__doc__", "") or "")
        if "/" not in spec:
            raise NotFoundError(
                f"{spec!r} does not name an Inspect task.",
                hint="Name package/task (inspect_evals/gsm8k) or path/to/file.py@task.",
            )
        _import_module_of(spec)
        function = registry_lookup("task", spec)
    if function is None:
        raise NotFoundError(
            f"There is no Inspect task {spec!r}.",
            hint=f"Is its package installed? envserver env install inspect:{spec} --with PACKAGE",
        )
    return str(getattr(function, "__doc__", "") or "")


def _import_module_of(spec: str) -> None:
    """Imports the module that probably defines `package/name`: `package.name`, or that of the
    longest beginning of the name. `registry_lookup` would import the whole package."""
    package, _, name = spec.partition("/")
    words = name.split("_")
    with suppress(ModuleNotFoundError):
        for count in range(len(words), 0, -1):
            module = f"{package}.{'_'.join(words[:count])}"
            if importlib.util.find_spec(module) is not None:
                importlib.import_module(module)
                return


def load(spec: str, arguments: Mapping[str, Any]) -> Task:
    with _failures_of(spec):
        tasks = inspect_loader.load_tasks([spec], dict(arguments))
    if len(tasks) != 1:
        raise ConfigError(f"inspect:{spec} names {len(tasks)} tasks; one is needed.")
    if tasks[0].sample_source is not None:
        raise ConfigError(f"inspect:{spec} makes its samples while it runs, which is not possible.")
    return tasks[0]


@contextmanager
def _failures_of(spec: str) -> Iterator[None]:
    try:
        yield
    except EnvserverError:
        raise
    except Exception as error:
        raise ConfigError(
            f"The Inspect task {spec!r} cannot be loaded: {type(error).__name__}: {error}",
            hint="Arguments of the task are --env.args.NAME VALUE; some tasks download their data.",
        ) from error


def samples_by_id(task: Task) -> dict[str, Sample]:
    """Returns the task's samples by id; one without an id gets its position, from 1."""
    samples: dict[str, Sample] = {}
    for position, sample in enumerate(task.dataset, start=1):
        sample.id = position if sample.id is None else sample.id
        if str(sample.id) in samples:
            raise ConfigError(f"The data set has two samples with the id {str(sample.id)!r}.")
        samples[str(sample.id)] = sample
    return samples


def public_part(sample: Sample) -> Json:
    """Returns what a worker may know of a sample: no target, no metadata."""
    text: Any = to_jsonable_python(sample.input, fallback=str, exclude_none=True)
    choices = {"choices": sample.choices} if sample.choices else {}
    return {"input": _without_ids(text), **choices, "fingerprint": fingerprint(sample)}


def hidden_part(sample: Sample) -> Json:
    metadata: Any = to_jsonable_python(sample.metadata or {}, fallback=str)
    return {"target": sample.target, "metadata": metadata}


def fingerprint(sample: Sample) -> str:
    """Returns a digest of what the model gets to see of a sample."""
    text = _without_ids(to_jsonable_python(sample.input, fallback=str, exclude_none=True))
    seen = to_json([text, sample.choices, sorted(sample.files or {})], fallback=str)
    return hashlib.blake2b(seen, digest_size=8).hexdigest()


def _without_ids(text: Any) -> Any:
    if isinstance(text, list):
        return [{name: each[name] for name in each if name != "id"} for each in text]
    return text
