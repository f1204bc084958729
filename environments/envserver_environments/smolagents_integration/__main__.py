"""`python -m envserver_environments.smolagents_integration process ...`, as in `smolagents_env`."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
