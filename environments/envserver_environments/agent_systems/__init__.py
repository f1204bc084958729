"""The agents' module names of VideoMultiAgents_HOEY, below this package's name."""

import sys
from typing import NoReturn

from envserver import main


def run(environment: str) -> NoReturn:
    sys.exit(main(["run", *sys.argv[1:]], environment=environment))
