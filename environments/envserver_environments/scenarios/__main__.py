"""`python -m envserver_environments.scenarios process` is `envserver process --env scenarios`."""

import sys

from envserver import main

if __name__ == "__main__":
    sys.exit(main(environment="scenarios"))
