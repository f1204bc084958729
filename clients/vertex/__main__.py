"""`python -m clients.vertex`."""

import sys

from clients.vertex.command import main

sys.exit(main())
