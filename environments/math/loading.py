"""Where rows come from: the shipped sample, a local file, the hub. Lazy, and in a seeded order.

Yields (row number, row). The order depends on the seed and the split only. JSONL is read line by
line, at eight bytes of memory a line. `datasets` (the extra `data`) is imported for the hub and for
Parquet; JSON needs nothing.
"""

from __future__ import annotations

import importlib
import json
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envserver import ConfigError, NotFoundError, Split

from .data_sets import Row

SAMPLE = Path(__file__).parent / "data" / "sample.jsonl"
SHUFFLE_BUFFER_ROWS = 10_000
"""Rows among which a streamed data set is shuffled."""

NumberedRow = tuple[int, Row | None]
"""A row and its number in its file or data set; None where it is no JSON object."""


@dataclass(frozen=True)
class Hub:
    """A data set on the hub.

    Args:
        path: its id.
        configs: its configurations, read one after the other; None: it has none.
        splits: our split -> theirs; a split that is not here does not exist.
        streaming: too large to download before the first row.
    """

    path: str
    splits: dict[Split, str]
    configs: tuple[str | None, ...] = (None,)
    streaming: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


_MATH_CONFIGS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory",
    "prealgebra", "precalculus",
)  # fmt: skip
_MATHQA_ZIP = "zip://{split}.json::https://math-qa.github.io/math-QA/data/MathQA.zip"

HUBS: dict[str, Hub] = {
    "gsm8k": Hub("openai/gsm8k", {"train": "train", "test": "test"}, ("main",)),
    "math": Hub(
        "EleutherAI/hendrycks_math", {"train": "train", "test": "test"}, configs=_MATH_CONFIGS
    ),
    "math500": Hub("HuggingFaceH4/MATH-500", {"test": "test"}),
    "svamp": Hub("ChilleD/SVAMP", {"train": "train", "test": "test"}),
    "mawps": Hub(
        "MU-NLPC/Calc-mawps", {"train": "train", "validation": "validation", "test": "test"}
    ),
    # The hub's own copy is a loading script, which `datasets` no longer runs.
    "mathqa": Hub(
        "json",
        {"train": "train", "validation": "validation", "test": "test"},
        arguments={
            "data_files": {
                "train": _MATHQA_ZIP.format(split="train"),
                "validation": _MATHQA_ZIP.format(split="dev"),
                "test": _MATHQA_ZIP.format(split="test"),
            }
        },
    ),
    "aqua": Hub(
        "deepmind/aqua_rat",
        {"train": "train", "validation": "validation", "test": "test"},
        ("raw",),
    ),
    "aime": Hub("HuggingFaceH4/aime_2024", {"test": "train"}),
    "deepmath": Hub("zwhe99/DeepMath-103K", {"train": "train"}),
    "mathx": Hub("XenArcAI/MathX-5M", {"train": "train"}, streaming=True),
}


def sample_rows(split: Split, seed: int) -> Iterator[NumberedRow]:
    """The 48 shipped rows; every split is the same."""
    return _jsonl_rows(SAMPLE, random.Random(f"sample-{seed}-{split}"))


def file_rows(path: Path, split: Split, seed: int) -> Iterator[NumberedRow]:
    """Rows of a .jsonl, .json or .parquet file, or of `<split>.*` in a folder.

    Raises:
        NotFoundError: there is no such file.
        ConfigError: it is none of the three.
    """
    file = _file_of_split(path, split) if path.is_dir() else path
    if not file.is_file():
        raise NotFoundError(f"There is no data file {str(file)!r}.")
    rng = random.Random(f"file-{seed}-{split}")
    match file.suffix:
        case ".jsonl" | ".ndjson":
            return _jsonl_rows(file, rng)
        case ".json":
            return _json_rows(file, rng)
        case ".parquet":
            hub = Hub("parquet", {split: "train"}, arguments={"data_files": str(file)})
            return hub_rows(hub, split, seed)
    raise ConfigError(
        f"{file} is none of .jsonl, .json and .parquet.", hint="See the README of this environment."
    )


def hub_rows(hub: Hub, split: Split, seed: int) -> Iterator[NumberedRow]:
    """Rows of a data set on the hub.

    Raises:
        ConfigError: it has no such split, `datasets` is not installed, or it cannot be loaded.
    """
    if split not in hub.splits:
        raise ConfigError(
            f"{hub.path} has no split {split!r}.", hint=f"It has: {', '.join(hub.splits)}."
        )
    return _shuffled_hub(hub, hub.splits[split], seed)


def _file_of_split(folder: Path, split: Split) -> Path:
    found = sorted(
        path for path in folder.glob(f"{split}.*") if path.suffix in (".jsonl", ".json", ".parquet")
    )
    if not found:
        raise NotFoundError(f"{folder} has no {split}.jsonl, {split}.json or {split}.parquet.")
    return found[0]


def _jsonl_rows(path: Path, rng: random.Random) -> Iterator[NumberedRow]:
    """Seeks each line in a shuffled order: eight bytes of memory per line."""
    offsets = array("Q")
    with path.open("rb") as file:
        offset = 0
        for line in file:
            if line.strip():
                offsets.append(offset)
            offset += len(line)
        order = array("Q", range(len(offsets)))
        rng.shuffle(order)
        for number in order:
            file.seek(offsets[number])
            yield number, _row(file.readline())


def _row(line: bytes) -> Row | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _json_rows(path: Path, rng: random.Random) -> Iterator[NumberedRow]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    if isinstance(value, dict):
        value = next((part for part in value.values() if isinstance(part, list)), None)
    if not isinstance(value, list):
        raise ConfigError(f"{path} holds no list of rows.")
    order = list(range(len(value)))
    rng.shuffle(order)
    for number in order:
        yield number, value[number] if isinstance(value[number], dict) else None


def _shuffled_hub(hub: Hub, split: str, seed: int) -> Iterator[NumberedRow]:
    first_number = 0
    for config in hub.configs:
        data = _load(hub, config, split)
        if hub.streaming:
            shuffled = data.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER_ROWS)
            yield from ((first_number + i, dict(row)) for i, row in enumerate(shuffled))
        else:
            order = list(range(len(data)))
            random.Random(f"hub-{seed}-{split}-{config}").shuffle(order)
            yield from ((first_number + i, dict(data[i])) for i in order)
            first_number += len(order)


def _load(hub: Hub, config: str | None, split: str) -> Any:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ConfigError(
            f"Loading {hub.path} needs the library `datasets`, which cannot be imported: {error}.",
            hint="pip install 'envserver[data]', or set data_path to a local JSONL file.",
        ) from error
    try:
        return datasets.load_dataset(
            hub.path, config, split=split, streaming=hub.streaming, **hub.arguments
        )
    except Exception as error:
        raise ConfigError(
            f"{hub.path} cannot be loaded: {type(error).__name__}: {str(error)[:300]}",
            hint="Set data_path to a local copy.",
        ) from error
