"""How much the tests try: a part in `make test`, all in `make test-all` and `make test-slow`."""

import os
from typing import Final

import pytest
from _pytest.mark import ParameterSet

WHOLE: Final = os.environ.get("TEST_EXTENT") == "whole"


def first_of(*cases: object) -> list[ParameterSet]:
    """Cases of one behaviour: the first runs in `make test`, the others in whole runs only."""
    first, *others = cases
    return [
        pytest.param(first),
        *(pytest.param(case, marks=pytest.mark.thorough) for case in others),
    ]


def examples(whole: int) -> int:
    """How many examples hypothesis tries, of `whole` in a whole run: a quarter, 10 to 60."""
    return whole if WHOLE else min(60, max(10, whole // 4))
