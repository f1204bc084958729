"""What the domains of tau are built on: hashes, results as text, the calculator."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
from envserver_environments.tau.domains.arithmetic import calculate
from envserver_environments.tau.domains.database import hash_of
from envserver_environments.tau.domains.toolkit import result_text
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import examples


def test_hashes_are_those_of_the_whole_json() -> None:
    shown = {"a": [1, 1.0, "1", None], "b": {"y": True, "x": 2}}
    text = '{"a": [1, 1.0, "1", null], "b": {"x": 2, "y": true}}'
    assert hash_of(shown) == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("as it is", "as it is"),
        (5, '"5"'),
        (True, '"True"'),
        (None, "null"),
        ({"a": [1, 2.5, None]}, '{"a": ["1", "2.5", null]}'),
        ([], "[]"),
    ],
)
def test_how_results_are_written(result: Any, text: str) -> None:
    assert result_text(result) == text


def outcome(expression: str, compute: Callable[[str], str]) -> str:
    try:
        return compute(expression)
    except Exception as error:  # noqa: BLE001 - errors are outcomes here
        return f"Error: {error}"


def by_python(expression: str) -> str:
    return str(round(float(eval(expression, {"__builtins__": None}, {})), 2))


@settings(max_examples=examples(300), deadline=None)
@given(st.text("0123456789+-*/(). ", max_size=9).filter(lambda text: "**" not in text))
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_calculate_is_python_on_arithmetic(expression: str) -> None:
    assert outcome(expression, calculate) == outcome(expression, by_python)


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("10/3", "3.33"),
        ("2 + 3 * 4", "14.0"),
        ("2**10", "1024.0"),
        ("1/0", "Error: division by zero"),
        ("__import__('os')", "Error: Invalid characters in expression"),
        ("9**9**9", "Error: int too large to convert to float"),
        ("(-8)**(1/2)", "Error: float() argument must be a string or a real number, not 'complex'"),
    ],
)
def test_what_calculate_gives(expression: str, result: str) -> None:
    assert outcome(expression, calculate) == result
