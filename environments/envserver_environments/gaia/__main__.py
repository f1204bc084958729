"""`python -m envserver_environments.gaia process ...` is `envserver process --env gaia ...`."""

from __future__ import annotations

import sys

from envserver import main

if __name__ == "__main__":
    sys.exit(main(environment="gaia"))
