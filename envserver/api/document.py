"""The OpenAPI document, which `/docs` of the page shows.

In: the routes as FastAPI describes them. Out: the document with what routes do not know: errors
that the middleware and the connection answer, and the schemas of bodies.
What holds: every reference in the document leads somewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fastapi import FastAPI

from ..settings.section import describe_fields
from .access.rules import rules_of
from .native.answers import MEANINGS
from .native.models import StreamRequest
from .native.searching import GroupFilter, GroupSearch
from .problems import PROBLEM, Problem, is_native
from .schemas import Json, fill_schemas, schema_later

_ALWAYS: Final = (400, 401, 403, 408, 413, 414, 421, 429, 431, 500, 503)
"""Answers of the middleware and of the connection, to any request: a GET may have a body, too."""
_OF_BODIES: Final = (422, 507)
_OF_CHANGES: Final = (507,)
_PROBLEM: Final = {"content": {PROBLEM: {"schema": schema_later(Problem)}}}
_DETAIL: Final = {
    "content": {
        "application/json": {
            "schema": {"type": "object", "properties": {"detail": {}}, "required": ["detail"]}
        }
    }
}
_QUERIES: Final = (StreamRequest, GroupFilter, GroupSearch)
"""Models whose fields are parameters of a query."""
_PLAIN: Final = {"text/plain": {"schema": {"type": "string"}}}


def complete_document(app: FastAPI) -> None:
    """Completes the document of `app`."""
    described: Callable[[], Json] = app.openapi
    made: list[Json] = []

    def openapi() -> Json:
        if not made:
            for model in _QUERIES:
                describe_fields(model)
            made.append(completed(described()))
        return made[0]

    app.openapi = openapi  # type: ignore[method-assign]


def completed(document: Json) -> Json:
    """Adds to `document` the errors of every route, and fills in the schemas of bodies."""
    for path, operations in document["paths"].items():
        error = _PROBLEM if is_native(path) else _DETAIL
        rules = rules_of(path)
        for method, operation in operations.items():
            own = {int(status) for status in operation["responses"]}
            more = {*_ALWAYS, *(_OF_BODIES if "requestBody" in operation else ())}
            rule = rules.get(method.upper())
            if method != "get" or (rule is not None and rule.is_change):
                more.update(_OF_CHANGES)
            for status in sorted(more - own):
                operation["responses"][str(status)] = {"description": MEANINGS[status], **error}
            for status in own:
                if status >= 400:
                    operation["responses"][str(status)].setdefault("content", error["content"])
            if not is_native(path):  # a body that is not gzip, as atroposlib's server tells it
                content = operation["responses"]["400"]["content"]
                operation["responses"]["400"]["content"] = {**content, **_PLAIN}
    components = document.setdefault("components", {})
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"token": []}]  # where access tokens are required
    schemas = components.setdefault("schemas", {})
    fill_schemas(document["paths"], schemas)
    return document
