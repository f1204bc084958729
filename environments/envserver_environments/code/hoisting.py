"""Splits an assert into calls of the function under test and a claim about their values.

`assert abs(area(2) - 12.566) < 1e-3` becomes `area(2)`, which runs in the sandbox, and
`abs(value - 12.566) < 1e-3`, evaluated here: a program can never read the expected value.
"""

from __future__ import annotations

import ast
import builtins
import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from envserver_environments.demonstrations import table_beside

from .expressions import bound_names, evaluate, why_unsupported
from .extraction import parsed

MAX_TEST_CHARACTERS = 20_000
MAX_UNROLLED = 100
"""Turns of a loop over calls in one assert."""
MAX_TURNS = 1000
Values = dict[str, ast.expr]

_KNOWN = table_beside(__file__)
_FOR_CALLS = {name for name in dir(builtins) if not name.startswith("_")} - {*_KNOWN["refused"]}


class NotHoistable(Exception):
    """A test cannot be split; the message says why."""


@dataclass(frozen=True)
class HoistedTest:
    """A test, split into calls and a claim."""

    source: str
    calls: tuple[str, ...]
    claim: ast.expr  # names `_call_0`, `_call_1` ... stand for the calls' values

    @property
    def determines(self) -> bool:
        """Returns whether the claim leaves one value to its only call (or one but for rounding)."""
        match self.claim:
            case (
                ast.Name()
                | ast.UnaryOp(op=ast.Not(), operand=ast.Name())
                | ast.Compare(left=ast.Name(), ops=[ast.Eq() | ast.Is()])
                | ast.Compare(
                    left=ast.Call(func=ast.Name(id="abs"), args=[ast.BinOp(left=ast.Name())]),
                    ops=[ast.Lt() | ast.LtE()],
                )
                | ast.Call(func=ast.Name(id="close"), args=[ast.Name(), *_])
            ):
                return len(self.calls) == 1
        return False

    @property
    def wanted(self) -> Any:
        """Returns the literal that the claim compares with, or None if it compares otherwise."""
        match self.claim:
            case (
                ast.Compare(ops=[ast.Eq()], comparators=[literal])
                | ast.Call(func=ast.Name(id="close"), args=[_, literal, *_])
            ):
                try:
                    return ast.literal_eval(literal)
                except (ValueError, TypeError):
                    return None
        return None

    def holds(self, values: Mapping[int, Any]) -> bool:
        """Returns whether the claim is true of the calls' values; a missing call raised."""
        try:
            return bool(evaluate(self.claim, {_name(n): value for n, value in values.items()}))
        except Exception:  # noqa: BLE001 - whatever Python raises for such values fails the test
            return False


def prelude(sources: tuple[str, ...]) -> str:
    """The imports that these calls need: tests have names of their own, not the program's."""
    names = {
        node.id
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Name)
    }
    lines = [f"import {module}" for module in sorted(names.intersection(_KNOWN["modules"]))]
    for module, offered in _KNOWN["from"].items():
        lines += [f"from {module} import {name}" for name in offered if name in names]
    # `import datetime` and `from datetime import datetime` cannot both be meant.
    return "\n".join(line for line in lines if line != "from datetime import datetime")


@functools.lru_cache(maxsize=4096)
def hoisted(source: str, entry_point: str) -> HoistedTest:
    if len(source) > MAX_TEST_CHARACTERS:
        raise NotHoistable("it is too long")
    tree = parsed(source.strip())
    if tree is None:
        raise NotHoistable("it is not Python")
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.Assert):
        raise NotHoistable("it is not a single assert")
    try:
        hoister = _Hoister(entry_point)
        claim = hoister.visit(tree.body[0].test)
    except RecursionError as error:
        raise NotHoistable("it is nested too deeply") from error
    if not hoister.calls:
        raise NotHoistable("it calls nothing")
    known = {_name(number) for number in range(len(hoister.calls))}
    reason = why_unsupported(claim, known)
    if reason:
        raise NotHoistable(reason)
    return HoistedTest(source.strip(), tuple(hoister.calls), claim)


def _name(number: int) -> str:
    return f"_call_{number}"


