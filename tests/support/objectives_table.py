"""Measures the objectives against TRL and verl, and writes the table of the trainer's README:
`make objectives`.

In: both peers, installed. Out: the part of the README between two marks.
"""

import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from .foreign_trainers import ROOT, alone, told
from .waiting import PATIENCE

README: Final = ROOT / "clients/envserver_clients/training/README.md"
MARKS: Final = ("<!-- objectives -->\n", "<!-- /objectives -->")
Differences = dict[str, float]


def against_verl(python: Path) -> Differences:
    """Runs the comparison with verl in the Python that has it."""
    script = ROOT / "tests/support/verl_objectives.py"
    found: Differences = told(python, "-W", "ignore", script, env=_environment())
    return found


def against_trl(python: Path) -> Differences:
    """Runs the parity tests with TRL in the Python that has it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "differences.json"
        subprocess.run(
            [python, "-m", "pytest", "-q", ROOT / "tests/peers/learning/test_trl_parity.py"],
            env=_environment() | {"PARITY_TABLE": str(path)},
            cwd=ROOT,
            check=True,
            timeout=4 * PATIENCE,
        )
        found: Differences = json.loads(path.read_text())
    return found


def table(trl: Mapping[str, float], verl: Mapping[str, float]) -> str:
    """Returns the table in Markdown; a dash where a peer has no such objective."""
    lines = ["| objective | TRL 1.16.0 | verl 0.9.1 |", "|---|---|---|"]
    for name in dict.fromkeys((*trl, *verl)):
        cells = [f"{found[name]:.1e}" if name in found else "-" for found in (trl, verl)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _parts(text: str) -> tuple[str, str, str]:
    before, _, rest = text.partition(MARKS[0])
    inside, _, after = rest.partition(MARKS[1])
    return before, inside, after


def _environment() -> dict[str, str]:
    return alone(ROOT / "clients", ROOT / "tools")


def main() -> None:
    trl = against_trl(ROOT / ".venv-learn/bin/python")
    verl = against_verl(ROOT / ".venv-trainers/bin/python")
    before, _, after = _parts(README.read_text())
    README.write_text(before + MARKS[0] + table(trl, verl) + MARKS[1] + after)


if __name__ == "__main__":
    main()
