"""The calculator: right values as text, a refusal for everything else, always at once."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

from envserver_tools.calculator import CALCULATE, calculate
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from support.cpu import cpu_limit

CASES = json.loads(Path(__file__).with_name("calculator.json").read_text())
NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]\d+)?")


def test_values_and_refusals() -> None:
    values = CASES["values"]
    assert {expression: calculate(expression) for expression in values} == values
    for error, expressions in CASES["refusals"].items():
        refused = {expression: calculate(expression) for expression in expressions}
        assert refused == dict.fromkeys(expressions, f"error: {error}")


@given(st.text(alphabet="0123456789.+-*/%^()e,! abcdfgilmnopqrstx", max_size=200))
def test_never_raises_and_is_quick(expression: str) -> None:
    started = time.process_time()
    answer = calculate(expression)
    assert time.process_time() - started < cpu_limit(0.5)
    assert answer.startswith("error: ") or NUMBER.fullmatch(answer)


@given(st.integers(-(10**30), 10**30), st.integers(-(10**30), 10**30))
def test_integers_are_exact(a: int, b: int) -> None:
    assert calculate(f"({a}) * ({b}) - ({a})") == str(a * b - a)


def test_schema_bounds_what_a_model_may_send() -> None:
    validator = Draft202012Validator(CALCULATE["function"]["parameters"])
    assert validator.is_valid({"expression": "1+1"})
    for wrong in ({"expression": "1" * 201}, {"expression": "1", "shell": "ls"}, {}):
        assert not validator.is_valid(wrong)
