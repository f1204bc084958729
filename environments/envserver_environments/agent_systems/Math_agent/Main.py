"""`environments.agent_systems.Math_agent.Main --question ...` is `envserver run --env math`."""

import sys

from envserver import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]], environment="math"))
