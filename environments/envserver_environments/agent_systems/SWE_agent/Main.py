"""`environments.agent_systems.SWE_agent.Main --question ...` is `envserver run --env swe`."""

import sys

from envserver import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]], environment="swe"))
