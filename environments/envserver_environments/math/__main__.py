"""`python -m envserver_environments.math process ...` is `envserver process --env math ...`."""

import sys

from envserver import main

if __name__ == "__main__":
    sys.exit(main(environment="math"))
