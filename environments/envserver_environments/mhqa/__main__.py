"""`python -m envserver_environments.mhqa process ...` is `envserver process --env mhqa ...`."""

import sys

from envserver import main

if __name__ == "__main__":
    sys.exit(main(environment="mhqa"))
