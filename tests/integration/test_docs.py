"""The documentation is true where a program can tell: links lead somewhere, named files exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not {
        part
        for part in path.relative_to(ROOT).parts
        if part.startswith((".venv", ".agents", "build", "node_modules"))
    }
)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)")
FILE = re.compile(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|md|yaml|toml))`")
FOLDERS = (".", "envserver", "clients", "environments", "tools")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(page.read_text()):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", [ROOT / "docs/architecture.md", ROOT / "CONTRIBUTING.md"])
def test_files_that_the_map_names_exist(page: Path) -> None:
    named = FILE.findall(page.read_text())
    missing = [name for name in named if not any((ROOT / top / name).exists() for top in FOLDERS)]
    assert missing == []


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
