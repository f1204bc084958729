"""Loads an Inspect task and its samples.

In: what stands after `inspect:`, and the task's arguments. Out: Inspect's `Task`, and its samples
with the ids that Inspect would give them. It is loaded in the server's host process, in workers and
in scorers; `fingerprint` tells whether all of them have the same samples.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import inspect_ai._eval.loader as inspect_loader
import inspect_ai._util.entrypoints as entrypoints
from inspect_ai import Task
from inspect_ai._util.decorator import parse_decorators
from inspect_ai._util.registry import registry_lookup
from inspect_ai.dataset import Sample
from inspect_ai.util._display import init_display_type
from pydantic_core import to_json, to_jsonable_python

from envserver import ConfigError, EnvserverError, NotFoundError

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
    """Constructs the task, with its data set."""
    with _failures_of(spec):
        tasks = inspect_loader.load_tasks([spec], dict(arguments))
    if len(tasks) != 1:
        raise ConfigError(f"inspect:{spec} names {len(tasks)} tasks; one is needed.")
    if tasks[0].sample_source is not None:
        raise ConfigError(f"inspect:{spec} makes its samples while it runs, which is not possible.")
    return tasks[0]


@contextmanager
def _failures_of(spec: str) -> Iterator[None]:
    """Makes everything that a task's code raises a ConfigError."""
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


def public_part(sample: Sample) -> dict[str, Any]:
    """Returns what a worker may know of a sample: no target, no metadata."""
    text: Any = to_jsonable_python(sample.input, fallback=str, exclude_none=True)
    choices = {"choices": sample.choices} if sample.choices else {}
    return {"input": _without_ids(text), **choices, "fingerprint": fingerprint(sample)}


def hidden_part(sample: Sample) -> dict[str, Any]:
    """Returns what only a scorer may know."""
    metadata: Any = to_jsonable_python(sample.metadata or {}, fallback=str)
    return {"target": sample.target, "metadata": metadata}


def fingerprint(sample: Sample) -> str:
    """Returns a digest of what the model gets to see of a sample."""
    text = _without_ids(to_jsonable_python(sample.input, fallback=str, exclude_none=True))
    seen = to_json([text, sample.choices, sorted(sample.files or {})], fallback=str)
    return hashlib.blake2b(seen, digest_size=8).hexdigest()


def _without_ids(text: Any) -> Any:
    """Removes the random ids that Inspect gives to messages."""
    if isinstance(text, list):
        return [{name: each[name] for name in each if name != "id"} for each in text]
    return text
