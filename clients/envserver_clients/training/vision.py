"""Makes the inputs of transformers' vision-language models beside tokens: pixels and grids.

In: token ids as the engine had them, with every image expanded, and the images' bytes. Out: pixels,
their grids, and which tokens are images'. What always holds: nothing is tokenized again; a row
reaches the model only if the trainer's processor makes as many tokens (and the same grid) of each
image as the engine's did; the model computes its positions itself.

Two forms are known: a grid of patches for each image (`image_grid_thw`: Qwen2-VL to Qwen3-VL), and
parts of one size (Idefics3, SmolVLM).
"""

from __future__ import annotations

import inspect
import io
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch
from envserver_records import InputError
from envserver_records.images import RowImage
from numpy.typing import NDArray
from torch import Tensor

from envserver_clients.records import Row, pixels

from .examples import Example

_FILES: Final = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
_BLANK_PIXELS: Final = 64


class Vision:
    """The images' side of a model; its processor needs Pillow.

    Args:
        source: folder or hub id.
        model: transformers' model, before LoRA.
    """

    def __init__(self, source: str, model: Any) -> None:
        from transformers import AutoImageProcessor

        self._source = source
        self._processor: Any = AutoImageProcessor.from_pretrained(source)
        self._token = int(model.config.image_token_id)
        self._has_grids = "image_grid_thw" in _inputs_of(model)
        self._has_types = "mm_token_type_ids" in _inputs_of(model)
        vision = model.config.vision_config
        if self._has_grids:
            self._patches = int(vision.spatial_merge_size) ** 2
        else:
            side = vision.image_size // vision.patch_size
            self._part_tokens = side**2 // model.config.scale_factor**2
        self._sizes: dict[str, tuple[int, tuple[int, ...]]] = {}

    @classmethod
    def of(cls, source: str, model: Any) -> Self | None:
        """Returns the side of `model`; None if it sees no images, or in a form not known here."""
        takes = _inputs_of(model)
        config = model.config
        if getattr(config, "image_token_id", None) is None or "pixel_values" not in takes:
            return None
        has_parts = "pixel_attention_mask" in takes and hasattr(config, "scale_factor")
        return cls(source, model) if "image_grid_thw" in takes or has_parts else None

    def fits(self, row: Row) -> bool:
        """Returns whether the processor makes of a row's images the tokens that the row has."""
        images = self.is_image(row.tokens)
        try:
            sizes = [self._size(one) for one in row.images]
        except InputError:
            return False
        return int(images.sum()) == sum(tokens for tokens, _ in sizes) and all(
            int(images[one.offset : one.offset + one.length].sum()) == tokens
            and one.grid in ((), grid)
            for one, (tokens, grid) in zip(row.images, sizes, strict=True)
        )

    def _size(self, image: RowImage) -> tuple[int, tuple[int, ...]]:
        """Returns the number of an image's tokens, and its grid; () where there is none."""
        if image.sha256 not in self._sizes:
            made = pixels(self._processor, [[image]])
            if self._has_grids:
                grid = tuple(made["image_grid_thw"][0].tolist())
                found = int(np.prod(grid)) // self._patches, grid
            else:
                found = made["pixel_values"].shape[1] * self._part_tokens, ()
            self._sizes[image.sha256] = found
        return self._sizes[image.sha256]

    def inputs(
        self, tokens: NDArray[np.int64], rows: Sequence[Sequence[RowImage]], device: torch.device
    ) -> dict[str, Tensor]:
        """Returns the model's inputs beside its tokens [B, T]; empty if no row has images."""
        if not any(rows):
            return {}
        found = pixels(self._processor, rows)
        if self._has_types:
            found["mm_token_type_ids"] = torch.from_numpy(self.is_image(tokens).astype(np.int64))
        return {name: value.to(device) for name, value in found.items()}

    def is_image(self, tokens: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """Returns which tokens [T] are images'."""
        found: NDArray[np.bool_] = tokens == self._token
        return found

    def blank(self) -> Example:
        """Returns a row with a white image that teaches nothing."""
        from PIL import Image

        file = io.BytesIO()
        Image.new("RGB", (_BLANK_PIXELS, _BLANK_PIXELS), "white").save(file, "PNG")
        image = RowImage("blank", 1, 1, file.getvalue())
        length, _ = self._size(image)
        tokens = np.array([0, *[self._token] * length, 0, 0], np.int32)
        nothing = np.zeros(len(tokens), np.uint8)
        return Example(
            *(tokens, nothing, nothing.astype(np.float32)),
            advantage=0.0,
            weight=0.0,
            images=(image,),
        )

    def save(self, folder: Path) -> None:
        """Copies the processor's files, which an engine needs beside the weights."""
        from transformers.utils import cached_file

        for name in _FILES:
            found = cached_file(
                self._source,
                name,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
            if found is not None:
                shutil.copyfile(found, folder / name)


def _inputs_of(model: Any) -> set[str]:
    return set(inspect.signature(type(model).forward).parameters)
