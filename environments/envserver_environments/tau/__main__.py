"""`python -m envserver_environments.tau process ...` is `envserver process --env tau ...`.

`python -m envserver_environments.tau replay FILE` replays tau2-bench vectors, see `replay_command`.
"""

from __future__ import annotations

import sys

from envserver import main

from . import replay_command

if __name__ == "__main__":
    if sys.argv[1:2] == ["replay"]:
        sys.exit(replay_command.main(sys.argv[2:]))
    sys.exit(main(environment="tau"))
