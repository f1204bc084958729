"""What docs/side-by-side.md shows of other frameworks works with their packages."""

import re
from pathlib import Path

import pytest
from support.cases import cases_of
from support.foreign_trainers import printed

PAGE = (Path(__file__).parents[2] / "docs" / "side-by-side.md").read_text()
CHECKS = cases_of(__file__)


def blocks(section: str) -> list[str]:
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("section", "number", "peer"), CHECKS["blocks"])
def test_the_block_does_what_it_says(
    section: str, number: int, peer: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    python: Path = request.getfixturevalue(peer)
    rows = PAGE.partition("```python\n")[2].partition("```")[0]
    block = blocks(section)[number]
    block = block.partition("\nif __name__")[0].partition("\ntrainer = ")[0]  # needs a model
    printed(
        python, "-W", "ignore", "-c", rows + block + CHECKS[section][f"{number}"], folder=tmp_path
    )
