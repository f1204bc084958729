"""Installs the core with the math environment into a fresh environment and prints its size.

    python tests/support/size.py

Fails when it is over the limit, or when something in it needs a compiler (`--only-binary`). The sum
counts what the packages hold; the bytecode that Python makes of them is printed separately. The
versions are those of constraints.txt, without the tools of the tests.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

from fresh import ROOT, fresh_environment, site_packages

LIMIT_MEGABYTES = 250


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        fresh_environment(Path(folder), ROOT / "clients", f"{ROOT}[math]")
        sizes, bytecode = _sizes(site_packages(Path(folder)))
    total = sum(sizes.values())
    for name, size in sizes.most_common(12):
        print(f"{size / 1e6:8.1f} MB  {name}")
    print(f"{total / 1e6:8.1f} MB  in all (limit {LIMIT_MEGABYTES} MB)")
    print(f"{bytecode / 1e6:8.1f} MB  of bytecode on top, once everything was imported")
    return 0 if total < LIMIT_MEGABYTES * 1e6 else 1


def _sizes(packages: Path) -> tuple[Counter[str], int]:
    sizes: Counter[str] = Counter()
    bytecode = 0
    for path in packages.rglob("*"):
        if path.suffix == ".pyc":
            bytecode += path.stat().st_size
        elif path.is_file() and not path.is_symlink():
            sizes[path.relative_to(packages).parts[0]] += path.stat().st_size
    return sizes, bytecode


if __name__ == "__main__":
    sys.exit(main())
