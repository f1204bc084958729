"""`python -m envserver_environments.router process ...` is `envserver process --env router ...`."""

import sys

from envserver import main

if __name__ == "__main__":
    sys.exit(main(environment="router"))
