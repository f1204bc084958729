"""Declares a domain's tools, and formats results for a model.

Methods marked by `@tool` may be called by a model; the others serve the set-up of tasks and their
assertions. Names of classes, methods and parameters are tau2-bench's: the model reads Python's own
messages ("RetailTools.f() missing 1 required positional argument: 'a'").
"""

from __future__ import annotations

import ast
import inspect
import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any, ClassVar, Literal, NoReturn, TypeVar, get_type_hints

from envserver_records.tasks import Json
from pydantic import BaseModel, Field, create_model

from .database import Database, Record

Requestor = Literal["assistant", "user"]
Kind = Literal["read", "write", "think", "generic"]
"""For people's information: only `write` tools change data, unless `mutates` says otherwise."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class DatabaseRow:
    """A record as the result of a tool: all its fields, numbers as numbers."""

    fields: Mapping[str, Any]


@dataclass(frozen=True)
class ToolInfo:
    name: str
    kind: Kind
    mutates: bool
    schema: Json
    """The schema in OpenAI's form."""


@dataclass(frozen=True)
class _Declared:
    kind: Kind
    mutates: bool
    description: str
    parameters: Mapping[str, str]
    types: Mapping[str, Any]


def tool(
    kind: Kind,
    description: str = "",
    /,
    *,
    mutates: bool | None = None,
    types: Mapping[str, Any] | None = None,
    **parameters: str,
) -> Callable[[_Function], _Function]:
    """Marks a method of a toolkit as a tool.

    Args:
        description: for the model; "": the method's docstring.
        mutates: it changes data, so that an evaluation must replay it; unset: if it is `write`.
        types: parameters whose type in the schema is another one than their annotation.
        parameters: description of each parameter, for the model; unset: that in `Toolkit.words`.
    """
    changes = kind == "write" if mutates is None else mutates

    def mark(function: _Function) -> _Function:
        words = description or " ".join((function.__doc__ or "").split())
        declared = _Declared(kind, changes, words, parameters, types or {})
        function.__tau_tool__ = declared  # type: ignore[attr-defined]
        return function

    return mark


handover = tool(
    "generic",
    "Hands the user over to a human colleague. Do so only if the user asks for one, or if "
    "policy and tools leave you no way to solve the issue.",
    summary="What the user's issue is, in short.",
)
calculation = tool(
    "generic",
    "Calculates the value of an arithmetic expression.",
    expression="Numbers, + - * /, parentheses and blanks, such as '2 + 2'.",
)


class Toolkit:
    words: ClassVar[Mapping[str, str]] = {}
    """Descriptions of parameters, by name, for tools that give no other."""

    def __init__(self, db: Database) -> None:
        self.db = db

    @classmethod
    def tools(cls) -> Mapping[str, ToolInfo]:
        """The tools that a model may call, in the order in which they are declared."""
        if cls not in _TOOLS:
            _TOOLS[cls] = _tools_of(cls)
        return _TOOLS[cls]

    def use(self, name: str, arguments: Mapping[str, Any]) -> Any:
        if name not in self.tools():
            raise ValueError(f"Tool '{name}' not found.")
        return getattr(self, name)(**arguments)

    def _existing(self, table: str, key: str, otherwise: str) -> Record:
        record = self.db.get(table, key)
        if record is None:
            raise ValueError(otherwise.format(key))
        return record


_TOOLS: dict[type[Toolkit], Mapping[str, ToolInfo]] = {}


def _tools_of(toolkit: type[Toolkit]) -> Mapping[str, ToolInfo]:
    functions: Json = {}
    for base in reversed(toolkit.__mro__):
        functions.update(vars(base))
    marked = {name: f for name, f in functions.items() if hasattr(f, "__tau_tool__")}
    return {name: _info(name, function, toolkit.words) for name, function in marked.items()}


def _info(name: str, function: Callable[..., Any], known: Mapping[str, str]) -> ToolInfo:
    declared: _Declared = function.__tau_tool__  # type: ignore[attr-defined]
    hints = get_type_hints(function)
    fields: Json = {}
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        default = ... if parameter.default is parameter.empty else parameter.default
        words = declared.parameters.get(parameter.name, known.get(parameter.name))
        field = default if words is None else Field(default, description=words)
        fields[parameter.name] = (declared.types.get(parameter.name, hints[parameter.name]), field)
    description = {
        "name": name,
        "description": declared.description,
        "parameters": create_model("parameters", **fields).model_json_schema(),
    }
    schema = {"type": "function", "function": description}
    return ToolInfo(name, declared.kind, declared.mutates, schema)


def with_whole_numbers(tool: ToolInfo, arguments: Mapping[str, Any]) -> Json:
    """`arguments` with integers where the tool asks for integers and a number like 2.0 is given."""
    properties = tool.schema["function"]["parameters"]["properties"]

    def normalised(name: str, value: Any) -> Any:
        whole = properties.get(name, {}).get("type") == "integer"
        return int(value) if whole and isinstance(value, float) and value.is_integer() else value

    return {name: normalised(name, value) for name, value in arguments.items()}


def result_text(result: Any) -> str:
    """The result as the model reads it: strings as they are, records as JSON with all their fields;
    in other values numbers and booleans become strings, as in tau2-bench."""
    return result if isinstance(result, str) else json.dumps(_shown(result), default=str)


def _shown(value: Any) -> Any:
    match value:
        case DatabaseRow():
            return value.fields
        case BaseModel():
            return value.model_dump()
        case str() | None:
            return value
        case int() | float():
            return str(value)
        case list() | tuple():
            return [_shown(item) for item in value]
        case dict():
            return {key: _shown(item) for key, item in value.items()}
        case date():
            return value.isoformat()
    raise ValueError(f"Unsupported type: {type(value)}")


# tau2-bench's `calculate` evaluates digits, + - * / ( ) . and blanks as Python and rounds to two
# decimals. Here the tree is walked instead, and numbers of more than 100,000 bits are refused at
# once, with the error that Python would raise after minutes.

_ALLOWED = "0123456789+-*/(). "
_MAX_BITS = 100_000


def calculate(expression: str) -> str:
    """The value of `expression`, rounded to two decimals, as a float is printed."""
    if not all(character in _ALLOWED for character in expression):
        raise ValueError("Invalid characters in expression")
    tree = ast.parse(expression.lstrip(" \t"), filename="<string>", mode="eval")
    return str(round(float(_value(tree.body)), 2))


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Tuple(elts=[]):
            return ()
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return +_value(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return _binary(op, _value(left), _value(right))
        case ast.Call(func=function, args=arguments):
            _refuse_call(_value(function), arguments)
    raise ValueError("Invalid characters in expression")


def _refuse_call(function: Any, arguments: list[ast.expr]) -> NoReturn:
    """Raises what Python says of calling a number."""
    for argument in arguments:
        if isinstance(argument, ast.Starred):
            kind = type(_value(argument.value)).__name__
            raise TypeError(f"{function} argument after * must be an iterable, not {kind}")
        _value(argument)
    raise TypeError(f"{type(function).__name__!r} object is not callable")


def _binary(op: ast.operator, left: Any, right: Any) -> Any:
    if isinstance(op, ast.Pow) and _too_large(left, right):
        raise OverflowError("int too large to convert to float")
    return _OPERATORS[type(op)](left, right)


def _too_large(base: Any, exponent: Any) -> bool:
    if not (isinstance(base, int) and isinstance(exponent, int)) or abs(base) <= 1:
        return False
    return base.bit_length() * exponent > _MAX_BITS


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
