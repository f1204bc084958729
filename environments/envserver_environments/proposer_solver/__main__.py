"""The same as `envserver ... --env proposer_solver`, without an installation."""

import sys

from envserver import main

if __name__ == "__main__":
    sys.exit(main(environment="proposer_solver"))
