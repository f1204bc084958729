"""Imports a command's module without work that its start does not need.

What holds: everything works as with a plain import; what is left out is made when it is used.
"""

from __future__ import annotations

import gc
import importlib
import sys
from types import ModuleType

from pydantic import BaseModel


def import_command(name: str) -> ModuleType:
    """Returns the module `name`, imported."""
    # The collector would spend a sixth of a start on what imports make, which stays.
    collects = gc.isenabled()
    gc.disable()
    if "rich" not in sys.modules:
        # structlog would import it for a form of tracebacks that is not used: 50 modules.
        sys.modules["rich"] = None  # type: ignore[assignment]  # the import fails, as documented
        importlib.import_module("structlog")
        del sys.modules["rich"]
    # FastAPI would build the models of OpenAPI documents: a third of its import.
    BaseModel.model_config["defer_build"] = True
    try:
        module = importlib.import_module(name)
    finally:
        del BaseModel.model_config["defer_build"]
        if collects:
            gc.enable()
    gc.freeze()
    return module
