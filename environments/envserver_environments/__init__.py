"""The environments that ship with envserver; each is a package with an `env.py`.

A class is imported when it is first used: `from envserver_environments import Math`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .code.env import Code
    from .gaia.env import Gaia
    from .math.env import Math
    from .mhqa.env import Mhqa
    from .router.env import Router
    from .scenarios.env import Scenarios
    from .swe.env import Swe
    from .tau.env import Tau
    from .video.env import Video

__all__ = ["Code", "Gaia", "Math", "Mhqa", "Router", "Scenarios", "Swe", "Tau", "Video"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{name.lower()}.env", __name__), name)
    globals()[name] = value
    return value
