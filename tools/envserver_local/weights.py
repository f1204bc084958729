"""Loads new weights into a running model from a folder of safetensors.

Everything is checked before anything changes: the folder must hold every parameter in its shape and
nothing else. Tied weights are one tensor and may be given under either name or both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from envserver_records.errors import InputError
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

_PATTERN = "*.safetensors"


def reload(model: PreTrainedModel, folder: Path) -> None:
    """Loads the weights in `folder` into `model`."""
    if getattr(model, "is_quantized", False):
        raise InputError(
            "The weights of a model in 4 bits cannot be replaced.",
            hint="Train LoRA adapters, or serve the model without --load-in-4bit.",
        )
    targets = dict(model.state_dict(keep_vars=True))
    with _opened(folder) as tensors:
        _check(targets, tensors, folder)
        with torch.no_grad():
            for name, file in tensors.items():
                targets[name].copy_(file.get_tensor(name))


@contextmanager
def _opened(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the names of the tensors in a folder, each with the open file that holds it."""
    files = sorted(folder.glob(_PATTERN)) if folder.is_dir() else []
    if not files:
        raise InputError(
            f"There are no weights in {folder}: no file is called {_PATTERN}.",
            hint="Save them there with model.save_pretrained(folder).",
        )
    with ExitStack() as stack:
        found: dict[str, Any] = {}
        for path in files:
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise InputError(f"{path} cannot be read: {error}.") from error
            found.update(dict.fromkeys(file.keys(), file))
        yield found


def _check(targets: dict[str, torch.Tensor], tensors: dict[str, Any], folder: Path) -> None:
    """Checks names, shapes and the values of tied weights."""
    if foreign := sorted(tensors.keys() - targets.keys()):
        raise InputError(f"{folder} holds {_some(foreign)}, which the model does not have.")
    by_tensor: dict[int, list[str]] = {}
    for name, target in targets.items():
        by_tensor.setdefault(target.data_ptr(), []).append(name)
    given = [[name for name in names if name in tensors] for names in by_tensor.values()]
    if missing := [
        names[0] for names, own in zip(by_tensor.values(), given, strict=True) if not own
    ]:
        raise InputError(f"{folder} lacks {_some(missing)}.")
    for name, file in tensors.items():
        shape = tuple(file.get_slice(name).get_shape())
        if shape != tuple(targets[name].shape):
            raise InputError(
                f"{name} in {folder} has the shape {shape}, not {tuple(targets[name].shape)}."
            )
    for first, *others in (names for names in given if len(names) > 1):
        for other in others:
            if not torch.equal(tensors[first].get_tensor(first), tensors[other].get_tensor(other)):
                raise InputError(
                    f"{first} and {other} differ in {folder}, and are one tensor in the model.",
                    hint="Save the model with tied weights, or serve one that has none.",
                )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
