"""`python -m envserver_environments.swe process ...` is `envserver process --env swe ...`."""

import sys

from envserver import main

if __name__ == "__main__":
    sys.exit(main(environment="swe"))
