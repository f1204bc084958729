"""`python -m envserver_environments.code process ...` is `envserver process --env code ...`."""

from __future__ import annotations

import sys

from envserver import main

if __name__ == "__main__":
    sys.exit(main(environment="code"))
