"""`python -m envserver_environments.code process ...` is `envserver process --env code ...`."""

import sys

from envserver import main

if __name__ == "__main__":
    sys.exit(main(environment="code"))
