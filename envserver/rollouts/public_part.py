"""The public part of a task as groups keep it: small enough to travel with every group. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec

MOST_BYTES: Final = 16 * 1024
"""Maximum size of the kept part, as JSON."""


def bounded_public(public: dict[str, Any]) -> dict[str, Any]:
    """Returns `public`, with values that do not fit replaced by `{"left_out_bytes": size}`.

    Small values are kept first; what JSON cannot hold is left out.
    """
    sizes = {name: _size(value) for name, value in public.items()}
    left = MOST_BYTES
    kept: set[str] = set()
    for name, size in sorted(sizes.items(), key=lambda item: item[1]):
        left -= size + len(name)
        if left < 0:
            break
        kept.add(name)
    return {
        name[:MOST_BYTES]: value if name in kept else {"left_out_bytes": sizes[name]}
        for name, value in list(public.items())[:100]
    }


def _size(value: Any) -> int:
    try:
        return len(msgspec.json.encode(value))
    except (TypeError, ValueError, RecursionError):
        return MOST_BYTES + 1
