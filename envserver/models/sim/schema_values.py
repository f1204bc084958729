"""Values that a JSON schema allows, drawn at random: arguments for tools nobody demonstrated.

Covered: type, enum, const, properties, required, items, minItems, string lengths, numeric bounds,
multipleOf, anyOf/oneOf (the first), allOf (merged) and local $ref. `pattern` and `format` are not.
"""

from __future__ import annotations

import math
import random
from typing import Any

from .wording import NOUNS

_MAX_DEPTH = 6


def drawn_value(schema: Any, rng: random.Random) -> Any:
    """A value for `schema`; small, and the same for the same state of `rng`."""
    return _draw(schema, rng, schema if isinstance(schema, dict) else {}, 0)


def _draw(schema: Any, rng: random.Random, root: dict[str, Any], depth: int) -> Any:
    if not isinstance(schema, dict):
        return rng.choice(NOUNS)
    schema = _resolved(schema, root)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return rng.choice(schema["enum"])
    kind = schema.get("type") or ("object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = next((name for name in kind if name != "null"), "null")
    if kind == "object":
        return _object(schema, rng, root, depth)
    if kind == "array":
        shortest = int(schema.get("minItems", 1 if depth < _MAX_DEPTH else 0))
        return [_draw(schema.get("items", {}), rng, root, depth + 1) for _ in range(shortest)]
    if kind in ("integer", "number"):
        return _number(schema, rng, whole=kind == "integer")
    if kind == "boolean":
        return rng.random() < 0.5
    return None if kind == "null" else _string(schema, rng)


def _resolved(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    for _ in range(_MAX_DEPTH):
        branch = schema.get("anyOf") or schema.get("oneOf")
        if isinstance(schema.get("$ref"), str):
            schema = _referenced(schema["$ref"], root)
        elif isinstance(branch, list) and isinstance(branch[0], dict):
            schema = branch[0]
        elif isinstance(schema.get("allOf"), list):
            rest = {key: value for key, value in schema.items() if key != "allOf"}
            schema = _merged([rest, *(part for part in schema["allOf"] if isinstance(part, dict))])
        else:
            break
    return schema


def _referenced(reference: str, root: dict[str, Any]) -> dict[str, Any]:
    target: Any = root
    for step in reference.removeprefix("#/").split("/"):
        target = target.get(step) if isinstance(target, dict) else None
    return target if isinstance(target, dict) else {}


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        merged |= part | {
            "properties": {**merged.get("properties", {}), **part.get("properties", {})},
            "required": [*merged.get("required", []), *part.get("required", [])],
        }
    return {key: value for key, value in merged.items() if value not in ({}, [])}


def _object(
    schema: dict[str, Any], rng: random.Random, root: dict[str, Any], depth: int
) -> dict[str, Any]:
    properties = schema.get("properties", {})
    required = set(schema.get("required", []))
    chosen = [
        name
        for name in properties
        if name in required or (depth < _MAX_DEPTH and rng.random() < 0.3)
    ]
    drawn = {name: _draw(properties[name], rng, root, depth + 1) for name in chosen}
    return drawn | {name: rng.choice(NOUNS) for name in sorted(required - set(properties))}


def _number(schema: dict[str, Any], rng: random.Random, *, whole: bool) -> int | float:
    step = schema.get("multipleOf", 1 if whole else 0.5)
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is None:
        low = 0 if high is None else high - 20 * step
    first = math.ceil(low / step)
    if first * step == schema.get("exclusiveMinimum"):
        first += 1
    last = first + 20 if high is None else max(first, math.floor(high / step))
    if last > first and last * step == schema.get("exclusiveMaximum"):
        last -= 1
    value = rng.randint(first, min(last, first + 20)) * step
    return int(value) if whole else float(value)


def _string(schema: dict[str, Any], rng: random.Random) -> str:
    text = " ".join(rng.choice(NOUNS) for _ in range(rng.randint(1, 4)))
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength")
    while len(text) < shortest:
        text = f"{text} {rng.choice(NOUNS)}"
    return text if longest is None else text[: int(longest)]
