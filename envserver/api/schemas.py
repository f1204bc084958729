"""Schemas of bodies in the OpenAPI document, made when somebody asks for the document.

In: the models that routes name, and a document that only refers to them. Out: the document with
their schemas, nested ones among its components. To make them took an eighth of a server's start.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from pydantic import BaseModel

_PLACE: Final = "#/components/schemas/"
_LATER: Final = "#/later/"

Json = dict[str, Any]


def schema_later(model: type[BaseModel], *, is_answer: bool = False) -> Json:
    """Returns a reference that `fill_schemas` replaces.

    Args:
        is_answer: the schema becomes a component, in which fields with a default are required.
    """
    mode = "serialization" if is_answer else "validation"
    return {"$ref": f"{_LATER}{mode}/{model.__module__}/{model.__qualname__}"}


def fill_schemas(part: Any, components: Json) -> None:
    """Replaces the references of `schema_later` in `part`, and moves nested schemas (`$defs`) to
    `components`.
    """
    if isinstance(part, list):
        for each in part:
            fill_schemas(each, components)
    elif isinstance(part, dict):
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith(_LATER):
            _fill(part, reference, components)
        elif isinstance(reference, str):
            part["$ref"] = reference.replace("#/$defs/", _PLACE)
        for name, schema in part.pop("$defs", {}).items():
            _add(name, schema, components)
        for each in list(part.values()):
            fill_schemas(each, components)


def _fill(part: Json, reference: str, components: Json) -> None:
    mode, module, name = reference.removeprefix(_LATER).split("/")
    model: type[BaseModel] = getattr(sys.modules[module], name)
    if mode == "validation":
        part.clear()
        part.update(model.model_json_schema())
    else:
        part["$ref"] = _PLACE + name
        _add(name, model.model_json_schema(mode="serialization"), components)


def _add(name: str, schema: Json, components: Json) -> None:
    if name not in components:
        components[name] = schema
        fill_schemas(schema, components)
