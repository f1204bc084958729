"""Little models as save_pretrained writes them, without torch; written and read by safetensors."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64"}
Stored = tuple[str, np.ndarray]
"""dtype in the file, numbers (of BF16: its bits)."""

VOCABULARY = {"a": 0, "b": 1, "<|end|>": 2}
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_theta": 10000.0}


def bfloat16(values: Any) -> np.ndarray:
    """Bits of the nearest bfloat16, found by comparing both neighbours; ties to even."""
    values = np.asarray(values, dtype=np.float32)
    low = values.view(np.uint32) & np.uint32(0xFFFF0000)
    high = low + np.uint32(0x10000)
    exact, below, above = (one.astype(np.float64) for one in _views(values, low, high))
    # What is past the greatest bfloat16 is as far away as if its exponents went on.
    above = np.where(np.isfinite(above), above, np.copysign(2.0**128, exact))
    up = np.abs(above - exact) < np.abs(exact - below)
    tie = np.abs(above - exact) == np.abs(exact - below)
    return (np.where(up | (tie & ((low >> 16) & 1 == 1)), high, low) >> 16).astype(np.uint16)


def _views(values: np.ndarray, *bits: np.ndarray) -> list[np.ndarray]:
    return [values, *(one.view(np.float32) for one in bits)]


def floats(stored: Stored) -> np.ndarray:
    dtype, values = stored
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64 if dtype == "F64" else np.float32)


def write_model(
    folder: Path,
    tensors: Mapping[str, Stored],
    *,
    shards: Sequence[Sequence[str]] = (),
    config: Mapping[str, Any] = CONFIG,
) -> Path:
    """A model's folder; `shards`: names of the tensors of each file."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    added = [{"id": VOCABULARY["<|end|>"], "content": "<|end|>", "special": True}]
    tokenizer = {"model": {"vocab": VOCABULARY, "merges": []}, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    files = {"model.safetensors": list(tensors)}
    if shards:
        count = len(shards)
        files = {
            f"model-{number + 1:05}-of-{count:05}.safetensors": list(names)
            for number, names in enumerate(shards)
        }
        index = {
            "metadata": {
                "total_size": sum(tensors[n][1].nbytes for names in shards for n in names)
            },
            "weight_map": {name: file for file, names in files.items() for name in names},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for file, names in files.items():
        write_file(folder / file, {name: tensors[name] for name in names})
    return folder


def write_file(path: Path, tensors: Mapping[str, Stored]) -> None:
    arrays = {name: np.asarray(values, order="C") for name, (_, values) in tensors.items()}
    said = {
        name: safetensors.TensorSpec(
            dtype=NAMES[tensors[name][0]],
            shape=values.shape,
            data_ptr=values.ctypes.data,
            data_len=values.nbytes,
        )
        for name, values in arrays.items()
    }
    path.write_bytes(safetensors.serialize(said, {"format": "pt"}))


def read_model(folder: Path) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    kinds = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8"}
    for path in sorted(folder.glob("*.safetensors")):
        for name, said in safetensors.deserialize(path.read_bytes()):
            values = np.frombuffer(said["data"], dtype=kinds[said["dtype"]])
            assert values.size == math.prod(said["shape"])
            found[name] = (said["dtype"], values.reshape(said["shape"]))
    return found


# Small models with random weights ----------------------------------------------------------------

ROWS, COLUMNS = 6, 4
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def weights(seed: int, dtype: str = "F32") -> dict[str, Stored]:
    shapes = {
        EMBEDDING: (ROWS, COLUMNS),
        "model.layers.0.mlp.up_proj.weight": (5, COLUMNS),
        "model.norm.weight": (COLUMNS,),
        HEAD: (ROWS, COLUMNS),
    }
    return {
        name: stored(numbers(seed * 10 + place, *shape), dtype)
        for place, (name, shape) in enumerate(shapes.items())
    }


def stored(values: np.ndarray, dtype: str) -> Stored:
    if dtype == "BF16":
        return dtype, bfloat16(values)
    kind = {"F64": np.float64, "F32": np.float32, "F16": np.float16}[dtype]
    with np.errstate(over="ignore"):
        return dtype, values.astype(kind)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return (
        one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    )
