"""What the environment shares with its agent."""

import subprocess
import sys

import tools.shell

QUESTION = "Add seven to"


def run_program(program: str) -> str:
    """What the program prints, or "unreadable" if it fails."""
    assert tools.shell.__name__ != "tools.shell"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else "unreadable"
