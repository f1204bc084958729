"""Task vectors as files: what a recipe adds to its base, alone.

In: the models of a merge. Out: one safetensors file with `w1 * (plus1 - minus1) + ...` for every
tensor of floats of the base, not multiplied by alpha, in float32 (float64 where a weight is). Read
again, it takes the place of a difference: with one vector of weight 1, base + alpha * file has the
same bits as the merge itself. A file that does not say that it is a vector is refused, since adding
a whole model's weights would be a mistake.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from envserver_records.errors import ConflictError, InputError
from envserver_records.files import replacing_path, storing

from .recipe import Recipe
from .tensors import File, Floats, Model, Tensor, Weights, read_header
from .writing import WeightsWriter

_KIND: Final = "task vector"


def open_vector(path: Path) -> Weights:
    """Opens a file that `vector_layout` describes."""
    weights = Weights(path)
    if weights.parts[0].metadata.get("kind") != _KIND:
        raise InputError(
            f"{path} is not a task vector: its metadata lacks kind: {_KIND}.",
            hint="Models and adapters are named by folders; --save_vector FILE writes a vector.",
        )
    return weights


def vector_layout(recipe: Recipe, base: Weights, others: Sequence[Model], path: Path) -> File:
    """Returns the names, dtypes and shapes of a vector's file."""
    tensors = tuple(
        replace(tensor, dtype=_dtype(tensor, others), file=path)
        for part in base.parts
        for tensor in part.tensors
        if tensor.is_float
    )
    metadata = {"format": "pt", "kind": _KIND, "formula": recipe.difference()}
    return File(path, tensors, metadata)


def combined(
    weights: Sequence[float], vectors: Sequence[Floats | None], like: Floats, dtype: str
) -> Floats:
    """Returns the weighted sum of differences; zeros where no model has the tensor."""
    total = np.zeros(like.shape, np.float64 if dtype == "F64" else np.float32)
    for weight, vector in zip(weights, vectors, strict=True):
        if vector is not None:
            total += np.multiply(vector, weight, dtype=total.dtype)
    return total


class VectorWriter:
    """Writes a vector's file; `write` takes the tensors' numbers in the layout's order."""

    def __init__(self, layout: File, partial: Path) -> None:
        self.dtypes = {tensor.name: tensor.dtype for tensor in layout.tensors}
        self._path = layout.path
        self._file = WeightsWriter(partial, layout)

    def write(self, numbers: Floats) -> None:
        """Writes the next numbers. Raises StoreError: the disk takes no more."""
        with storing(self._path):
            self._file.write(numbers)

    def close(self) -> None:
        """Syncs the complete file to disk."""
        with storing(self._path):
            self._file.close()

    def give_up(self) -> None:
        self._file.give_up()


@contextmanager
def vector_writer(layout: File, *, overwrite: bool) -> Iterator[VectorWriter]:
    """Yields the writer of a file that appears when the block ends without an error."""
    _check_place(layout.path, overwrite)
    with storing(layout.path):
        layout.path.parent.mkdir(parents=True, exist_ok=True)
    with replacing_path(layout.path) as partial:
        with storing(layout.path):
            writer = VectorWriter(layout, partial)
        try:
            yield writer
        finally:
            writer.give_up()


def _dtype(tensor: Tensor, others: Sequence[Model]) -> str:
    stored = [other.tensors[tensor.name].dtype for other in others if tensor.name in other.tensors]
    return "F64" if "F64" in (tensor.dtype, *stored) else "F32"


def _check_place(path: Path, overwrite: bool) -> None:
    if not path.exists():
        return
    hint = "Replace it by --overwrite."
    try:
        ours = path.is_file() and read_header(path).metadata.get("kind") == _KIND
    except InputError:
        ours = False
    if not (ours and overwrite):
        raise ConflictError(
            f"{path} exists.", hint=hint if ours else "It is not a task vector: name another file."
        )
