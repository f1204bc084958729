"""`python -m envserver`: the same as the command `envserver`."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
