"""The one pass: reads every tensor of all models once, piece by piece, for all alphas."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from envserver_records.errors import ConflictError, InputError
from envserver_records.files import replacing_path, storing
from numpy.typing import NDArray

from .checks import Allowed, Names, check
from .tensors import (
    Adapted,
    File,
    Floats,
    Model,
    Tensor,
    Weights,
    all_finite,
    encoded,
    is_adapter,
    read_adapter_config,
    read_header,
)
from .writing import (
    Made,
    Recipe,
    Report,
    WeightsWriter,
    appearing,
    check_places,
    copy_rest,
    facts_of,
    write_card,
    write_index,
)

_KIND = "task vector"


def open_vector(path: Path) -> Weights:
    weights = Weights(path)
    if weights.parts[0].metadata.get("kind") != _KIND:
        raise InputError(
            f"{path} is not a task vector: its metadata lacks kind: {_KIND}.",
            hint="Models and adapters are named by folders; --save_vector FILE writes a vector.",
        )
    return weights


def vector_layout(recipe: Recipe, base: Weights, others: Sequence[Model], path: Path) -> File:
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


@contextmanager
def vector_writer(layout: File, *, overwrite: bool) -> Iterator[WeightsWriter]:
    """Yields the writer of a file that appears when the block ends without an error."""
    _check_place(layout.path, overwrite)
    with storing(layout.path):
        layout.path.parent.mkdir(parents=True, exist_ok=True)
    with replacing_path(layout.path) as partial:
        with storing(layout.path):
            writer = WeightsWriter(partial, layout)
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
    hint = "Replace it with --overwrite."
    try:
        ours = path.is_file() and read_header(path).metadata.get("kind") == _KIND
    except InputError:
        ours = False
    if not (ours and overwrite):
        raise ConflictError(
            f"{path} exists.", hint=hint if ours else "It is not a task vector: name another file."
        )


PIECE = 1 << 20
"""Numbers of a tensor merged at a time; a longer row is one piece."""


@dataclass(frozen=True)
class Merged:
    folders: list[Path]
    notes: list[str]


@dataclass(frozen=True)
class _Term:
    """An opened vector; `minus` None: the base; `is_vector`: nothing is subtracted."""

    plus: Model
    minus: Model | None
    weight: float
    is_vector: bool


class _Vector(NamedTuple):
    path: Path
    dtypes: Mapping[str, str]
    writer: WeightsWriter


def merge(
    recipe: Recipe,
    places: Sequence[Path],
    *,
    vector: Path | None = None,
    allowed: Allowed | None = None,
    allow_not_finite: bool = False,
    overwrite: bool = False,
    report: Report = lambda done: None,
    begin: Report = lambda total: None,
) -> Merged:
    """Writes a model for each alpha.

    Args:
        places: output folders, one for each of `recipe.alphas`; complete or absent. Empty: only
            `vector` is written.
        vector: also write what is added, without alpha, to this safetensors file.
        allow_not_finite: also write infinities and NaNs.
        begin, report: called with bytes of the base's weights: the total, then each part done.
    """
    with ExitStack() as stack:
        base = stack.enter_context(_opened_base(recipe.base))
        opened, notes = _open_others(recipe, base, stack)
        names, more = check(base, list(opened.values()), allowed or Allowed())
        notes += more
        size = sum(tensor.size for tensor in base.tensors.values())
        check_places(places, size * len(places), overwrite=overwrite)
        writer = None
        if vector is not None:
            layout = vector_layout(recipe, base, list(opened.values()), vector)
            dtypes = {tensor.name: tensor.dtype for tensor in layout.tensors}
            file = stack.enter_context(vector_writer(layout, overwrite=overwrite))
            writer = _Vector(vector, dtypes, file)
        begin(size)
        alphas = recipe.alphas if places else ()
        terms = [
            _Term(
                opened[vector.plus],
                opened[vector.minus] if vector.minus else None,
                vector.weight,
                vector.plus.is_file(),
            )
            for vector in recipe.vectors
        ]
        work = _Pass(base, terms, alphas, names, allow_not_finite, report, writer)
        with appearing(places) as folders:
            digests = work.run(folders)
            facts = facts_of(recipe, {recipe.base: base, **opened}, notes)
            for folder, alpha, files in zip(folders, alphas, digests, strict=True):
                if len(base.parts) > 1:
                    write_index(folder, base.parts)
                copied = copy_rest(base.folder, folder)
                write_card(folder, facts, Made(recipe.formula(f"{alpha:g}"), alpha, files, copied))
    return Merged(list(places), notes)


@dataclass(frozen=True)
class _Pass:
    base: Weights
    terms: Sequence[_Term]
    alphas: Sequence[float]
    names: Mapping[Path, Names]
    allow_not_finite: bool
    report: Report
    vector: _Vector | None

    def run(self, folders: Sequence[Path]) -> list[dict[str, str]]:
        """Writes the weights of each alpha; returns for each the sha256 of its files."""
        digests: list[dict[str, str]] = [{} for _ in folders]
        for part in self.base.parts:
            with ExitStack() as stack:
                writers = [WeightsWriter(folder / part.path.name, part) for folder in folders]
                for writer in writers:
                    stack.callback(writer.give_up)
                for tensor in part.tensors:
                    self._write(tensor, writers)
                for writer, files in zip(writers, digests, strict=True):
                    files[part.path.name] = writer.close()
        if self.vector is not None:
            with storing(self.vector.path):
                self.vector.writer.close()
        return digests

    def _write(self, tensor: Tensor, writers: Sequence[WeightsWriter]) -> None:
        row_bytes = tensor.size // max(tensor.rows, 1)
        for begin, end in _pieces(tensor):
            if tensor.is_float:
                self._write_merged(tensor, begin, end, writers)
            else:
                data = self._common(tensor, begin, end)
                for writer in writers:
                    writer.write(data)
            self.report((end - begin) * row_bytes)

    def _write_merged(
        self, tensor: Tensor, begin: int, end: int, writers: Sequence[WeightsWriter]
    ) -> None:
        base = self.base.values(tensor.name, begin, end)
        vectors = [self._vector(term, tensor, base, begin, end) for term in self.terms]
        if self.vector is not None:
            dtype = self.vector.dtypes[tensor.name]
            total = combined([term.weight for term in self.terms], vectors, base, dtype)
            self._check_finite(total, tensor.name, dtype, "the difference")
            with storing(self.vector.path):
                self.vector.writer.write(total)
        for alpha, writer in zip(self.alphas, writers, strict=True):
            stored = encoded(_sum(base, self.terms, vectors, alpha), tensor.dtype)
            self._check_finite(stored, tensor.name, tensor.dtype, f"alpha {alpha:g}")
            writer.write(stored)

    def _check_finite(self, stored: NDArray[Any], name: str, dtype: str, where: str) -> None:
        if not self.allow_not_finite and not all_finite(stored, dtype):
            raise InputError(
                f"{name} has values that are not finite {dtype}, with {where}.",
                hint="Use a smaller alpha, or look for NaNs in the inputs; --allow_not_finite "
                "writes them.",
            )

    def _vector(
        self, term: _Term, tensor: Tensor, base: Floats, begin: int, end: int
    ) -> Floats | None:
        plus = self._values(term.plus, tensor, begin, end)
        if term.is_vector:
            return plus
        minus = base if term.minus is None else self._values(term.minus, tensor, begin, end)
        if plus is None or minus is None:
            return None
        wide = base.dtype if base.dtype == np.float64 else np.result_type(plus, minus)
        difference: Floats = plus.astype(wide, copy=False) - minus.astype(wide, copy=False)
        return difference

    def _values(self, model: Model, tensor: Tensor, begin: int, end: int) -> Floats | None:
        name = self.names[model.folder][tensor.name]
        return None if name is None else model.values(name, begin, end)

    def _common(self, tensor: Tensor, begin: int, end: int) -> bytes:
        data = self.base.raw(tensor.name, begin, end)
        models = [(term.plus, term.minus) for term in self.terms if not term.is_vector]
        for model in [member for pair in models for member in pair if member]:
            name = self.names[model.folder][tensor.name]
            if name is not None and model.raw(name, begin, end) != data:
                raise InputError(
                    f"{tensor} holds other numbers in {model.folder.name} than in the base.",
                    hint="Only floats can be added: merge weights that are not quantised.",
                )
        return data


def _sum(
    base: Floats, terms: Sequence[_Term], vectors: Sequence[Floats | None], alpha: float
) -> Floats:
    total = base
    for term, vector in zip(terms, vectors, strict=True):
        if vector is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                total = total + vector * vector.dtype.type(alpha * term.weight)
    return total


def _pieces(tensor: Tensor) -> Iterator[tuple[int, int]]:
    if not tensor.size:
        return
    step = max(1, PIECE // tensor.row_size)
    for begin in range(0, tensor.rows, step):
        yield begin, min(tensor.rows, begin + step)


def _opened_base(folder: Path) -> Weights:
    if folder.is_file():
        raise InputError(f"{folder} is a file: the base has to be a model's folder.")
    if is_adapter(folder):
        raise InputError(
            f"{folder} is an adapter: the base has to be a whole model.",
            hint="Name the model that it was trained on.",
        )
    return Weights(folder)


def _open_others(
    recipe: Recipe, base: Weights, stack: ExitStack
) -> tuple[dict[Path, Model], list[str]]:
    """Opens every folder but the base once; returns notes on the bases of adapters."""
    notes: list[str] = []
    open_weights = functools.cache(lambda folder: stack.enter_context(Weights(folder)))
    opened: dict[Path, Model] = {}
    for folder in dict.fromkeys(
        folder for vector in recipe.vectors for folder in (vector.plus, vector.minus) if folder
    ):
        if folder.is_file():
            opened[folder] = stack.enter_context(open_vector(folder))
            continue
        if not is_adapter(folder):
            opened[folder] = open_weights(folder)
            continue
        said = str(read_adapter_config(folder).get("base_model_name_or_path") or "")
        below = Path(said)
        own = said and below.is_dir() and not below.samefile(base.folder)
        opened[folder] = Adapted(folder, open_weights(below) if own else base)
        into = (below if own else base.folder).name
        of = f" of {below.name}" if said else ""
        notes.append(f"{folder.name} is an adapter{of}, merged into {into}")
    return opened, notes
