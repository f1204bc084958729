"""`python -m environments.smolagents_integration.download_gaia` is `environments.gaia.download`."""

from __future__ import annotations

import sys

from environments.gaia.download import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
