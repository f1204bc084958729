"""Reads weights from safetensors files in pieces.

In: a folder with `model.safetensors`, or with shards and `model.safetensors.index.json`. Out: the
description and place of each tensor, and its numbers, some rows at a time. Headers are checked
against the files before anything is read (sizes, ranges, overlaps; a hostile header cannot make us
read elsewhere); only the headers stay in memory.

The format, from the README of huggingface/safetensors: eight bytes with the length of a JSON
header, the header (`name -> {dtype, shape, data_offsets}`, and strings under `__metadata__`), then
the numbers without gaps, row by row, little-endian. numpy has no bfloat16: its 16 bits are the
upper half of a float32, so reading is a shift and writing is rounding on integers.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

import numpy as np
from envserver_records.errors import InputError, NotFoundError
from envserver_records.files import read_object
from numpy.typing import NDArray

Floats = NDArray[np.float32] | NDArray[np.float64]

SIZES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
"""Bytes of one number, by the dtype's name in a file."""

FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes that can be added. All others (indices, masks, quantised weights) are only copied."""

_STORED = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_NAN = 0x7FC0
_EXPONENT = 0x7F80


def decoded(data: bytes | bytearray | memoryview, dtype: str) -> Floats:
    """Decodes numbers of one of FLOATS: float64 for F64, float32 (exactly) for all others."""
    stored = np.frombuffer(data, dtype=_STORED[dtype])
    if dtype == "BF16":
        wide: NDArray[np.float32] = (stored.astype(np.uint32) << 16).view(np.float32)
        return wide
    return stored.astype(np.float64) if dtype == "F64" else stored.astype(np.float32)


def encoded(values: Floats, dtype: str) -> NDArray[Any]:
    """Encodes `values`, rounded to nearest, ties to even; overflow becomes infinity."""
    if dtype == "BF16":
        return _to_bfloat16(values.astype(np.float32, copy=False))
    with np.errstate(over="ignore"):
        return values.astype(_STORED[dtype])


def all_finite(stored: NDArray[Any], dtype: str) -> bool:
    """Returns whether the result of `encoded` holds neither an infinity nor a NaN."""
    if dtype == "BF16":
        return not bool(((stored & _EXPONENT) == _EXPONENT).any())
    return bool(np.isfinite(stored).all())


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    # Half of the last kept bit, less one where that bit is 0: a tie goes to the even neighbour.
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
    rounded[np.isnan(values)] = _NAN
    return rounded


INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
LONGEST_HEADER = 100_000_000
"""Maximum bytes of a header; the format's own limit."""
_LENGTH = 8


@dataclass(frozen=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_size(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def size(self) -> int:
        return self.rows * self.row_size * SIZES[self.dtype]

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype} {list(self.shape)})"


class Model(Protocol):
    """A model whose weights can be read in pieces."""

    @property
    def folder(self) -> Path: ...

    @property
    def described_by(self) -> Path:
        """The folder with its config.json."""

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    def values(self, name: str, begin: int, end: int) -> Floats:
        """Returns rows `begin` to `end` of a tensor of floats, as one flat array."""

    def raw(self, name: str, begin: int, end: int) -> bytes:
        """Returns the stored bytes of rows of any tensor."""

    def files(self) -> Sequence[Path]:
        """Returns the files with its weights."""


@dataclass(frozen=True)
class File:
    path: Path
    tensors: tuple[Tensor, ...]
    metadata: Mapping[str, str]


