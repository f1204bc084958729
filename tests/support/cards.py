"""The score cards in the READMEs of the shipped environments.

    python tests/support/cards.py [NAME ...]

writes them anew (`make cards`). A card is what `envserver check NAME --card` prints, without what
depends on the machine.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "environments" / "envserver_environments"
SHIPPED = sorted(path.parent.name for path in ENVIRONMENTS.glob("*/env.py"))
_BLOCK = re.compile(r"\n## Score card\n\n.*?\n\n(\|.*?)\n*(?=\n## |\Z)", re.DOTALL)
_VARIES = "| a score takes |"


def readme(name: str) -> Path:
    """Returns the README of a shipped environment."""
    return ENVIRONMENTS / name / "README.md"


def card_in(text: str) -> str:
    """Returns the card in a README; empty if there is none."""
    found = _BLOCK.search(text)
    return found[1] if found else ""


def made_card(printed: str) -> str:
    """Returns what a README keeps of the command's output."""
    lines = (line for line in printed.strip().splitlines() if not line.startswith(_VARIES))
    return "\n".join(lines)


def with_card(text: str, name: str, card: str) -> str:
    """Returns the README's text with the card, before the section for maintainers if it has one."""
    text = _BLOCK.sub("", text).rstrip("\n") + "\n"
    command = f"`envserver check {name}`, as `make cards` wrote it:"
    section = f"\n## Score card\n\n{command}\n\n{card}\n"
    head, found, tail = text.partition("\n## For maintainers")
    return f"{head}{section}{found}{tail}"


def main(names: list[str]) -> None:
    for name in names or SHIPPED:
        command = [Path(sys.executable).with_name("envserver"), "check", name, "--card"]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if run.returncode:
            sys.exit(f"{name} fails its check:\n{run.stdout}")
        path = readme(name)
        path.write_text(with_card(path.read_text(), name, made_card(run.stdout)))
        print(f"{path.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
