"""What a page of the documentation shows: its files and its commands, in the page's order."""

import re
from pathlib import Path

_FILE = re.compile(r"^```\w+\n# (\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_COMMANDS = re.compile(r"(?:^    \S.*\n)+", re.MULTILINE)


def write_files(page: str, folder: Path) -> list[str]:
    """Writes each code block that begins with `# its_name` into a folder; returns the names."""
    found = _FILE.findall(page)
    for name, text in found:
        (folder / name).write_text(text)
    return [name for name, _ in found]


def commands(page: str) -> list[str]:
    """Returns the lines of indented blocks outside of code blocks."""
    prose = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    return [line[4:] for block in _COMMANDS.findall(prose) for line in block.splitlines()]