class Weights:
    """The weights of a folder, or of a single file; a context manager that closes its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = self.described_by = folder
        self.parts = [read_header(path) for path in _weight_files(folder)]
        self.tensors: dict[str, Tensor] = {}
        for part in self.parts:
            for tensor in part.tensors:
                if tensor.name in self.tensors:
                    raise InputError(f"{part.path}: {tensor.name} is in another shard, too.")
                self.tensors[tensor.name] = tensor
        if not folder.is_file():
            _check_index(folder, self.tensors)
        self._stack = ExitStack()
        self._open: dict[Path, BinaryIO] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._open.clear()

    def files(self) -> list[Path]:
        return [part.path for part in self.parts]

    def values(self, name: str, begin: int, end: int) -> Floats:
        return decoded(self.raw(name, begin, end), self.tensors[name].dtype)

    def raw(self, name: str, begin: int, end: int) -> bytes:
        tensor = self.tensors[name]
        row = tensor.row_size * SIZES[tensor.dtype]
        file = self._opened(tensor.file)
        file.seek(tensor.start + begin * row)
        data = file.read((end - begin) * row)
        if len(data) != (end - begin) * row:
            raise InputError(f"{tensor.file} was made shorter while it was read.")
        return data

    def _opened(self, path: Path) -> BinaryIO:
        if path not in self._open:
            # Pieces are large: a buffer would only copy them once more.
            self._open[path] = self._stack.enter_context(path.open("rb", buffering=0))
        return self._open[path]


def read_header(path: Path) -> File:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH), "little")
            if size < _LENGTH or length > min(size - _LENGTH, LONGEST_HEADER):
                raise _broken(
                    path, "its header is longer than the file: it was cut off, or is another format"
                )
            header = json.loads(file.read(length))
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header is not JSON ({error})") from error
    except OSError as error:
        raise NotFoundError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not isinstance(header, dict):
        raise _broken(path, "its header is not an object")
    metadata = header.pop("__metadata__", None) or {}
    begin = _LENGTH + length
    tensors = [_tensor(path, name, said, begin, size) for name, said in header.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.size))
    for before, after in itertools.pairwise(tensors):
        if before.start + before.size > after.start:
            raise _broken(path, f"{before.name} and {after.name} overlap")
    texts = {str(key): str(value) for key, value in metadata.items()}
    return File(path, tuple(tensors), texts)


def _tensor(path: Path, name: str, said: Any, begin: int, size: int) -> Tensor:
    try:
        dtype, shape = str(said["dtype"]), tuple(said["shape"])
        start, stop = said["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, start, stop))
    except (TypeError, KeyError, ValueError) as error:
        raise _broken(path, f"{name} has no dtype, shape and data_offsets") from error
    if dtype not in SIZES:
        raise _broken(path, f"{name} is of dtype {dtype}, which is not known here")
    if not whole or begin + stop > size or stop - start != math.prod(shape) * SIZES[dtype]:
        raise _broken(path, f"the place of {name} does not fit its shape, or the file is cut off")
    return Tensor(name, dtype, shape, path, begin + start)


def _weight_files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise NotFoundError(
            f"There is no folder {folder}.",
            hint="A model on the hub is fetched by `hf download NAME --local-dir DIR`.",
        )
    # transformers also prefers the single file where both exist
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    if (folder / INDEX).is_file():
        names = sorted(set(read_index(folder).values()))
        for name in names:
            if Path(name).name != name or not (folder / name).is_file():
                raise InputError(f"{folder / INDEX}: there is no file {name!r} beside it.")
        return [folder / name for name in names]
    others = [path.name for pattern in ("*.bin", "*.pt*") for path in folder.glob(pattern)]
    hint = "It holds a PyTorch pickle: load it and save it again with save_pretrained."
    raise NotFoundError(
        f"{folder} holds neither {WHOLE} nor {INDEX}.",
        hint=hint if others else "Name a model's folder, as save_pretrained writes it.",
    )


def read_index(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} has no readable weight_map: {error!r}.") from error


def _check_index(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    if (folder / WHOLE).is_file():
        return
    for name, file in read_index(folder).items():
        if name not in tensors or tensors[name].file.name != file:
            raise InputError(f"{folder / INDEX}: {name} is not in {file}.")


def _broken(path: Path, what: str) -> InputError:
    return InputError(f"{path} is not a complete safetensors file: {what}.", place=str(path))


# The names in the files and the scaling (`lora_alpha / r`, with `use_rslora` `lora_alpha /
# sqrt(r)`, patterns of ranks and alphas) are those of huggingface/peft.

CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PART = re.compile(
    r"(?P<module>.+?)(?:\.base_layer)?\.lora_(?:embedding_)?(?P<side>[AB])(?:\.default)?(?:\.weight)?"
)
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
_REFUSED = (
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
_HINT = "Load it with peft, call merge_and_unload() and save_pretrained(), and name that."


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
            a, b = (
                _rows(matrix, 0, matrix.rows).reshape(matrix.shape) for matrix in (pair.a, pair.b)
            )
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
        if set(sides) != {"A", "B"} or any(len(side.shape) != 2 for side in sides.values()):
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
                f"{path} is for {name}, which {self._below.folder.name} lacks.",
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
    return (folder / CONFIG).is_file()


def read_adapter_config(folder: Path) -> dict[str, Any]:
    return read_object(folder / CONFIG)


def _refuse(folder: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise InputError(f"{folder} is an adapter of the kind {kind}, not LORA.", hint=_HINT)
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise InputError(f"{folder}: its start, {start}, changed its base.", hint=_HINT)
    for name in _REFUSED:
        if config.get(name):
            raise InputError(f"{folder}: an adapter with {name} is not supported.", hint=_HINT)


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
