"""Runs programs of the agent."""

import subprocess
import sys


def run_program(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else "unreadable"
