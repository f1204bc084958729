"""Several LoRA adapters at once: each row of a batch may use another adapter, or none.

An adapter in PEFT's format (adapter_config.json, adapter_model.safetensors) adds scale * B A x to
the output of the layers it names. A hook on the layer does this for the rows that use the adapter;
the weights are never changed, so any number of adapters can be loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import torch
from envserver_records.errors import InputError, NotFoundError
from safetensors.torch import load_file

Part = tuple[slice | torch.Tensor, "Adapter"]
_ADAPTER, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_PLAIN = {"use_dora": False, "lora_bias": False, "bias": "none", "modules_to_save": None}
"""PEFT settings that must have these values, the only supported ones."""


class Adapter:
    """A loaded adapter. `layers`: layer name -> A [rank, in] and scaled B [out, rank]."""

    def __init__(
        self, name: str, folder: Path, layers: dict[str, tuple[torch.Tensor, ...]]
    ) -> None:
        self.name = name
        self.folder = folder
        self.layers = layers


class Adapters:
    """The adapters of a model by name."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._loaded: dict[str, Adapter] = {}
        self._hooked: set[str] = set()
        self._worn: list[Part] = []

    @property
    def loaded(self) -> list[Adapter]:
        """All loaded adapters, the oldest first."""
        return list(self._loaded.values())

    def find(self, name: str) -> Adapter | None:
        """Returns the current adapter called `name`; running rows keep the one they began with."""
        return self._loaded.get(name)

    def load(self, name: str, folder: Path, *, replace: bool = False) -> Adapter:
        """Loads the adapter in `folder` under `name`."""
        if name in self._loaded and not replace:
            raise InputError(
                f"The lora adapter {name!r} has already been loaded.",
                hint="Send load_inplace: true to load it anew.",
            )
        adapter = Adapter(name, folder, self._read(folder))
        for layer in adapter.layers:
            self._hook(layer)
        self._loaded[name] = adapter
        return adapter

    def unload(self, name: str) -> None:
        """Unloads an adapter; rows that use it keep it until they end.
        Raises NotFoundError: no adapter has this name.
        """
        if self._loaded.pop(name, None) is None:
            raise NotFoundError(f"The lora adapter {name!r} cannot be found.")

    @contextmanager
    def worn(self, adapters: Sequence[Adapter | None]) -> Iterator[None]:
        """Applies `adapters[i]` to row `i` of what the model computes inside the block."""
        self._worn = _parts(adapters, self._model)
        try:
            yield
        finally:
            self._worn = []

    def _hook(self, layer: str) -> None:
        if layer in self._hooked:
            return
        self._hooked.add(layer)

        def add(module: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> Any:
            if not self._worn:
                return None
            return _added(output, inputs[0], layer, self._worn)

        self._model.get_submodule(layer).register_forward_hook(add)

    def _read(self, folder: Path) -> dict[str, tuple[torch.Tensor, ...]]:
        config = _config(folder)
        try:
            tensors = load_file(folder / _ADAPTER)
        except (OSError, ValueError) as error:
            raise InputError(f"{folder / _ADAPTER} cannot be read: {error}.") from error
        pairs: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            layer, found, kind = key.removeprefix(_PREFIX).partition(".lora_")
            if not found or kind not in ("A.weight", "B.weight"):
                raise InputError(f"{folder / _ADAPTER} holds {key}, which is not part of a LoRA.")
            pairs.setdefault(layer, {})[kind[0]] = tensor
        return {layer: self._pair(layer, pair, config) for layer, pair in pairs.items()}

    def _pair(
        self, layer: str, pair: dict[str, torch.Tensor], config: dict[str, Any]
    ) -> tuple[torch.Tensor, ...]:
        try:
            module: Any = self._model.get_submodule(layer)
        except AttributeError as error:
            raise InputError(f"The model has no layer {layer}, which the adapter names.") from error
        weight = getattr(module, "weight", None)
        rank = pair["A"].shape[0] if pair.keys() == {"A", "B"} else 0
        expected = (getattr(module, "out_features", 0), getattr(module, "in_features", 0))
        if not rank or (pair["B"].shape[0], pair["A"].shape[1]) != expected:
            raise InputError(f"The adapter's part for {layer} does not fit the model's {expected}.")
        alpha = config.get("lora_alpha", rank)
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        dtype = weight.dtype if weight is not None and weight.is_floating_point() else torch.float32
        down = pair["A"].to(self._model.device, dtype)
        up = (pair["B"].to(torch.float32) * scale).to(self._model.device, dtype)
        return down, up


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = orjson.loads((folder / _CONFIG).read_bytes())
    except OSError as error:
        raise InputError(f"There is no LoRA adapter in {folder}: it has no {_CONFIG}.") from error
    except orjson.JSONDecodeError as error:
        raise InputError(f"{folder / _CONFIG} is not JSON: {error}.") from error
    foreign = [name for name, plain in _PLAIN.items() if config.get(name, plain) not in (plain, [])]
    foreign += [name for name in ("rank_pattern", "alpha_pattern") if config.get(name)]
    if foreign:
        raise InputError(f"The adapter in {folder} uses {', '.join(foreign)}: not known here.")
    return dict(config)


def _parts(adapters: Sequence[Adapter | None], model: torch.nn.Module) -> list[Part]:
    """Groups rows by adapter; rows without an adapter are in no part."""
    by_adapter: dict[int, tuple[Adapter, list[int]]] = {}
    for row, adapter in enumerate(adapters):
        if adapter is not None:
            by_adapter.setdefault(id(adapter), (adapter, []))[1].append(row)
    parts: list[Part] = []
    for adapter, rows in by_adapter.values():
        if len(rows) == len(adapters):
            parts.append((slice(None), adapter))
        else:
            parts.append((torch.tensor(rows, device=model.device), adapter))
    return parts


def _added(
    output: torch.Tensor, states: torch.Tensor, layer: str, parts: list[Part]
) -> torch.Tensor:
    """Returns the layer's output plus the adapters' contributions."""
    output = output.clone()
    for rows, adapter in parts:
        pair = adapter.layers.get(layer)
        if pair is not None:
            down, up = pair
            worn = states[rows].to(down.dtype)
            output[rows] += (worn @ down.T @ up.T).to(output.dtype)
    return output
