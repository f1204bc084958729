"""`python -m envserver_environments.smolagents_integration process ...`, as in `smolagents_env`."""

from __future__ import annotations

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
