"""The old name of the local engine: `python -m envserver.models.local` runs `envserver_local`."""

import runpy
import sys

if __name__ == "__main__":
    sys.stderr.write("envserver.models.local is now envserver_local: python -m envserver_local\n")
    runpy.run_module("envserver_local", run_name="__main__", alter_sys=True)
