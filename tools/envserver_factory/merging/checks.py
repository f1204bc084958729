"""Checks that models can be merged; all reasons against a merge are reported at once.

A tied output layer (`config.tie_word_embeddings`) may be stored or not: where the base stores
`lm_head.weight` and another model does not, that model's embedding is used; where only the other
model stores it, it must equal its embedding, else the merge would lose it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from envserver_records.errors import ConfigError, EnvserverError, InputError
from envserver_records.files import read_object, sha256_of
from envserver_records.tasks import Json

from .tensors import Model, Tensor, Weights, is_adapter
from .writing import Made, Recipe, appearing, check_places, facts_of, write_card

FAST = "tokenizer.json"
_OTHERS = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt")
_TEMPLATE = "chat_template.jinja"
_SHOWN_TOKENS = 4


def differences(base: Path, other: Path) -> list[str]:
    """Returns the differences of two tokenizers; none where a folder has no tokenizer."""
    if (base / FAST).is_file() and (other / FAST).is_file():
        if _same_bytes(base / FAST, other / FAST):
            return []
        return _of_fast(read_object(base / FAST), read_object(other / FAST))
    return [
        f"{name} is another file"
        for name in _OTHERS
        if (base / name).is_file()
        and (other / name).is_file()
        and not _same_bytes(base / name, other / name)
    ]


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (FAST, *_OTHERS))


def same_template(base: Path, other: Path) -> bool:
    """Whether both render conversations alike; True where one has no template file."""
    ours, theirs = base / _TEMPLATE, other / _TEMPLATE
    return not (ours.is_file() and theirs.is_file()) or _same_bytes(ours, theirs)


def _of_fast(base: Json, other: Json) -> list[str]:
    found = _of_ids(_vocabulary(base), _vocabulary(other), "token")
    found += _of_ids(_added(base), _added(other), "added token")
    merges = [_merges(model) for model in (base, other)]
    if merges[0] != merges[1]:
        found.append(f"its merges differ ({len(merges[0])} and {len(merges[1])} of them)")
    for part in ("normalizer", "pre_tokenizer"):
        if base.get(part) != other.get(part):
            found.append(f"its {part} differs")
    return found


def _of_ids(base: Json, other: Json, what: str) -> list[str]:
    missing = "has none"
    words = [
        f"{what} {name!r}: {base.get(name, missing)} in the base, {other.get(name, missing)} here"
        for name in [*base, *(name for name in other if name not in base)]
        if base.get(name) != other.get(name)
    ]
    more = len(words) - _SHOWN_TOKENS
    return [*words[:_SHOWN_TOKENS], *([f"... and {more} more"] if more > 0 else [])]


def _vocabulary(tokenizer: Json) -> Json:
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # Unigram: [piece, score], the id is the place
        return {str(entry[0]): number for number, entry in enumerate(vocabulary)}
    return dict(vocabulary)


def _added(tokenizer: Json) -> Json:
    return {
        str(token.get("content")): token.get("id") for token in tokenizer.get("added_tokens") or ()
    }


def _merges(tokenizer: Json) -> list[str]:
    """Returns the merges in one form: older files have `a b`, newer ones `[a, b]`."""
    merges = (tokenizer.get("model") or {}).get("merges") or []
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def _same_bytes(first: Path, other: Path) -> bool:
    return first.stat().st_size == other.stat().st_size and sha256_of(first) == sha256_of(other)


Names = Mapping[str, str | None]
"""Tensor of the base -> its name in another model; None where that model has none."""

_SHOWN = 5
_HEADS = ("lm_head.weight", "embed_out.weight")
_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
)
_MEANINGLESS = frozenset(
    (
        *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "auto_map"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unsloth_version", "unsloth_fixed"),
        *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
        *("initializer_range", "output_attentions", "output_hidden_states", "return_dict"),
        *("gradient_checkpointing", "_attn_implementation_autoset"),
    )
)
"""Config keys that say nothing about the meaning of weights."""
_ROWS_AT_A_TIME = 4096


@dataclass(frozen=True)
class Allowed:
    config: bool = False
    tokenizer: bool = False
    missing: bool = False


@dataclass
class _Found:
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, lines: Sequence[str], allowed: bool) -> None:
        (self.notes if allowed else self.problems).extend(lines)


def check(
    base: Model, others: Sequence[Model], allowed: Allowed
) -> tuple[dict[Path, Names], list[str]]:
    """Returns for each other model, by folder, its names of the tensors; and notes."""
    found = _Found()
    _check_alone(base, found)
    names = {}
    for other in others:
        _check_alone(other, found)
        names[other.folder] = _check_tensors(base, other, allowed, found)
        _check_config(base, other, allowed, found)
        _check_tokenizer(base, other, allowed, found)
    if found.problems:
        raise InputError(
            "These models cannot be added:\n"
            + "\n".join(f"- {problem}" for problem in found.problems),
            hint="Only models of one architecture and vocabulary have weights that mean the same.",
            problems=found.problems,
        )
    return names, list(dict.fromkeys(found.notes))


def read_config(folder: Path) -> Json:
    """Reads a model's config.json; empty where there is none (an adapter's folder)."""
    path = folder / "config.json"
    return read_object(path) if path.is_file() else {}


def _check_alone(model: Model, found: _Found) -> None:
    config = read_config(model.described_by)
    if "quantization_config" in config:
        found.problems.append(
            f"{model.folder.name} is quantised: merge the full weights and quantise the result."
        )
    head, embedding = _one_of(model, _HEADS), _one_of(model, _EMBEDDINGS)
    if _is_tied(config) and head and embedding and not _equal(model, head, embedding):
        found.problems.append(
            f"{model.folder.name} says that its output layer is tied to its embedding, but stores "
            f"another {head.name}: set tie_word_embeddings to false in its config.json, or save it "
            "anew."
        )


def _check_tensors(base: Model, other: Model, allowed: Allowed, found: _Found) -> Names:
    name = other.folder.name
    names: dict[str, str | None] = {}
    missing, shapes, dtypes = [], [], set()
    tied = _is_tied(read_config(base.described_by))
    for tensor in base.tensors.values():
        theirs = None if tied and tensor.name.endswith(_HEADS) else other.tensors.get(tensor.name)
        theirs = theirs or _tied(other, tensor)
        names[tensor.name] = theirs.name if theirs else None
        if theirs is None:
            missing.append(str(tensor))
        elif theirs.shape != tensor.shape:
            shapes.append(f"{tensor.name}: {list(tensor.shape)} and {list(theirs.shape)}")
        elif theirs.is_float != tensor.is_float or (
            not tensor.is_float and theirs.dtype != tensor.dtype
        ):
            shapes.append(f"{tensor.name}: {tensor.dtype} and {theirs.dtype}")
        elif theirs.dtype != tensor.dtype:
            dtypes.add(f"{theirs.dtype} to {tensor.dtype}")
    extra = [str(tensor) for tensor in other.tensors.values() if _is_extra(base, other, tensor)]
    found.add(_listed(f"{name} lacks tensors of the base", missing), allowed.missing)
    found.add(_listed(f"{name} has tensors that the base lacks", extra), allowed.missing)
    found.problems += _listed(f"{name} has tensors of other shapes (base's first)", shapes)
    if dtypes:
        found.notes.append(f"{name} is read from {', '.join(sorted(dtypes))} of the base")
    return names


def _tied(other: Model, tensor: Tensor) -> Tensor | None:
    """Returns what a model without a stored output layer uses in its place."""
    if not tensor.name.endswith(_HEADS):
        return None
    tied = read_config(other.described_by).get("tie_word_embeddings", True)
    return _one_of(other, _EMBEDDINGS) if tied else other.tensors.get(tensor.name)


def _is_extra(base: Model, other: Model, tensor: Tensor) -> bool:
    if tensor.name in base.tensors:
        return False
    embedding = _one_of(other, _EMBEDDINGS)
    if tensor.name.endswith(_HEADS) and embedding is not None:
        return not _equal(other, tensor, embedding)
    return True


def _check_config(base: Model, other: Model, allowed: Allowed, found: _Found) -> None:
    first, two = (_flat(read_config(model.described_by)) for model in (base, other))
    # What only one of them says may be a default that another version of transformers wrote.
    differing = [
        f"{key}: {json.dumps(first[key])} and {json.dumps(two[key])}"
        for key in sorted(first.keys() & two.keys())
        if key.split(".")[-1] not in _MEANINGLESS and first[key] != two[key]
    ]
    kinds = [line for line in differing if line.startswith(("model_type:", "architectures:"))]
    others = [line for line in differing if line not in kinds]
    found.problems += _listed(f"{other.folder.name} is another architecture", kinds)
    hint = "" if allowed.config else " (--allow_config_differences takes the base's)"
    words = f"the config of {other.folder.name} differs from the base's{hint}"
    found.add(_listed(words, others), allowed.config)


def _check_tokenizer(base: Model, other: Model, allowed: Allowed, found: _Found) -> None:
    name = other.folder.name
    differing = differences(base.folder, other.folder)
    hint = "" if allowed.tokenizer else " (--allow_tokenizer_differences takes the base's)"
    words = f"the tokenizer of {name} differs from the base's{hint}"
    found.add(_listed(words, differing, most=len(differing)), allowed.tokenizer)
    if not differing and not (has_tokenizer(base.folder) and has_tokenizer(other.folder)):
        found.notes.append(f"the tokenizers of {name} and the base could not be compared")
    if not same_template(base.folder, other.folder):
        found.notes.append(f"{name} has another chat template; the base's is kept")


def _is_tied(config: Json) -> bool:
    return bool(config.get("tie_word_embeddings", False))


def _one_of(model: Model, endings: Sequence[str]) -> Tensor | None:
    ends = tuple(endings)
    return next((tensor for name, tensor in model.tensors.items() if name.endswith(ends)), None)


def _equal(model: Model, first: Tensor, other: Tensor) -> bool:
    if first.shape != other.shape or first.dtype != other.dtype:
        return False
    for begin in range(0, first.rows, _ROWS_AT_A_TIME):
        end = min(first.rows, begin + _ROWS_AT_A_TIME)
        if model.raw(first.name, begin, end) != model.raw(other.name, begin, end):
            return False
    return True


def _flat(tree: Json, prefix: str = "") -> Json:
    flat: Json = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _listed(what: str, lines: Sequence[str], most: int = _SHOWN) -> list[str]:
    if not lines:
        return []
    more = len(lines) - most
    shown = "; ".join(lines[:most]) + (f"; and {more} more" if more > 0 else "")
    return [f"{what}: {shown}"]


PROGRAM = "mergekit-yaml"
CONFIG = "mergekit_config.yml"
_STDERR = 2
_BETWEEN_TWO = ("slerp", "nearswap", "arcee_fusion")
_WITHOUT_BASE = ("linear", "multislerp", "karcher")


@dataclass(frozen=True)
class Method:
    """A method of mergekit; `density`: share of each difference that is kept."""

    name: str
    density: float | None = None
    parameters: Json = field(default_factory=dict)


def merge_with(
    method: Method,
    recipe: Recipe,
    place: Path,
    *,
    allowed: Allowed | None = None,
    overwrite: bool = False,
) -> list[str]:
    """Runs mergekit, whose output goes to this process's stderr; returns notes on the inputs."""
    config = config_of(method, recipe)
    program = find_program()
    with ExitStack() as stack:
        base = stack.enter_context(Weights(recipe.base))
        others = {
            vector.plus: stack.enter_context(Weights(vector.plus)) for vector in recipe.vectors
        }
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
                files = {path.name: sha256_of(path) for path in made.files()}
            text = yaml.safe_dump(_portable(config), sort_keys=False)
            (folder / CONFIG).write_text(text, encoding="utf-8")
            formula = f"{method.name} of {', '.join(_names(recipe))}, by mergekit ({CONFIG})"
            write_card(folder, facts, Made(formula, None, files, []))
    return notes


