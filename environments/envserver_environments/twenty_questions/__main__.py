"""The same as `envserver ... --env twenty_questions`, without an installation."""

import sys

from envserver import main

if __name__ == "__main__":
    sys.exit(main(environment="twenty_questions"))
