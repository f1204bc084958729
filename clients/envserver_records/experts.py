"""Routed experts of mixture-of-experts models: which experts each token went through.

An engine reports them for all tokens that it computed: of a prompt and its answer all but the last
one. Routing the same tokens to the same experts (router replay, arXiv 2510.11370) lets a trainer
compute what the engine computed.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.unsignedinteger[Any]]
"""uint8 or uint16 [N, layers, experts per token]: number of the expert; 0 in layers without any."""

_LARGEST = 2**16 - 1


class RoutedExperts(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """Experts of N consecutive tokens.

    `start`: position of the first one in its call or row. `ids`: uint8 or uint16,
    [N * layers * per_token].
    """

    start: int
    layers: int
    per_token: int
    ids: Table

    @property
    def table(self) -> Table:
        return self.ids.reshape(-1, self.layers, self.per_token)


def experts_from(table: Table, start: int = 0) -> RoutedExperts:
    """Returns the experts of a table whose first token is at `start`."""
    return RoutedExperts(start, table.shape[1], table.shape[2], table.reshape(-1))


def row_experts(experts: RoutedExperts | None, mask: NDArray[np.uint8]) -> Table | None:
    """Returns the experts of a row's first tokens; None if it has none."""
    if experts is None:
        return None
    table = experts.table
    least = int(np.flatnonzero(mask)[-1]) if mask.any() else 0
    if experts.start or not least <= len(table) < len(mask):
        raise ValueError(
            f"routed experts of tokens {experts.start} to {experts.start + len(table)} do not fit "
            f"a row of {len(mask)} tokens, trained up to {least}"
        )
    return table


def experts_of_row(column: Any, row: int) -> RoutedExperts | None:
    """Returns the experts of a row in JSON: `column` has text or null for each row."""
    if column is None:
        return None
    text = column[row] if isinstance(column, list) and row < len(column) else 0
    if not isinstance(text, str | None):
        raise ValueError(f"the routed experts of row {row} are missing or not text")
    return None if text is None else experts_from(table_from_text(text))


def table_to_text(table: Table) -> str:
    """Returns a table as vLLM writes it: an .npy file in base64."""
    file = io.BytesIO()
    np.save(file, table, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode()


def table_from_text(text: str) -> Table:
    """Reads what `table_to_text` writes; signed numbers become uint8 or uint16."""
    file = io.BytesIO(base64.b64decode(text, validate=True))
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("routed experts are not an .npy file of version 1.0")
    shape, in_fortran_order, kind = np.lib.format.read_array_header_1_0(file)
    if len(shape) != 3 or 0 in shape[1:] or in_fortran_order or kind.kind not in "iu":
        raise ValueError(f"routed experts have the form {shape} of {kind}")
    table = np.frombuffer(file.getbuffer()[file.tell() :], kind).reshape(shape)
    if kind in (np.uint8, np.uint16):
        return table
    if table.size and not 0 <= table.min() <= table.max() <= _LARGEST:
        raise ValueError(f"experts have numbers from {table.min()} to {table.max()}")
    return table.astype(np.uint8 if table.max(initial=0) < 256 else np.uint16)
