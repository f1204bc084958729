"""How far two sets of named tensors are apart."""

from collections.abc import Mapping
from typing import Any


def difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """Their distance relative to the length of `expected`."""
    assert found.keys() == expected.keys()
    away = sum(float((found[name] - expected[name]).double().square().sum()) for name in expected)
    size = sum(float(value.double().square().sum()) for value in expected.values())
    return float((away / size) ** 0.5)
