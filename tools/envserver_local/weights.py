"""Loads new weights into a running model: from a folder, or from a trainer over gloo; and adapters.

Everything is checked before anything changes: a folder of safetensors must hold every parameter in
its shape and nothing else. Tied weights are one tensor and may be given under either name or both.
Over gloo, by the routes of vLLM's weight-transfer API, only a paused model receives, and
`must_be_whole` refuses to sample until a whole version was received or loaded.

An adapter in PEFT's format (adapter_config.json, adapter_model.safetensors) adds scale * B A x to
the output of the layers it names. A hook on the layer does this for the rows that use the adapter;
the weights are never changed, so any number of adapters can be loaded.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from envserver_records.errors import EngineRefused, InputError, NotFoundError
from envserver_records.files import read_object
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import PreTrainedModel

from envserver.models.vllm_worker.envserver_gloo import BucketInfo, JoinInfo, join, receive

_PATTERN = "*.safetensors"


def reload(model: PreTrainedModel, folder: Path) -> None:
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


class Receiver:
    """Changes the weights of `model`; used by the engine's thread only.

    `incomplete`: the weights are of more than one version.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.incomplete = False
        self._model = model
        self._group: Any = None
        self._missing: set[int] | None = None
        """Addresses of the tensors that were not received yet; None: no update is open."""

    def join(self, info: dict[str, Any]) -> None:
        """Connects to a trainer, instead of the one before."""
        if getattr(self._model, "is_quantized", False):
            raise _refused("The weights of a model in 4 bits cannot be replaced.")
        self._group = None
        try:
            self._group = join(JoinInfo(**info), 0)
        except (TypeError, ValueError, OverflowError) as error:
            raise _refused(f"`init_info` cannot be used: {error}.", 400) from error
        except (RuntimeError, OSError) as error:
            raise _refused(f"No connection to the trainer: {error}.") from error

    def start(self) -> None:
        """Opens an update; one that failed is forgotten."""
        self._missing = {value.data_ptr() for value in self._targets().values()}

    def receive(self, info: dict[str, Any], *, paused: bool) -> None:
        """Receives the next bucket; `paused`: the engine does not sample."""
        missing, self._missing = self._missing, None
        if not paused:
            raise _refused("The engine is sampling: pause it before its weights change.", 409)
        if missing is None or self._group is None:
            raise _refused("No weight update was started, or no trainer is connected.")
        try:
            targets = self._targets()
            for name, tensor in receive(self._group, BucketInfo(**info)):
                target = targets[name]
                if target.shape != tensor.shape:
                    raise ValueError(f"{name} has the shape {tuple(tensor.shape)}.")
                self.incomplete = True
                with torch.no_grad():
                    target.copy_(tensor)
                missing.discard(target.data_ptr())
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            self._group = None  # the trainer must not wait for us
            raise _refused(f"The bucket cannot be used: {error!r}.") from error
        self._missing = missing

    def finish(self, *, named: bool) -> None:
        """Closes the update. One in which nothing was received changes nothing.

        `named`: the weights get a new name, so that they must be whole and new.
        """
        missing, self._missing = self._missing, None
        if missing is None:
            raise _refused("No weight update was started.")
        targets = self._targets()
        whole = len({value.data_ptr() for value in targets.values()})
        if missing and (named or len(missing) < whole):
            left = [name for name, at in targets.items() if at.data_ptr() in missing]
            raise _refused(f"{left[0]} and {len(left) - 1} more were not received.")
        if not missing:
            self.incomplete = False

    def must_be_whole(self) -> None:
        if self.incomplete:
            raise _refused("An update of the weights failed: send all of them again.", 409)

    def checksums(self) -> dict[str, str]:
        return {
            name: hashlib.sha256(
                value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            ).hexdigest()
            for name, value in self._targets().items()
        }

    def _targets(self) -> dict[str, torch.Tensor]:
        return dict(self._model.state_dict(keep_vars=True))


def _refused(message: str, status: int = 500) -> EngineRefused:
    return EngineRefused(message, status=status)


Part = tuple[slice | torch.Tensor, "Adapter"]
_ADAPTER, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_PLAIN = {"use_dora": False, "lora_bias": False, "bias": "none", "modules_to_save": None}
"""PEFT settings that must have these values, the only supported ones."""


class Adapter:
    """`layers`: layer name -> A [rank, in] and scaled B [out, rank]."""

    def __init__(
        self, name: str, folder: Path, layers: dict[str, tuple[torch.Tensor, ...]]
    ) -> None:
        self.name = name
        self.folder = folder
        self.layers = layers


class Adapters:
    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._loaded: dict[str, Adapter] = {}
        self._hooked: set[str] = set()
        self._worn: list[Part] = []

    @property
    def loaded(self) -> list[Adapter]:
        return list(self._loaded.values())

    def find(self, name: str) -> Adapter | None:
        """Running rows keep the adapter that they began with."""
        return self._loaded.get(name)

    def load(self, name: str, folder: Path, *, replace: bool = False) -> Adapter:
        if name in self._loaded and not replace:
            raise InputError(
                f"The lora adapter {name!r} has already been loaded.",
                hint="Send load_inplace: true to load it again.",
            )
        adapter = Adapter(name, folder, self._read(folder))
        for layer in adapter.layers:
            self._hook(layer)
        self._loaded[name] = adapter
        return adapter

    def unload(self, name: str) -> None:
        """Unloads an adapter; rows that use it keep it until they end."""
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
    if not (folder / _CONFIG).is_file():
        raise InputError(f"There is no LoRA adapter in {folder}: it has no {_CONFIG}.")
    config = read_object(folder / _CONFIG)
    foreign = [name for name, plain in _PLAIN.items() if config.get(name, plain) not in (plain, [])]
    foreign += [name for name in ("rank_pattern", "alpha_pattern") if config.get(name)]
    if foreign:
        raise InputError(f"The adapter in {folder} uses {', '.join(foreign)}: not supported.")
    return config


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
    """The layer's output plus the adapters' contributions."""
    output = output.clone()
    for rows, adapter in parts:
        pair = adapter.layers.get(layer)
        if pair is not None:
            down, up = pair
            worn = states[rows].to(down.dtype)
            output[rows] += (worn @ down.T @ up.T).to(output.dtype)
    return output
