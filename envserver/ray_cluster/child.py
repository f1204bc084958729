"""Becomes the command in its arguments, which the kernel ends when the parent ends:

python -m envserver.ray_cluster.child PARENT_PID join http://server:8000 --config FILE
"""

from __future__ import annotations

import os
import signal
import sys

from ..workers.linux import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]), signal.SIGTERM)
    os.execv(sys.executable, [sys.executable, "-m", "envserver", *sys.argv[2:]])
