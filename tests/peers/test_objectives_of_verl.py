"""The objectives are verl's own, and the README's table has every comparison (`make trainers`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.objectives_table import Differences, against_verl, names_in_readme

MOST_DIFFERENCE = 5e-6
GDPO = 1e-4
"""We add 1e-4 to a standard deviation, as TRL does; verl adds 1e-6."""


@pytest.fixture(scope="module")
def verl(trainers_python: Path) -> Differences:
    return against_verl(trainers_python)


def test_gradients_and_advantages_are_those_of_verl(verl: Differences) -> None:
    bounds = {"gdpo, advantages": GDPO}
    far = {n: v for n, v in verl.items() if not v < bounds.get(n, MOST_DIFFERENCE)}
    assert far == {}


def test_the_readme_names_every_comparison(verl: Differences) -> None:
    assert {name for name, peer in names_in_readme() if peer == "verl"} == verl.keys()
