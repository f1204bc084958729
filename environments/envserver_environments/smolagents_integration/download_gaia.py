"""Another name of `python -m envserver_environments.gaia.download`."""

import sys

from envserver_environments.gaia.download import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
