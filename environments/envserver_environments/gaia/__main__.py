"""`python -m envserver_environments.gaia process ...` is `envserver process --env gaia ...`."""

import sys

from envserver import main

if __name__ == "__main__":
    sys.exit(main(environment="gaia"))
