"""`python -m envserver_environments.math process ...` is `envserver process --env math ...`."""

from __future__ import annotations

import sys

from envserver import main

if __name__ == "__main__":
    sys.exit(main(environment="math"))