def _calls_of(node: ast.AST, entry_point: str) -> bool:
    return any(isinstance(n, ast.Name) and n.id == entry_point for n in ast.walk(node))


class _Hoister(ast.NodeTransformer):
    """Takes the calls out; writes loops over calls out: `[f(i) for i in range(3)]` is
    `[f(0), f(1), f(2)]`."""

    def __init__(self, entry_point: str) -> None:
        self._entry_point = entry_point
        self.calls: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not (isinstance(node.func, ast.Name) and node.func.id == self._entry_point):
            return self.generic_visit(node)
        _check_names(node, self._entry_point)
        source = ast.unparse(node)
        # The same call twice is two calls: `f(1) == f(1)` asks whether it is stable.
        self.calls.append(source)
        return ast.Name(_name(len(self.calls) - 1), ast.Load())

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id == self._entry_point:
            raise NotHoistable("it uses the function otherwise than by calling it")
        return node

    def visit_ListComp(self, node: ast.ListComp | ast.GeneratorExp) -> ast.AST:
        loop = node.generators[0]
        if not _calls_of(node.elt, self._entry_point):
            return self.generic_visit(node)
        if len(node.generators) > 1 or loop.ifs or _calls_of(loop.iter, self._entry_point):
            raise NotHoistable("its loop over calls is not simple")
        found = turns(loop.target, loop.iter)
        if found is None:
            raise NotHoistable("its loop over calls is not over plain values")
        if len(found) > MAX_UNROLLED:
            raise NotHoistable("its loop over calls is too long")
        written = [Filler(values).visit(copy.deepcopy(node.elt)) for values in found]
        return ast.List([self.visit(part) for part in written], ast.Load())

    visit_GeneratorExp = visit_ListComp


def _check_names(call: ast.Call, entry_point: str) -> None:
    """Checks that all names in the arguments have a meaning without the program."""
    known = bound_names(call).union([entry_point], _FOR_CALLS, _KNOWN["modules"])
    known.update(*_KNOWN["from"].values())
    for node in ast.walk(call):
        match node:
            case ast.Name(id=name) if name not in known:
                raise NotHoistable(f"its call needs {name}")
            case ast.Attribute(attr=name) if name.startswith("_"):
                raise NotHoistable(f"its call needs .{name}")
            case ast.Await() | ast.Yield() | ast.YieldFrom() | ast.NamedExpr():
                raise NotHoistable(f"its call has a {type(node).__name__}")


def turns(target: ast.expr, items: ast.expr) -> list[Values] | None:
    """Returns the variables of each of the first MAX_TURNS turns; None if they are not literals."""
    found = _items(items)
    return None if found is None else [bound(target, item) for item in found]


def bound(target: ast.expr, item: ast.expr) -> Values:
    match target, item:
        case ast.Name(id=name), _:
            return {name: item}
        case (
            (ast.Tuple(elts=names) | ast.List(elts=names)),
            (ast.Tuple(elts=items) | ast.List(elts=items)),
        ) if len(names) == len(items):
            pairs = zip(names, items, strict=True)
            return {name: value for part in pairs for name, value in bound(*part).items()}
    return {}


def _items(node: ast.expr) -> list[ast.expr] | None:
    match node:
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return items[:MAX_TURNS]
        case ast.Constant(value=str(text)):
            return [ast.Constant(character) for character in text[:MAX_TURNS]]
        case ast.Call(func=ast.Name(id="zip" | "enumerate" as name), args=args):
            columns = [column for column in map(_items, args) if column is not None]
            if len(columns) < len(args):
                return None
            if name == "enumerate":
                columns.insert(0, [ast.Constant(number) for number in range(MAX_TURNS)])
            return [ast.Tuple(list(row), ast.Load()) for row in zip(*columns, strict=False)]
        case ast.Call(func=ast.Name(id="range"), args=ends):
            try:
                numbers = range(*map(ast.literal_eval, ends))
            except (ValueError, TypeError):
                return None
            return [ast.Constant(number) for number in numbers[:MAX_TURNS]]
    return None


class Filler(ast.NodeTransformer):
    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return copy.deepcopy(self._values.get(node.id, node))
