"""`python -m envserver_tools.web export FOLDER FILE.tar`, `python -m envserver_tools.web import
FILE.tar FOLDER`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .recording import Store


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m envserver_tools.web", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    out = commands.add_parser("export", help="a recording as one file")
    out.add_argument("folder", type=Path)
    out.add_argument("file", type=Path)
    back = commands.add_parser("import", help="add what such a file holds to a recording")
    back.add_argument("file", type=Path)
    back.add_argument("folder", type=Path)
    chosen = parser.parse_args()
    store = Store(chosen.folder)
    try:
        if chosen.command == "export":
            said = f"{store.export(chosen.file)} answers written to {chosen.file}"
        else:
            said = f"{store.take_in(chosen.file)} answers added to {chosen.folder}"
    except (OSError, ValueError) as error:
        sys.exit(f"{error}")
    sys.stdout.write(f"{said}\n")


if __name__ == "__main__":
    main()
