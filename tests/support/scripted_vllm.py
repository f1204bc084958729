"""A program that takes the place of a Python that has vLLM.

Asked whether it has vLLM it says yes. Told to start it, it serves /health, with a process of its
own beside it (as vLLM has its engine core), and adds the ids of both to FOLDER/pids; where there is
a file FOLDER/broken, it ends with what that says.
"""

from __future__ import annotations

import stat
import sys
from pathlib import Path

_SCRIPT = """#!{python}
import http.server, json, os, subprocess, sys, pathlib
folder = pathlib.Path({folder!r})
if "-c" in sys.argv:
    print(json.dumps({{"there": True, "version": "0.32.0", "cpu": True}}))
    raise SystemExit
if (folder / "broken").exists():
    raise SystemExit((folder / "broken").read_text())
beside = subprocess.Popen(["sleep", "1000"])
with (folder / "pids").open("a") as pids:
    pids.write(f"{{os.getpid()}} {{beside.pid}}\\n")
(folder / "words").write_text(json.dumps(sys.argv[1:]))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer.allow_reuse_address = True
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def scripted_vllm(folder: Path) -> Path:
    """The program; `pids` in `folder` has a line for each start: its id and that of its process."""
    program = folder / "python-with-vllm"
    program.write_text(_SCRIPT.format(python=sys.executable, folder=str(folder)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program
