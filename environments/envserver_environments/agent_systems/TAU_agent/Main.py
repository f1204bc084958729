"""`environments.agent_systems.TAU_agent.Main --question ...` is `envserver run --env tau`."""

import sys

from envserver import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]], environment="tau"))
