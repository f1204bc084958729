"""`python -m envserver_environments.smolagents_integration.smolagents_env process ...` is
`envserver process --env gaia ...`, with the earlier defaults."""

import sys

from envserver_environments.gaia.env import Gaia as SmolagentsEnv

from . import main

__all__ = ["SmolagentsEnv"]

if __name__ == "__main__":
    sys.exit(main())
