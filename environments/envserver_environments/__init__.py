"""The environments that ship with envserver; each is a package with an `env.py`.

A class is imported when it is first used: `from envserver_environments import Math`.
"""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .code.env import Code
    from .gaia.env import Gaia
    from .kuhn.env import Kuhn
    from .math.env import Math
    from .mhqa.env import Mhqa
    from .proposer_solver.env import ProposerSolver
    from .router.env import Router
    from .scenarios.env import Scenarios
    from .swe.env import Swe
    from .tau.env import Tau
    from .twenty_questions.env import TwentyQuestions
    from .video.env import Video

__all__ = [
    "Code", "Gaia", "Kuhn", "Math", "Mhqa", "ProposerSolver", "Router", "Scenarios", "Swe", "Tau",
    "TwentyQuestions", "Video",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    value = getattr(importlib.import_module(f".{package}.env", __name__), name)
    globals()[name] = value
    return value
