"""Values that a JSON schema allows, drawn at random: arguments for tools nobody demonstrated.

Covered: type, enum, const, properties, required, items, minItems, string lengths, numeric bounds,
multipleOf, anyOf/oneOf (the first), allOf (merged), local $ref and common formats of text (dates,
addresses, ids). `pattern` is not.
"""

from __future__ import annotations

import math
import random
from typing import Any

from .wording import NOUNS

_OPTIONAL_DEPTH = 6
"""Below this depth optional values are left out."""
_MAX_DEPTH = 32
_MAX_VALUES = 2000
_MAX_CHARACTERS = 4000
_MAX_STEPS = 8
_FORMATS = {
    "date": ("2024-02-29", "2025-11-03", "1999-12-31"),
    "time": ("08:30:00Z", "23:59:59Z"),
    "date-time": ("2024-02-29T08:30:00Z", "2025-11-03T17:00:00Z"),
    "email": ("river@example.com", "stone.bridge@example.org"),
    "hostname": ("example.com", "www.example.org"),
    "uri": ("https://example.com/garden", "https://example.org/"),
    "uuid": ("6f1c3a52-9d0e-4b7a-8c21-5e4f3d2b1a09", "0b9d7f3e-1a2c-4d5e-9f80-7a6b5c4d3e2f"),
    "ipv4": ("192.0.2.7", "198.51.100.23"),
}


def drawn_value(schema: Any, rng: random.Random) -> Any:
    """Draws a small value for `schema`; the same state of `rng` gives the same value.

    Raises:
        ValueError: the schema asks for more than a few thousand values or characters, for values
            that contain themselves, or allows no value.
        TypeError, AttributeError, LookupError, ArithmeticError: it is not a JSON schema.
    """
    return _Drawer(schema if isinstance(schema, dict) else {}, rng).draw(schema, 0)


class _Drawer:
    def __init__(self, root: dict[str, Any], rng: random.Random) -> None:
        self._root = root
        self._rng = rng
        self._left = _MAX_VALUES

    def draw(self, schema: Any, depth: int) -> Any:
        self._left -= 1
        if self._left < 0 or depth > _MAX_DEPTH:
            raise ValueError("it asks for too many values, or for values within values without end")
        schema = self._resolved(schema if isinstance(schema, dict) else {})
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return self._rng.choice(schema["enum"])
        match _kind(schema):
            case "object":
                return self._object(schema, depth)
            case "array":
                count = int(schema.get("minItems", 1 if depth < _OPTIONAL_DEPTH else 0))
                items = schema.get("items", {})
                return [self.draw(items, depth + 1) for _ in range(count)]
            case "integer" | "number" as kind:
                return self._number(schema, whole=kind == "integer")
            case "boolean":
                return self._rng.random() < 0.5
            case "null":
                return None
        return self._string(schema)

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        for _ in range(_MAX_STEPS):
            branch = schema.get("anyOf") or schema.get("oneOf")
            if isinstance(schema.get("$ref"), str):
                schema = _referenced(schema["$ref"], self._root)
            elif isinstance(branch, list) and isinstance(branch[0], dict):
                schema = branch[0]
            elif isinstance(schema.get("allOf"), list):
                rest = {key: value for key, value in schema.items() if key != "allOf"}
                parts = [part for part in schema["allOf"] if isinstance(part, dict)]
                schema = _merged([rest, *parts])
            else:
                break
        return schema

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties", {})
        required = set(schema.get("required", []))
        chosen = [
            name
            for name in properties
            if name in required or (depth < _OPTIONAL_DEPTH and self._rng.random() < 0.3)
        ]
        drawn = {name: self.draw(properties[name], depth + 1) for name in chosen}
        unknown = sorted(required - set(properties))
        return drawn | {name: self._rng.choice(NOUNS) for name in unknown}

    def _number(self, schema: dict[str, Any], *, whole: bool) -> int | float:
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
        value = self._rng.randint(first, min(last, first + 20)) * step
        return int(value) if whole else float(value)

    def _string(self, schema: dict[str, Any]) -> str:
        if schema.get("format") in _FORMATS:
            return self._rng.choice(_FORMATS[schema["format"]])
        text = " ".join(self._rng.choice(NOUNS) for _ in range(self._rng.randint(1, 4)))
        shortest, longest = schema.get("minLength", 0), schema.get("maxLength")
        if shortest > _MAX_CHARACTERS:
            raise ValueError(f"it asks for a text of {shortest} characters")
        while len(text) < shortest:
            text = f"{text} {self._rng.choice(NOUNS)}"
        return text if longest is None else text[: int(longest)]


def _kind(schema: dict[str, Any]) -> Any:
    kind = schema.get("type") or ("object" if "properties" in schema else "string")
    if isinstance(kind, list):
        return next((name for name in kind if name != "null"), "null")
    return kind


def _referenced(reference: str, root: dict[str, Any]) -> dict[str, Any]:
    target: Any = root
    for step in reference.removeprefix("#").removeprefix("/").split("/"):
        if step:
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
