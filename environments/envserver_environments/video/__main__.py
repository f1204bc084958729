"""`python -m envserver_environments.video process ...` is `envserver process --env video ...`."""

import sys

from envserver import main

if __name__ == "__main__":
    sys.exit(main(environment="video"))
