"""The base class of settings and of the models of the wire: docstrings below fields are their help.

They are read when they are shown. pydantic's `use_attribute_docstrings` finds them too, but reads
the source of every class while it is imported, which took a tenth of a server's start.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic_core import CoreSchema


class Described(BaseModel):
    """Base of models whose fields have docstrings: they are the descriptions in JSON schemas."""

    model_config = ConfigDict(defer_build=True)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in descriptions(cls).items():
            if name in properties:
                properties[name].setdefault("description", text)
        return schema


class Section(Described):
    """Base class of all settings: unknown names are errors, docstrings are help texts."""

    model_config = ConfigDict(
        extra="forbid", validate_default=True, populate_by_name=True, protected_namespaces=()
    )


@functools.cache
def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Returns the description of each field that has one; for its users to read, not to change."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        found |= _of_module(base.__module__).get(base.__qualname__, {})
    own = {name: field.description for name, field in model.model_fields.items()}
    return {name: text for name in own if (text := own[name] or found.get(name))}


def describe_fields(model: type[BaseModel]) -> None:
    """Writes the descriptions into the fields, where FastAPI reads those of parameters."""
    for name, text in descriptions(model).items():
        model.model_fields[name].description = text


@functools.cache
def _of_module(name: str) -> dict[str, dict[str, str]]:
    """Returns the docstrings below the fields of each class; none if there is no source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[name]))
    except (KeyError, OSError, TypeError):
        return {}
    return dict(_of_classes(tree, ""))


def _of_classes(tree: ast.AST, prefix: str) -> Iterator[tuple[str, dict[str, str]]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield f"{prefix}{node.name}", dict(_below_fields(node))
            yield from _of_classes(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _of_classes(node, f"{prefix}{node.name}.<locals>.")


def _below_fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, below in zip(node.body, node.body[1:], strict=False):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str() as text)),
            ):
                yield name, inspect.cleandoc(text)
