"""Rows with images, as an engine would have recorded them for a model of `tiny_vlm.py`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from envserver_clients.records import Row
from envserver_records.images import RowImage, sha256_of
from PIL import Image

from .rows_to_learn import row


def picture(width: int, height: int, seed: int = 0) -> bytes:
    """A PNG of random colours in squares of seven pixels."""
    small = np.random.default_rng(seed).integers(0, 256, (height // 7, width // 7, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


def shown(folder: Path, data: bytes) -> tuple[list[int], tuple[int, ...]]:
    """The tokens that the model's own processor makes of one image, and its grid."""
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

    config: Any = AutoConfig.from_pretrained(folder)
    ids = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids
    processor: Any = AutoImageProcessor.from_pretrained(folder)
    made = processor(images=[[Image.open(io.BytesIO(data)).convert("RGB")]], return_tensors="pt")
    if "image_grid_thw" in made:
        grid = tuple(made["image_grid_thw"][0].tolist())
        length = int(np.prod(grid)) // config.vision_config.spatial_merge_size**2
        start, end = ids(["<|vision_start|>", "<|vision_end|>"])
        return [start, *[config.image_token_id] * length, end], grid
    around = ids("<fake_token_around_image>")
    parts = int(made["pixel_values"].shape[1])  # each of four tokens, as `tiny_vlm.py` says
    return [*[around, *[config.image_token_id] * 4] * parts, around], ()


def row_of(folder: Path, images: list[bytes], *, said: int = 7, seed: int = 0, **more: Any) -> Row:
    """A row with random words around its images, of which the last `said` tokens are trained."""
    rng = np.random.default_rng(seed)
    tokens, spans = rng.integers(10, 4000, 3).tolist(), []
    for data in images:
        ids, grid = shown(folder, data)
        spans.append(RowImage(sha256_of(data), len(tokens), len(ids), data, grid))
        tokens += [*ids, *rng.integers(10, 4000, 2).tolist()]
    mask = [0] * len(tokens) + [1] * said
    tokens += rng.integers(10, 4000, said).tolist()
    given = (tokens, mask, float(seed % 2), seed)
    return row(*given, logprobs=-8, images=spans, **more)
