"""Literals in the rows of `parametrize` and of loops, by the name that each column gets. Pure.

@pytest.mark.parametrize("n, wanted", [(1, "one"), (2, "two")])
for n, wanted in [(1, "one"), (2, "two")]:
cases = [(1, "one"), (2, "two")]     and     for n, wanted in cases:
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .hoisting import same

_MAX_LITERAL = 10_000
"""Characters of an answer; a longer one stays in the test."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


class NoLiteral:
    """The value of what is not a literal."""


@dataclass(frozen=True)
class Table:
    """Rows of literals.

    Args:
        columns: cells by name, of columns that hold only literals.
        loop: the loop over them; None: they are parameters of a test.
        end: the expression after which `parametrize` may get ids of the rows; None: it has ids.
        ids: what pytest calls the rows.
    """

    columns: dict[str, list[ast.expr]]
    loop: ast.For | None = None
    end: ast.expr | None = None
    ids: tuple[str, ...] = ()


def literal(node: ast.expr) -> Any:
    """Returns the value of a literal of built-in types, else `NoLiteral`."""
    try:
        value = ast.literal_eval(node)
        text = repr(value)
        same_again = len(text) < _MAX_LITERAL and same(value, ast.literal_eval(text))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return NoLiteral
    return value if same_again else NoLiteral


def loop_tables(function: Function) -> Iterator[Table]:
    """The tables that the loops of a test go through."""
    nodes = [*ast.walk(function)]
    used = Counter(node.id for node in nodes if isinstance(node, ast.Name))
    assigned = {
        node.targets[0].id: node.value
        for node in function.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for node in nodes:
        if isinstance(node, ast.For) and isinstance(node.target, ast.Tuple):
            names = [name.id for name in node.target.elts if isinstance(name, ast.Name)]
            rows = node.iter
            if isinstance(rows, ast.Name) and used[rows.id] == 2:  # set once, and read here
                rows = assigned.get(rows.id, rows)
            cells = _cells(rows, len(node.target.elts))
            if cells and len(names) == len(node.target.elts):
                yield Table(_columns(names, cells), loop=node)


def parameter_table(function: Function, ids: list[str], name: str) -> Table | None:
    """The table of the only `parametrize` of a test, if its ids are the ones that are wanted.

    Args:
        ids: ids of tests in the module.
        name: the test's id in the module, without parameters.
    """
    found = [
        node
        for node in function.decorator_list
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "parametrize"
    ]
    if len(found) != 1 or len(found[0].args) != 2:
        return None
    first, rows = literal(found[0].args[0]), found[0].args[1]
    names = first.replace(",", " ").split() if isinstance(first, str) else first
    cells = _cells(rows, len(names)) if isinstance(names, list | tuple) else []
    has_ids = [keyword.arg for keyword in found[0].keywords] == ["ids"]
    if not cells or len(names) < 2 or (found[0].keywords and not has_ids):
        return None
    if has_ids:
        said = literal(found[0].keywords[0].value)
        made = said if isinstance(said, list | tuple) else []
    else:
        made = [_row_id(names, row, place) for place, row in enumerate(cells)]
    wanted = {id_[len(name) + 1 : -1] for id_ in ids if id_.startswith(f"{name}[")}
    if len(set(made)) != len(cells) or not wanted <= set(made):
        return None
    return Table(_columns(list(names), cells), end=None if has_ids else rows, ids=tuple(made))


def _cells(rows: ast.expr, width: int) -> list[list[ast.expr]]:
    """The cells of a table, by row; none if it is not one."""
    if not isinstance(rows, ast.List | ast.Tuple):
        return []
    found = [row.elts for row in rows.elts if isinstance(row, ast.List | ast.Tuple)]
    whole = len(found) == len(rows.elts) and all(len(row) == width for row in found)
    return found if whole else []


def _columns(names: list[str], rows: list[list[ast.expr]]) -> dict[str, list[ast.expr]]:
    columns = {name: [row[place] for row in rows] for place, name in enumerate(names)}
    return {
        name: cells
        for name, cells in columns.items()
        if all(literal(cell) is not NoLiteral for cell in cells)
    }


def _row_id(names: list[str], row: list[ast.expr], place: int) -> str:
    """The id that pytest makes of a row."""
    values = [literal(cell) for cell in row]
    plain = (str, int, float, complex, bool, type(None))
    return "-".join(
        str(value) if isinstance(value, plain) else f"{name}{place}"
        for name, value in zip(names, values, strict=True)
    )
