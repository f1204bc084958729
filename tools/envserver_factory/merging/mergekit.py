"""Methods other than arithmetic (ties, dare_ties, slerp, ...), by mergekit where it is installed.

In: a base and others with weights. Out: the folder that `mergekit-yaml CONFIG FOLDER` writes,
complete or absent, with our card. Our checks of tensors, configs and tokenizers come first. The
YAML's form is that of arcee-ai/mergekit's README and docs/merge_methods.md; mergekit requires torch
and is not part of any extra.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml
from envserver_records.errors import ConfigError, EnvserverError

from .adapters import is_adapter
from .card import Made, digest_of, facts_of, write_card
from .checks import Allowed, check
from .recipe import Recipe
from .tensors import Weights
from .writing import appearing, check_places

PROGRAM: Final = "mergekit-yaml"
CONFIG: Final = "mergekit_config.yml"
_STDERR: Final = 2
_BETWEEN_TWO: Final = ("slerp", "nearswap", "arcee_fusion")
_WITHOUT_BASE: Final = ("linear", "multislerp", "karcher")


@dataclass(frozen=True)
class Method:
    """A method of mergekit.

    Args:
        name: mergekit's `merge_method`.
        density: share of each difference that is kept; unset: the method's default.
        parameters: further parameters, for all models.
    """

    name: str
    density: float | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)


def merge_with(
    method: Method,
    recipe: Recipe,
    place: Path,
    *,
    allowed: Allowed | None = None,
    overwrite: bool = False,
) -> list[str]:
    """Runs mergekit, whose output goes to this process's stderr.

    Returns:
        Notes on harmless differences between the inputs.
    """
    config = config_of(method, recipe)
    program = find_program()
    with ExitStack() as stack:
        base = stack.enter_context(Weights(recipe.base))
        others = {one.plus: stack.enter_context(Weights(one.plus)) for one in recipe.vectors}
        _, notes = check(base, list(others.values()), allowed or Allowed())
        size = sum(tensor.size for tensor in base.tensors.values())
        check_places([place], size, overwrite=overwrite)
        with appearing([place]) as (folder,):
            version = _run(program, config, folder)
            with Weights(folder) as made:
                facts = facts_of(
                    recipe,
                    {recipe.base: base, **others},
                    notes,
                    method=method.name,
                    versions={"mergekit": version},
                )
                files = {path.name: digest_of(path) for path in made.files()}
            text = yaml.safe_dump(_portable(config), sort_keys=False)
            (folder / CONFIG).write_text(text, encoding="utf-8")
            formula = f"{method.name} of {', '.join(_names(recipe))}, by mergekit ({CONFIG})"
            write_card(folder, facts, Made(formula, None, files, []))
    return notes


def config_of(method: Method, recipe: Recipe) -> dict[str, Any]:
    """Returns mergekit's configuration."""
    if any(one.minus is not None for one in recipe.vectors) or recipe.alphas != (1.0,):
        raise ConfigError(
            f"--method {method.name} takes models with weights: --add DIR=0.5.",
            hint="--rl, --sft and --alpha are for --method arithmetic.",
        )
    if any(one.plus.is_file() for one in recipe.vectors):
        raise ConfigError(f"--method {method.name} takes models, not the file of a task vector.")
    adapters = [one.plus for one in recipe.vectors if is_adapter(one.plus)]
    if adapters:
        raise ConfigError(
            f"{adapters[0]} is an adapter; --method {method.name} is given whole models.",
            hint="`envserver merge --base BASE --add ADAPTER --out DIR` makes one of it.",
        )
    models: list[dict[str, Any]] = [_model(one.plus, one.weight, method) for one in recipe.vectors]
    parameters = dict(method.parameters)
    config: dict[str, Any] = {"merge_method": method.name}
    if method.name in _BETWEEN_TWO:
        if len(models) != 1:
            raise ConfigError(f"--method {method.name} is of the base and one --add.")
        models = [{"model": str(one.resolve())} for one in (recipe.base, recipe.vectors[0].plus)]
        if method.name != "arcee_fusion":
            parameters.setdefault("t", recipe.vectors[0].weight)
    if method.name not in _WITHOUT_BASE:
        config["base_model"] = str(recipe.base.resolve())
    config["models"] = models
    if parameters:
        config["parameters"] = parameters
    return config


def find_program() -> str:
    """Finds the program."""
    beside = Path(sys.executable).with_name(PROGRAM)
    found = shutil.which(PROGRAM) or (str(beside) if beside.is_file() else None)
    if found is None:
        raise ConfigError(
            f"Only --method arithmetic is ours; others are mergekit's, and there is no {PROGRAM}.",
            hint="pip install mergekit (a separate environment is fine: put it on the PATH)",
        )
    return found


def _model(folder: Path, weight: float, method: Method) -> dict[str, Any]:
    parameters: dict[str, Any] = {"weight": weight}
    if method.density is not None:
        parameters["density"] = method.density
    return {"model": str(folder.resolve()), "parameters": parameters}


def _run(program: str, config: Mapping[str, Any], folder: Path) -> str:
    """Runs the program; returns mergekit's version, as far as known."""
    path = folder.with_name(CONFIG)
    path.write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")
    done = subprocess.run([program, str(path), str(folder)], stdout=_STDERR, check=False)
    if done.returncode != 0:
        raise EnvserverError(
            f"{PROGRAM} ended with status {done.returncode}; its output is above.",
            hint="Nothing was written.",
        )
    return _version(program)


def _version(program: str) -> str:
    libraries = Path(program).resolve().parent.parent.glob("lib/python*/site-packages/mergekit-*")
    names = sorted(path.name.split("-")[1].removesuffix(".dist") for path in libraries)
    return names[0] if names else "unknown"


def _portable(config: Mapping[str, Any]) -> dict[str, Any]:
    models = [{**one, "model": Path(one["model"]).name} for one in config["models"]]
    portable = {**config, "models": models}
    if "base_model" in config:
        portable["base_model"] = Path(config["base_model"]).name
    return portable


def _names(recipe: Recipe) -> list[str]:
    return [recipe.base.name, *(f"{one.plus.name} ({one.weight:g})" for one in recipe.vectors)]
