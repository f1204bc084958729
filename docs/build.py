"""Builds the documentation site: `make docs`, or `python docs/build.py`.

In: the Markdown files of the repository, and the docstrings of the public packages. Out: a site in
build/site. Pages keep their places in the tree, so that a relative link works in the repository and
on the site; a linked source file is copied beside its page. A broken link fails the build.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "docs"
LINK = re.compile(r"(?:\]\(|src(?:set)?=\")(?!https?:|mailto:|#)([^)#\"\s]+)")
REFERENCE = {
    "envserver": "What an environment's author and a user of the Python API import.",
    "envserver_clients": "What a trainer imports.",
    "envserver_records": "The records and errors that server and clients share.",
    "envserver_tools": "Tools for agents.",
    "envserver_factory": "Prepares data and models for offline training.",
}


def main() -> int:
    """Returns the exit status of mkdocs."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for page in _tracked_pages():
        _copy(page)
        for target in _linked_files(page):
            _copy(target)
    for package, purpose in REFERENCE.items():
        page = PAGES / "reference" / f"{package}.md"
        page.parent.mkdir(exist_ok=True)
        page.write_text(f"# {package}\n\n{purpose}\n\n::: {package}\n")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command += ["-f", str(ROOT / "docs" / "mkdocs.yml")]
    return subprocess.run(command, env=environ, check=False).returncode


def _tracked_pages() -> list[Path]:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in names.splitlines() if (path := ROOT / name).is_file()]


def _linked_files(page: Path) -> list[Path]:
    """The files that `page` links to. A link to a folder that has a README is not one of them."""
    targets = [(page.parent / target).resolve() for target in LINK.findall(page.read_text())]
    return [target for target in targets if target.is_file() and target.suffix != ".md"]


def _copy(path: Path) -> None:
    place = PAGES / path.resolve().relative_to(ROOT)
    place.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".md":
        shutil.copyfile(path, place)
        return
    place.write_text(LINK.sub(lambda link: _to_page(path, link), path.read_text()))


def _to_page(page: Path, link: re.Match[str]) -> str:
    """A link to a folder leads to its README on the site."""
    target = link[1]
    if (page.parent / target / "README.md").is_file():
        return f"]({target.rstrip('/')}/README.md"
    return link[0]


if __name__ == "__main__":
    sys.exit(main())
