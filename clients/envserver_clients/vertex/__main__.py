"""`python -m envserver_clients.vertex`."""

import sys

from envserver_clients.vertex.command import main

sys.exit(main())
