"""Installs the core with the math environment where nothing is, and says how big that is.

    python tests/support/size.py

Fails when it is over the limit, or when something in it would need a compiler (`--only-binary`).
Counted is what the packages hold; the bytecode that Python makes of them comes on top and is told
apart. The versions are those of constraints.txt, without the tools of the tests.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

LIMIT_MEGABYTES = 250
ROOT = Path(__file__).parent.parent.parent


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        packages = _install(Path(folder))
        sizes, bytecode = _sizes(packages)
    total = sum(sizes.values())
    for name, size in sizes.most_common(12):
        print(f"{size / 1e6:8.1f} MB  {name}")
    print(f"{total / 1e6:8.1f} MB  in all (limit {LIMIT_MEGABYTES} MB)")
    print(f"{bytecode / 1e6:8.1f} MB  of bytecode on top, once everything was imported")
    return 0 if total < LIMIT_MEGABYTES * 1e6 else 1


def _install(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    versions = folder / "versions.txt"
    versions.write_text(_versions((ROOT / "constraints.txt").read_text()))
    # The outer pip installs: what is measured is the project, not pip.
    pip = [sys.executable, "-m", "pip", "--python", folder / "venv/bin/python"]
    install = [*pip, "install", "--quiet", "--only-binary", ":all:"]
    subprocess.run(
        [*install, "--constraint", versions, f"{ROOT}/clients", f"{ROOT}[math]"], check=True
    )
    (packages,) = (folder / "venv/lib").glob("python*/site-packages")
    return packages


def _sizes(packages: Path) -> tuple[Counter[str], int]:
    sizes: Counter[str] = Counter()
    bytecode = 0
    for path in packages.rglob("*"):
        if path.suffix == ".pyc":
            bytecode += path.stat().st_size
        elif path.is_file() and not path.is_symlink():
            sizes[path.relative_to(packages).parts[0]] += path.stat().st_size
    return sizes, bytecode


def _versions(locked: str) -> str:
    """Names and versions without hashes: pip takes no hashes for a folder that is installed."""
    lines = (line.removesuffix("\\").strip() for line in locked.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith(("--hash", "#")))


if __name__ == "__main__":
    sys.exit(main())
