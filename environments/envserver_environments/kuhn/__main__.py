"""`python -m envserver_environments.kuhn process ...` is `envserver process --env kuhn ...`.

`python -m envserver_environments.kuhn exploitability FILE...` measures recorded players.
"""

import sys

from envserver import main

from . import game

if __name__ == "__main__":
    if sys.argv[1:2] == ["exploitability"]:
        sys.exit(game.main(sys.argv[2:]))
    sys.exit(main(environment="kuhn"))
