"""`python -m envserver_environments.tau process ...` is `envserver process --env tau ...`.

`python -m envserver_environments.tau replay FILE` replays tau2-bench vectors, see `replays`.
"""

import sys

from envserver import main

from . import replays

if __name__ == "__main__":
    if sys.argv[1:2] == ["replay"]:
        sys.exit(replays.main(sys.argv[2:]))
    sys.exit(main(environment="tau"))
