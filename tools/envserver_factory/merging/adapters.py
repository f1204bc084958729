"""LoRA adapters, as the models they make of their base.

In: a PEFT folder (`adapter_config.json`, `adapter_model.safetensors`) and its base model. Out: the
base's tensors with `scaling * B A` added where the adapter has one, row by row as they are read,
and with the tensors replaced that the adapter saved whole (`modules_to_save`, biases). An adapter
with other features is refused, never misread.

The names in the files and the scaling (`lora_alpha / r`, with `use_rslora` `lora_alpha / sqrt(r)`,
patterns of ranks and alphas) are those of huggingface/peft.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from envserver_records.errors import InputError, NotFoundError

from .tensors import SIZES, File, Floats, Model, Tensor, decoded, read_header

CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_PART: Final = re.compile(
    r"(?P<module>.+?)(?:\.base_layer)?\.lora_(?:embedding_)?(?P<side>[AB])(?:\.default)?(?:\.weight)?"
)
_CHANGES_BASE: Final = ("pissa", "olora", "loftq", "corda", "lora_ga")
_REFUSED: Final = (
    "use_dora",
    "use_qalora",
    "lora_bias",
    "layer_replication",
    "megatron_config",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "arrow_config",
)
_HINT: Final = "Load it with peft, call merge_and_unload() and save_pretrained(), and name that."


@dataclass(frozen=True)
class _Pair:
    """`scaling * B A`, [rows of the weight, columns of it]; transposed where the weight is."""

    a: Tensor
    b: Tensor
    scaling: float
    turned: bool

    @property
    def shape(self) -> tuple[int, ...]:
        shape = (self.b.shape[0], self.a.shape[1])
        return shape[::-1] if self.turned else shape


class Adapted:
    """A model with an adapter merged in; see `Model`."""

    def __init__(self, folder: Path, below: Model) -> None:
        self.folder = folder
        self.described_by = below.described_by
        self._below = below
        self._config = read_adapter_config(folder)
        _refuse(folder, self._config)
        header = _header(folder)
        self._whole: dict[str, Tensor] = {}
        self._pairs: dict[str, _Pair] = {}
        self._factors: tuple[str, Floats, Floats] | None = None
        self._take(header)
        self.tensors = {
            name: Tensor(name, self._whole[name].dtype, tensor.shape, tensor.file, tensor.start)
            if name in self._whole
            else tensor
            for name, tensor in below.tensors.items()
        }

    def files(self) -> list[Path]:
        return [self.folder / _WEIGHTS, *self._below.files()]

    def raw(self, name: str, begin: int, end: int) -> bytes:
        """See `Model`; for tensors that the adapter does not change."""
        return self._below.raw(name, begin, end)

    def values(self, name: str, begin: int, end: int) -> Floats:
        # peft saves an embedding whole beside its factors.
        whole = self._whole.get(name)
        values = _rows(whole, begin, end) if whole else self._below.values(name, begin, end)
        pair = self._pairs.get(name)
        if pair is None:
            return values
        a, b = self._factors_of(name, pair)
        part = a[:, begin:end].T @ b.T if pair.turned else b[begin:end] @ a
        return values + part.reshape(-1) * np.asarray(pair.scaling, dtype=part.dtype)

    def _factors_of(self, name: str, pair: _Pair) -> tuple[Floats, Floats]:
        if self._factors is None or self._factors[0] != name:
            a, b = (_rows(one, 0, one.rows).reshape(one.shape) for one in (pair.a, pair.b))
            self._factors = (name, a, b)
        return self._factors[1], self._factors[2]

    def _take(self, header: File) -> None:
        sides: dict[str, dict[str, Tensor]] = {}
        for tensor in header.tensors:
            name = tensor.name.removeprefix(_PREFIX)
            if found := _PART.fullmatch(name):
                sides.setdefault(found["module"], {})[found["side"]] = tensor
            elif "lora_" in name:
                raise InputError(
                    f"{header.path}: {tensor.name} is of no LoRA known here.", hint=_HINT
                )
            else:
                self._add_whole(name.replace(".base_layer", ""), tensor)
        for module, pair in sides.items():
            self._add_pair(header.path, module, pair)

    def _add_whole(self, name: str, tensor: Tensor) -> None:
        name = self._known(name.replace(".modules_to_save.default", ""), tensor.file)
        if self._below.tensors[name].shape != tensor.shape:
            raise InputError(f"{tensor.file}: {tensor} does not fit {self._below.tensors[name]}.")
        self._whole[name] = tensor

    def _add_pair(self, path: Path, module: str, sides: Mapping[str, Tensor]) -> None:
        name = self._known(f"{module}.weight", path)
        if set(sides) != {"A", "B"} or any(len(one.shape) != 2 for one in sides.values()):
            raise InputError(f"{path}: {module} is not a pair of two matrices.", hint=_HINT)
        a, b = sides["A"], sides["B"]
        embedding = "lora_embedding_A" in a.name
        turned = embedding or bool(self._config.get("fan_in_fan_out"))
        pair = _Pair(a, b, self._scaling(module, a.shape[0]), turned)
        weight = self._below.tensors[name]
        if b.shape[1] != a.shape[0] or pair.shape != weight.shape or not weight.is_float:
            raise InputError(
                f"{path}: {module} is for a weight of {list(pair.shape)}, the model's is {weight}."
            )
        self._pairs[name] = pair

    def _known(self, name: str, path: Path) -> str:
        if name not in self._below.tensors:
            raise InputError(
                f"{path} is for {name}, which {self._below.folder.name} has not.",
                hint="An adapter is merged into the model that it was trained on.",
            )
        return name

    def _scaling(self, module: str, rank: int) -> float:
        config = self._config
        alpha = _by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", 8))
        said = _by_pattern(config.get("rank_pattern"), module, config.get("r", 8))
        if said != rank:
            raise InputError(
                f"{self.folder / CONFIG} says rank {said} of {module}, the weights have {rank}."
            )
        return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def is_adapter(folder: Path) -> bool:
    """Returns whether a folder holds an adapter rather than a model."""
    return (folder / CONFIG).is_file()


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Reads adapter_config.json. Raises InputError: it cannot be read."""
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / CONFIG} cannot be read: {error}.") from error
    if not isinstance(found, dict):
        raise InputError(f"{folder / CONFIG} is not an object.")
    return found


def _refuse(folder: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise InputError(f"{folder} is an adapter of the kind {kind}, not LORA.", hint=_HINT)
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise InputError(f"{folder}: its start, {start}, changed its base.", hint=_HINT)
    for name in _REFUSED:
        if config.get(name):
            raise InputError(f"{folder}: an adapter with {name} is not read here.", hint=_HINT)


def _header(folder: Path) -> File:
    if not (folder / _WEIGHTS).is_file():
        raise NotFoundError(
            f"{folder} holds no {_WEIGHTS}.", hint="Save the adapter with save_pretrained."
        )
    return read_header(folder / _WEIGHTS)


def _by_pattern(patterns: Any, module: str, otherwise: Any) -> Any:
    """Applies PEFT's rule: the first pattern that ends the module's name, at a dot."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return otherwise


def _rows(tensor: Tensor, begin: int, end: int) -> Floats:
    row = tensor.row_size * SIZES[tensor.dtype]
    with tensor.file.open("rb") as file:
        file.seek(tensor.start + begin * row)
        return decoded(file.read((end - begin) * row), tensor.dtype)