def config_of(method: Method, recipe: Recipe) -> Json:
    if any(vector.minus is not None for vector in recipe.vectors) or recipe.alphas != (1.0,):
        raise ConfigError(
            f"--method {method.name} takes models with weights: --add DIR=0.5.",
            hint="--rl, --sft and --alpha are for --method arithmetic.",
        )
    if any(vector.plus.is_file() for vector in recipe.vectors):
        raise ConfigError(f"--method {method.name} takes models, not the file of a task vector.")
    adapters = [vector.plus for vector in recipe.vectors if is_adapter(vector.plus)]
    if adapters:
        raise ConfigError(
            f"{adapters[0]} is an adapter; --method {method.name} is given whole models.",
            hint="`envserver merge --base BASE --add ADAPTER --out DIR` makes one of it.",
        )
    models: list[Json] = [_model(vector.plus, vector.weight, method) for vector in recipe.vectors]
    parameters = dict(method.parameters)
    config: Json = {"merge_method": method.name}
    if method.name in _BETWEEN_TWO:
        if len(models) != 1:
            raise ConfigError(f"--method {method.name} needs the base and exactly one --add.")
        models = [
            {"model": str(folder.resolve())} for folder in (recipe.base, recipe.vectors[0].plus)
        ]
        if method.name != "arcee_fusion":
            parameters.setdefault("t", recipe.vectors[0].weight)
    if method.name not in _WITHOUT_BASE:
        config["base_model"] = str(recipe.base.resolve())
    config["models"] = models
    if parameters:
        config["parameters"] = parameters
    return config


def find_program() -> str:
    beside = Path(sys.executable).with_name(PROGRAM)
    found = shutil.which(PROGRAM) or (str(beside) if beside.is_file() else None)
    if found is None:
        raise ConfigError(
            f"Methods other than arithmetic need mergekit, but there is no {PROGRAM}.",
            hint="pip install mergekit (a separate environment is fine: put it on the PATH)",
        )
    return found


def _model(folder: Path, weight: float, method: Method) -> Json:
    parameters: Json = {"weight": weight}
    if method.density is not None:
        parameters["density"] = method.density
    return {"model": str(folder.resolve()), "parameters": parameters}


def _run(program: str, config: Json, folder: Path) -> str:
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


def _portable(config: Json) -> Json:
    models = [{**entry, "model": Path(entry["model"]).name} for entry in config["models"]]
    portable = {**config, "models": models}
    if "base_model" in config:
        portable["base_model"] = Path(config["base_model"]).name
    return portable


def _names(recipe: Recipe) -> list[str]:
    return [
        recipe.base.name,
        *(f"{vector.plus.name} ({vector.weight:g})" for vector in recipe.vectors),
    ]
