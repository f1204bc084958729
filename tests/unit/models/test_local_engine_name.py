"""The local engine's old module name still starts it."""

from __future__ import annotations

import subprocess
import sys


def test_the_old_command_starts_the_local_engine_and_says_its_new_name() -> None:
    command = [sys.executable, "-m", "envserver.models.local", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: python -m envserver_local [-h] --model MODEL")
    assert done.stderr.splitlines() == [
        "envserver.models.local is now envserver_local: python -m envserver_local"
    ]
