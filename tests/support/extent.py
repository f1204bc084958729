"""How much the tests try: a part in `make test`, all in `make test-all` and `make test-slow`."""

from __future__ import annotations

import os
from typing import Final

WHOLE: Final = os.environ.get("TEST_EXTENT") == "whole"


def examples(whole: int) -> int:
    """The number of examples that hypothesis tries, of `whole` in a whole run."""
    return whole if WHOLE else max(10, whole // 4)
