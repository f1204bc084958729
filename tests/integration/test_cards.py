"""The score card in each shipped environment's README is what `envserver check` finds."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import cards
from support.commands import envserver

CHEAP = ("math", "kuhn")
"""Those whose check takes seconds; what runs programs takes minutes."""
CASES = [
    pytest.param(name, marks=pytest.mark.thorough if name in CHEAP else pytest.mark.slow)
    for name in cards.SHIPPED
]


@pytest.mark.parametrize("name", CASES)
def test_the_card_is_what_check_finds(name: str, tmp_path: Path) -> None:
    ran = envserver("check", name, "--card", folder=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert cards.made_card(ran.stdout) == cards.card_in(cards.readme(name).read_text()), (
        "`make cards` writes them anew"
    )
