"""Describes a merged model: `README.md` for people and the hub, `merge.json` for programs.

Inputs are named by their folder's name and the sha256 of their weights, never by a path.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from envserver.version import __version__

from .recipe import Recipe
from .tensors import Model
from .writing import RECIPE

_DIGITS: Final = 16
"""Digits of a sha256 in the card; merge.json has all."""


@dataclass(frozen=True)
class Input:
    """An input model: its part (base, rl, ...), the folder's name, sha256 by file."""

    name: str
    files: dict[str, str]


@dataclass(frozen=True)
class Facts:
    """The common facts of all models of one merge."""

    method: str
    inputs: list[Input]
    vectors: list[dict[str, Any]]
    notes: list[str]
    versions: dict[str, str]


@dataclass(frozen=True)
class Made:
    """One merged model: its formula, alpha, sha256 of its weights, and files copied from the
    base.
    """

    formula: str
    alpha: float | None
    files: dict[str, str]
    copied: list[str]


def facts_of(
    recipe: Recipe,
    models: Mapping[Path, Model],
    notes: Sequence[str],
    *,
    method: str = "task arithmetic",
    versions: Mapping[str, str] | None = None,
) -> Facts:
    """Collects the facts; reads every input's weights once more for their sha256."""
    digests: dict[Path, str] = {}
    inputs = []
    for folder, model in models.items():
        for path in model.files():
            digests[path] = digests.get(path) or digest_of(path)
        inputs.append(
            Input(_name(folder), {_file(folder, path): digests[path] for path in model.files()})
        )
    vectors = [
        {
            "plus": _name(one.plus),
            "minus": _name(one.minus or recipe.base),
            "weight": one.weight,
        }
        for one in recipe.vectors
    ]
    ours = {"envserver": __version__, "numpy": np.__version__, "python": platform.python_version()}
    return Facts(method, inputs, vectors, list(notes), {**ours, **(versions or {})})


def write_card(folder: Path, facts: Facts, made: Made) -> None:
    """Writes README.md and merge.json into a merged model's folder."""
    recipe = {**asdict(facts), **asdict(made)}
    text = json.dumps(recipe, indent=2, ensure_ascii=False) + "\n"
    (folder / RECIPE).write_text(text, encoding="utf-8")
    (folder / "README.md").write_text(_card(facts, made), encoding="utf-8")


def _card(facts: Facts, made: Made) -> str:
    lines = [
        "---",
        "library_name: transformers",
        "tags: [merge, task-arithmetic]" if made.alpha is not None else "tags: [merge, mergekit]",
        "---",
        "",
        "# Merged model",
        "",
        f"    {made.formula}",
        "",
    ]
    if made.alpha is not None:
        lines += [
            "Computed in float32 (float64 where a weight is), rounded once to the base's dtype.",
            "",
        ]
    lines += ["| input | weights | sha256 |", "|---|---|---|"]
    lines += [
        f"| {one.name} | {file} | `{digest[:_DIGITS]}` |"
        for one in facts.inputs
        for file, digest in one.files.items()
    ]
    lines += ["", *(f"- {note}." for note in facts.notes), *([""] if facts.notes else [])]
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    if made.copied:
        lines += [f"Copied from the base: {', '.join(made.copied)}.", ""]
    lines += [f"Made with {versions}; `{RECIPE}` has all of it.", ""]
    return "\n".join(lines)


def _name(folder: Path) -> str:
    return folder.name or folder.resolve().name


def _file(folder: Path, path: Path) -> str:
    return path.name if path.parent == folder else f"{path.parent.name}/{path.name}"


def digest_of(path: Path) -> str:
    """Returns the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
