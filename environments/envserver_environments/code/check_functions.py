"""Asserts out of test functions: HumanEval's `check(candidate)`, EvalPlus's lists of inputs. Pure.

From `check` it takes the top-level asserts, with the function's own name instead of the parameter,
and with the values of names that were set to literals before. EvalPlus runs over `inputs` and
`results`; each pair becomes an assert with its comparison: equal, or close for floats.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from .extraction import parsed

MAX_PAIRS = 1000


def tests_of_check(source: str, entry_point: str) -> Iterator[str]:
    """The asserts of the last function `check` in `source`."""
    tree = parsed(source, limit=None)
    for statement in reversed(tree.body if tree else []):
        if isinstance(statement, ast.FunctionDef) and statement.name == "check":
            parameters = statement.args.args
            name = parameters[0].arg if parameters else "candidate"
            yield from _tests_of(statement.body, name, entry_point)
            return


def tests_of_script(source: str, entry_point: str) -> Iterator[str]:
    """The asserts that a script of EvalPlus makes."""
    tree = parsed(source, limit=None)
    yield from _tests_of(tree.body if tree else [], entry_point, entry_point)


def _tests_of(body: list[ast.stmt], name: str, entry_point: str) -> Iterator[str]:
    literals: dict[str, ast.expr] = {}
    for statement in body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)], value=value):
                literals.pop(target, None)
                if _is_literal(value):
                    literals[target] = value
            case ast.Assert(test=test):
                renamed = _Renamer(name, entry_point, literals).visit(copy.deepcopy(test))
                yield f"assert {ast.unparse(renamed)}"
            case ast.For() if _is_over_pairs(statement):
                yield from _pairs(literals, entry_point, _tolerance(statement))


class _Renamer(ast.NodeTransformer):
    def __init__(self, old: str, new: str, literals: dict[str, ast.expr]) -> None:
        self._old = old
        self._new = new
        self._literals = literals

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id == self._old:
            return ast.Name(self._new, ast.Load())
        return copy.deepcopy(self._literals.get(node.id, node))


def _is_over_pairs(loop: ast.For) -> bool:
    names = {node.id for node in ast.walk(loop.iter) if isinstance(node, ast.Name)}
    return {"inputs", "results"} <= names and any(
        isinstance(node, ast.Name) and node.id == "assertion" for node in ast.walk(loop)
    )


def _tolerance(loop: ast.For) -> float:
    """Returns the third argument of `assertion(out, wanted, tolerance)`."""
    for node in ast.walk(loop):
        match node:
            case ast.Call(func=ast.Name(id="assertion"), args=[_, _, ast.Constant(value=number)]):
                return float(number) if isinstance(number, int | float) else 0.0
    return 0.0


def _pairs(literals: dict[str, ast.expr], entry_point: str, tolerance: float) -> Iterator[str]:
    match literals.get("inputs"), literals.get("results"):
        case ast.List(elts=inputs), ast.List(elts=results) if len(inputs) == len(results):
            for arguments, wanted in list(zip(inputs, results, strict=True))[:MAX_PAIRS]:
                call = f"{entry_point}(*{ast.unparse(arguments)})"
                yield f"assert close({call}, {ast.unparse(wanted)}, {max(tolerance, 1e-6)!r})"


def _is_literal(node: ast.expr) -> bool:
    """Made of constants alone, or `float('inf')` and `set()`, which Python has no literals for."""
    return all(
        isinstance(
            part,
            ast.Constant | ast.List | ast.Tuple | ast.Set | ast.Dict | ast.UnaryOp | ast.unaryop
            | ast.expr_context | ast.BinOp | ast.operator | ast.Call,
        )
        or (isinstance(part, ast.Name) and part.id in ("float", "set", "inf", "nan"))
        for part in ast.walk(node)
    )  # fmt: skip
