"""The OpenAPI document, and `/docs`, a page made of it that needs no other host.

In: the routes as FastAPI describes them. Out: the document with what routes do not know: errors
that the middleware and the connection answer, and nested schemas, which request bodies bring along.
What holds: every reference in the document leads somewhere.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from typing import Any, Final

from fastapi import FastAPI
from starlette.responses import HTMLResponse

from .access.rules import rules_of
from .native.answers import MEANINGS
from .native.models import Problem
from .problems import PROBLEM, is_native

_ALWAYS: Final = (400, 401, 403, 408, 413, 414, 421, 429, 431, 500, 503)
"""Answers of the middleware and of the connection, to any request: a GET may have a body, too."""
_OF_BODIES: Final = (422, 507)
_OF_CHANGES: Final = (507,)
_PLACE: Final = "#/components/schemas/"
_PROBLEM: Final = {"content": {PROBLEM: {"schema": Problem.model_json_schema()}}}
_DETAIL: Final = {
    "content": {
        "application/json": {
            "schema": {"type": "object", "properties": {"detail": {}}, "required": ["detail"]}
        }
    }
}
_PLAIN: Final = {"text/plain": {"schema": {"type": "string"}}}

Json = dict[str, Any]


def install(app: FastAPI) -> None:
    """Completes the document of `app` and adds `/docs`."""
    described: Callable[[], Json] = app.openapi
    made: list[Json] = []

    def openapi() -> Json:
        if not made:
            made.append(completed(described()))
        return made[0]

    app.openapi = openapi  # type: ignore[method-assign]

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(openapi()))


def completed(document: Json) -> Json:
    """Adds to `document` the errors of every route, and moves nested schemas to its components."""
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
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    _lift(document["paths"], schemas)
    return document


def _lift(part: Any, schemas: Json) -> None:
    """Moves every `$defs` in `part` to `schemas`, and its references with it."""
    if isinstance(part, list):
        for each in part:
            _lift(each, schemas)
    elif isinstance(part, dict):
        reference = part.get("$ref")
        if isinstance(reference, str):
            part["$ref"] = reference.replace("#/$defs/", _PLACE)
        for name, schema in part.pop("$defs", {}).items():
            schemas.setdefault(name, schema)
            _lift(schemas[name], schemas)
        for each in list(part.values()):
            _lift(each, schemas)


_STYLE: Final = (
    "body{font:15px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "pre{background:#f4f4f4;padding:.6rem;overflow:auto}summary{cursor:pointer;padding:.2rem 0}"
    "code{font-size:14px;margin-right:.6rem}td{padding:.1rem .8rem .1rem 0;vertical-align:top}"
)
_LINK: Final = r'<a href="#\1">\1</a>'
_REFERENCE: Final = re.compile(r"&quot;#/components/schemas/([^&]+)&quot;")


def docs_page(document: Json) -> str:
    """Returns the document as a page for people."""
    info = document["info"]
    title = html.escape(f"{info['title']} {info['version']}")
    by_tag: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            tag = (operation.get("tags") or ["others"])[0]
            by_tag.setdefault(tag, []).append(_operation(method.upper(), path, operation))
    parts = [f"<h2>{html.escape(tag)}</h2>" + "".join(rows) for tag, rows in by_tag.items()]
    schemas = "".join(
        f'<details id="{html.escape(name)}"><summary><code>{html.escape(name)}</code></summary>'
        f"{_json(schema)}</details>"
        for name, schema in document["components"]["schemas"].items()
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><h1>{title}</h1>"
        '<p>For programs: <a href="openapi.json">openapi.json</a>.</p>'
        f"{''.join(parts)}<h2>Schemas</h2>{schemas}</html>"
    )


def _operation(method: str, path: str, operation: Json) -> str:
    words = operation.get("description", "")
    description = html.escape(words).replace("\n\n", "<p>")
    sentence = html.escape(words.partition("\n\n")[0].partition(". ")[0].rstrip("."))
    parts = [f"<p>{description}</p>"]
    if parameters := operation.get("parameters"):
        parts.append(f"<h4>Parameters</h4>{_json(parameters)}")
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        parts.append(f"<h4>Body: {html.escape(kind)}</h4>{_json(content.get('schema', {}))}")
    parts.append("<h4>Answers</h4>")
    for status, answer in operation["responses"].items():
        shown = ""
        if status < "300":
            shown = "".join(_json(each) for each in answer.get("content", {}).values())
        kinds = ", ".join(answer.get("content", {}))
        text = html.escape(f"{answer['description']} {f'({kinds})' if kinds else ''}")
        parts.append(f"<div><b>{status}</b> {text}{shown}</div>")
    name = html.escape(f"{method} {path}")
    summary = f"<summary><code>{name}</code> {sentence}</summary>"
    return f"<details>{summary}{''.join(parts)}</details>"


def _json(value: Any) -> str:
    text = html.escape(json.dumps(value, indent=2, ensure_ascii=False))
    return "<pre>" + _REFERENCE.sub(_LINK, text) + "</pre>"
