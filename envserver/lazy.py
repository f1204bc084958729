"""Public names of a package, imported when they are first used.

In: a package and, for each public name, the module that has it. Out: the `__getattr__` of the
package (PEP 562). So importing a room costs nothing, and `envserver --help` stays fast.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a `__getattr__` for `package`.

    Args:
        homes: public name -> module, relative to the package.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{homes[name]}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    return get
