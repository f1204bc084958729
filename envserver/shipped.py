"""Files that come with envserver: `configs`, beside its packages in a checkout, or in a wheel."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent


def shipped(path: Path) -> Path:
    """`path`; where nothing is there and it leads into `configs`, the file that came with us.

    So a default like `configs/models.yaml` is a file of one's own where there is one, and works in
    any folder.
    """
    if path.is_absolute() or path.parts[:1] != ("configs",) or path.exists():
        return path
    for place in (_HERE, _HERE.parent):
        if (place / path).is_file():
            return place / path
    return path
