"""Lets `python -m envserver_environments.math ...` run in a checkout; the installed package is
`envserver_environments`."""

from pathlib import Path

__path__ = [str(Path(__file__).parent / "envserver_environments")]
