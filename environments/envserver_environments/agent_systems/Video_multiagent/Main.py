"""`environments.agent_systems.Video_multiagent.Main ...` is `envserver run --env video ...`."""

import sys

from envserver import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]], environment="video"))
