"""Takes the expected answers out of ordinary tests, line by line, so that the tested code cannot
read them. Pure. What has no literal is compared in the sandbox, by `judging`.

    assert label(3) == "3 items", "why"    ->   seen(7, (label(3)))    and Answer("==", "3 items")
    self.assertEqual(label(3), "3 items")  ->   seen(8, (label(3)))
    assert label(n) == expected            ->   seen(9 + (expected), (label(n)))
    assert label(3) == other(3)            ->   assert seen(11, (label(3)), (other(3)))

In the third, `expected` is a parameter of the test, or the variable of a loop: in its rows, numbers
stand for literals. Another variable that is only an answer is emptied.
"""

from __future__ import annotations

import ast
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .expected import OPERATORS, Answer, same

_MAX_LITERAL = 10_000
"""Characters of an answer; a longer one stays in the test."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


class NoLiteral:
    """The value of what is not a literal."""


@dataclass(frozen=True)
class Table:
    """Rows of literals."""

    columns: dict[str, list[ast.expr]]  # cells by name, of columns that hold only literals
    loop: ast.For | None = None  # the loop over them; None: they are parameters of a test
    end: ast.expr | None = None
    ids: tuple[str, ...] = ()  # what pytest calls the rows


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
    """The table of the only `parametrize` of a test, if its ids are the ones that are wanted."""
    found = [
        node
        for node in function.decorator_list
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "parametrize"
    ]
    match found:
        case [ast.Call(args=[argument, rows], keywords=keywords)]:
            first = literal(argument)
        case _:
            return None
    names = first.replace(",", " ").split() if isinstance(first, str) else first
    cells = _cells(rows, len(names)) if isinstance(names, list | tuple) else []
    has_ids = [keyword.arg for keyword in keywords] == ["ids"]
    if not cells or len(names) < 2 or (keywords and not has_ids):
        return None
    if has_ids:
        said = literal(keywords[0].value)
        made = said if isinstance(said, list | tuple) else []
    else:
        made = [_row_id(names, row, place) for place, row in enumerate(cells)]
    wanted = {id_[len(name) + 1 : -1] for id_ in ids if id_.startswith(f"{name}[")}
    if len(set(made)) != len(cells) or not wanted <= set(made):
        return None
    return Table(_columns(list(names), cells), end=None if has_ids else rows, ids=tuple(made))


def _cells(rows: ast.expr, width: int) -> list[list[ast.expr]]:
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
    values = [literal(cell) for cell in row]
    plain = (str, int, float, complex, bool, type(None))
    return "-".join(
        str(value) if isinstance(value, plain) else f"{name}{place}"
        for name, value in zip(names, values, strict=True)
    )


@dataclass
class VeiledTests:
    """Tests without answers."""

    source: str
    answers: dict[int, Answer | None] = field(default_factory=dict)
    certain: dict[str, frozenset[int]] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)


def veil(
    source: str, seen: str, ids: list[str], first: int = 0, *, exact: bool = False
) -> VeiledTests:
    """The tests of `source`, which call `seen` instead of asserting. `ids`: tests that will be run,
    as `TestA::test_b[1-2]`; `first`: the number of the first assertion; `exact`: answers compare
    types, too, and what is asserted by itself must be True, or False after `not`."""
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return VeiledTests(source)  # they will fail where they run
    return _Veil(source, seen, ids, first, exact).veiled(module)


_METHODS = {
    "assertEqual": "==", "assertEquals": "==", "assertNotEqual": "!=", "assertIs": "is",
    "assertIsNot": "is not", "assertIn": "in", "assertGreater": ">", "assertGreaterEqual": ">=",
    "assertLess": "<", "assertLessEqual": "<=", "assertListEqual": "==", "assertTupleEqual": "==",
    "assertDictEqual": "==", "assertSetEqual": "==", "assertSequenceEqual": "==",
    "assertMultiLineEqual": "==",
}  # fmt: skip
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "in": "contains"}
"""Operators that are others with their sides exchanged."""
_IDENTITY = ("is", "is not")
_CATCHING = ("raises", "suppress")


@dataclass(frozen=True)
class _Check:
    """One condition of an assertion: `left OPERATOR right`; no operator: it stays as it is."""

    whole: ast.expr
    left: ast.expr
    operator: str
    right: ast.expr


@dataclass(frozen=True)
class _Column:
    """Cells that a name stands for: in a loop, or (`by_row`) by the parameters of a test."""

    cells: list[ast.expr]
    by_row: bool


@dataclass(frozen=True)
class _Replacement:
    """The text that replaces a check, and the numbers of its answers (`by_row`: of each row)."""

    text: str
    numbers: range
    by_row: bool = False


class _Veil:
    def __init__(self, source: str, seen: str, ids: list[str], first: int, exact: bool) -> None:
        self._seen, self._ids, self._next, self._exact = seen, ids, first, exact
        self._text = source.encode()
        self._starts = [0]
        for line in self._text.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)
        self._edits: list[tuple[int, int, str]] = []
        self._result = VeiledTests(source)

    def veiled(self, module: ast.Module) -> VeiledTests:
        exact = self._exact
        functions = {
            name: (function, {node: _checks(node, exact) for node in _assertions(function.body)})
            for name, function in _functions(module.body, "")
        }
        every = [
            check
            for _, assertions in functions.values()
            for checks in assertions.values()
            for check in checks
        ]
        constants = _Uses(module, every, set())
        for name, (function, assertions) in functions.items():
            self._function(function, name, assertions, constants)
        for value in constants.emptied:
            self._edit(value, "(None)")
        text = self._text
        for start, end, new in sorted(self._edits, reverse=True):
            text = text[:start] + new.encode() + text[end:]
        self._result.source = text.decode()
        return self._result

    def _function(
        self,
        function: Function,
        name: str,
        assertions: dict[ast.stmt, list[_Check]],
        constants: _Uses,
    ) -> None:
        parameters = parameter_table(function, self._ids, name)
        tables = [*loop_tables(function), *([parameters] if parameters else [])]
        names = {name for table in tables for name in table.columns}
        every = [check for checks in assertions.values() for check in checks]
        uses = _Uses(function, every, names, constants)
        columns = {
            name: _Column(cells, table is parameters)
            for table in tables
            for name, cells in table.columns.items()
            if uses.is_answer(name)
        }
        certain = set(_certain(function.body, [table.loop for table in tables]))
        found = [
            replacement
            for node, checks in assertions.items()
            for replacement in self._replace(node, checks, uses, columns)
            if node in certain
        ]
        for value in uses.emptied:
            self._edit(value, "(None)")
        for column in columns.values():
            for place, cell in enumerate(column.cells):
                self._edit(cell, f"({place})")
        fixed = {number for made in found if not made.by_row for number in made.numbers}
        self._result.certain[name] = frozenset(fixed)
        if parameters is not None and any(column.by_row for column in columns.values()):
            self._rename(parameters, name, fixed, [made.numbers for made in found if made.by_row])

    def _rename(self, table: Table, name: str, fixed: set[int], by_row: list[range]) -> None:
        if table.end is not None:
            ids = ", ".join(f'"row{place}"' for place in range(len(table.ids)))
            end = self._span(table.end)[1]
            self._edits.append((end, end, f", ids=[{ids}]"))
        for place, old in enumerate(table.ids):
            new = old if table.end is None else f"row{place}"
            numbers = fixed | {numbers[place] for numbers in by_row}
            self._result.certain[f"{name}[{new}]"] = frozenset(numbers)
            self._result.renamed[f"{name}[{old}]"] = f"{name}[{new}]"

    def _replace(
        self, node: ast.stmt, checks: list[_Check], uses: _Uses, columns: dict[str, _Column]
    ) -> list[_Replacement]:
        found = [self._replacement(check, uses, columns) for check in checks]
        if any(found):
            texts = [
                replacement.text if replacement else f"assert ({self._source(check.whole)})"
                for replacement, check in zip(found, checks, strict=True)
            ]
            self._edit(node, "; ".join(texts))
        return [replacement for replacement in found if replacement]

    def _replacement(
        self, check: _Check, uses: _Uses, columns: dict[str, _Column]
    ) -> _Replacement | None:
        """Returns what takes the place of a check; None: it stays."""
        left, symbol, right = check.left, check.operator, check.right
        if not symbol:
            return None
        if uses.has_answer(left, columns):
            left, symbol, right = right, _MIRRORED.get(symbol, symbol), left
        if uses.has_answer(left, columns):
            return None
        value = self._source(left)
        column = columns.get(right.id) if isinstance(right, ast.Name) else None
        if not uses.has_answer(right, columns):
            if symbol != "==":
                return None
            numbers = self._numbered([None])
            other = self._source(right)
            return _Replacement(f"assert {self._seen}({numbers[0]}, ({value}), ({other}))", numbers)
        literals = [literal(cell) for cell in column.cells] if column else [uses.answer(right)]
        if symbol in _IDENTITY and not all(
            value is None or type(value) is bool for value in literals
        ):
            return None
        numbers = self._numbered([Answer(symbol, value, self._exact) for value in literals])
        place = f" + ({self._source(right)})" if column else ""
        by_row = column is not None and column.by_row
        return _Replacement(f"{self._seen}({numbers[0]}{place}, ({value}))", numbers, by_row)

    def _numbered(self, answers: Sequence[Answer | None]) -> range:
        first = self._next
        self._result.answers |= dict(enumerate(answers, first))
        self._next += len(answers)
        return range(first, self._next)

    def _source(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self._text[start:end].decode()

    def _span(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        end_line, end_column = node.end_lineno or 0, node.end_col_offset or 0
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[end_line - 1] + end_column,
        )

    def _edit(self, node: ast.stmt | ast.expr, text: str) -> None:
        start, end = self._span(node)
        lost = self._text[start:end].count(b"\n") - text.count("\n")
        self._edits.append((start, end, f"{text[:-1]}{chr(10) * max(lost, 0)}{text[-1]}"))


class _Uses:
    """Which names in a test, or in a module, hold a literal, and do nothing but answer."""

    def __init__(
        self,
        function: Function | ast.Module,
        checks: list[_Check],
        numbered: set[str],
        outer: _Uses | None = None,
    ) -> None:
        self._outer = outer
        self._literals: dict[str, Any] = {}
        names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
        self._loads = Counter(node.id for node in names if isinstance(node.ctx, ast.Load))
        self._loads -= Counter(_names_in_messages(function))
        self._stores = Counter(node.id for node in names if not isinstance(node.ctx, ast.Load))
        for node in ast.walk(function):
            if isinstance(node, ast.arg):
                self._stores[node.arg] += 1
            elif isinstance(node, ast.Global | ast.Nonlocal):
                self._stores.update(dict.fromkeys(node.names, 2))
        assigned = {
            node.targets[0].id: node.value
            for node in function.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and len(node.targets) == 1
            and literal(node.value) is not NoLiteral
        }
        known = assigned.keys() | numbered | (outer._literals.keys() if outer else set())
        self._answers: Counter[str] = Counter()
        for check in checks:
            kept = check.operator in ("", *_IDENTITY)
            sides = () if kept else (check.left, check.right)
            named = [side.id for side in sides if isinstance(side, ast.Name) and side.id in known]
            if len(named) == 1 and all(literal(side) is NoLiteral for side in sides):
                self._answers[named[0]] += 1
        empty = {name: value for name, value in assigned.items() if self.is_answer(name)}
        self._literals = {name: literal(value) for name, value in empty.items()}
        self.emptied = list(empty.values())
        """The literals that are taken away."""

    def is_answer(self, name: str) -> bool:
        """Returns whether a name is set once, and then only compared with values."""
        return self._stores[name] == 1 and 0 < self._loads[name] == self._answers[name]

    def answer(self, node: ast.expr) -> Any:
        """Returns the literal that is written there, or that the name stands for."""
        if isinstance(node, ast.Name) and node.id in self._literals:
            return self._literals[node.id]
        return literal(node) if self._outer is None else self._outer.answer(node)

    def has_answer(self, node: ast.expr, columns: dict[str, _Column]) -> bool:
        if isinstance(node, ast.Name) and node.id in columns:
            return True
        return self.answer(node) is not NoLiteral


def _functions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Function]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}::")
        elif isinstance(node, Function):
            yield prefix + node.name, node


def _names_in_messages(function: Function | ast.Module) -> Iterator[str]:
    """Names that only the message of an assertion uses, which goes with the assertion."""
    messages = [node.msg for node in ast.walk(function) if isinstance(node, ast.Assert)]
    for message in messages:
        found = ast.walk(message) if message is not None else ()
        yield from (node.id for node in found if isinstance(node, ast.Name))


def _assertions(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.Assert | ast.Expr):
            yield node
        elif not _catches(node):
            for part in ("body", "handlers", "orelse", "finalbody", "cases"):
                for inner in getattr(node, part, ()):
                    yield from _assertions([inner] if isinstance(inner, ast.stmt) else inner.body)


def _certain(body: list[ast.stmt], loops: list[ast.For | None]) -> Iterator[ast.stmt]:
    """Statements that a function that returns has come to; `loops` have at least one round."""
    for node in body:
        yield node
        inner = [] if isinstance(node, Function) else [*ast.walk(node)]
        leaves = any(isinstance(part, ast.Return | ast.Break | ast.Continue) for part in inner)
        if isinstance(node, ast.With | ast.AsyncWith) and not _catches(node):
            yield from _certain(node.body, loops)
        if isinstance(node, ast.For) and not leaves:
            items = node.iter.elts if isinstance(node.iter, ast.List | ast.Tuple) else []
            yield from _certain(node.body if items or node in loops else [], loops)
        if leaves:
            return


def _catches(node: ast.stmt) -> bool:
    if isinstance(node, ast.With | ast.AsyncWith):
        texts = [ast.unparse(item.context_expr).lower() for item in node.items]
        return any(part in text for part in _CATCHING for text in texts)
    return isinstance(node, ast.Try | ast.TryStar) and bool(node.handlers)


def _checks(node: ast.stmt, exact: bool) -> list[_Check]:
    """The conditions of an assertion, which all must hold; none of another statement."""
    match node:
        case ast.Assert(test=ast.BoolOp(op=ast.And(), values=tests)):
            return [_check(test, exact) for test in tests]
        case (
            ast.Assert(test=test)
            | ast.Expr(
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id="self"), attr="assertTrue"),
                    args=[test, *_],
                )
            )
        ):
            return [_check(test, exact)]
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(value=ast.Name(id="self"), attr=method), args=[left, right, *_]
            )
        ) if method in _METHODS and not isinstance(left, ast.Starred | ast.NamedExpr):
            if not isinstance(right, ast.Starred):
                return [_Check(node.value, left, _METHODS[method], right)]
    return []


def _check(test: ast.expr, exact: bool) -> _Check:
    match test:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            return _Check(test, left, OPERATORS.get(type(operator), ""), right)
        case ast.UnaryOp(op=ast.Not(), operand=value) if exact:
            return _Check(test, value, "is", ast.Constant(False))
    return _Check(test, test, "is", ast.Constant(True)) if exact else _Check(test, test, "", test)
