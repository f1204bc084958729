# ruff: noqa: E501 - whole programs in strings
"""Programs that forge their result: the answer has to tell how they really ended."""

from __future__ import annotations

from .program import Hostile, still_works

# What a forged answer might look like on whatever channel there is.
FORGED = """\
import json
FORGED = [
    b"\\x81\\xa4exit\\x00" * 4,
    b"\\x00\\x00\\x00\\x20" + b"\\x86\\xa4exit\\x00\\xa6signal\\xc0\\xa9killed_by\\xa0\\xa6stdout\\xc4\\x04fake",
    json.dumps({"exit": 0, "stdout": "fake"}).encode() + b"\\n",
    b"\\x80\\x04\\x95\\x00.",
]
"""

PROGRAMS = [
    Hostile(
        name="an answer on every descriptor",
        must="the true exit status is told",
        source=FORGED
        + """\
for descriptor in range(3, 256):
    for forged in FORGED:
        try:
            os.write(descriptor, forged)
        except OSError:
            break
print("honest")
sys.exit(3)
""",
        ends=("exit 3",),
        prints="honest\n",
        then=still_works,
    ),
    Hostile(
        name="an answer on every socket that the interpreter knows",
        must="the true exit status is told",
        source=FORGED
        + """\
import gc
for thing in gc.get_objects():
    try:
        if isinstance(thing, socket.socket) and thing.fileno() > 2:
            thing.send(FORGED[0])
            got("a socket of the server")
    except OSError:
        pass
print("honest")
sys.exit(3)
""",
        ends=("exit 3",),
        prints="honest\n",
        then=still_works,
    ),
    Hostile(
        name="an answer through its parent's descriptors",
        must="they cannot be opened",
        source=FORGED
        + """\
for pid in {1, os.getppid()} - {os.getpid()}:
    for descriptor in range(64):
        try:
            os.write(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK), FORGED[0])
            got(f"{descriptor} of {pid}")
        except OSError:
            pass
print("honest")
sys.exit(3)
""",
        ends=("exit 3",),
        prints="honest\n",
    ),
    Hostile(
        name="frames of an answer in its output",
        must="they are output",
        source=FORGED + "for forged in FORGED: os.write(1, forged)\nsys.exit(3)",
        ends=("exit 3",),
        then=still_works,
    ),
    Hostile(
        name="the interpreter's own end replaced",
        must="it ends, as a failure, and answers once",
        source="""\
import atexit, threading
os._exit = sys.exit = lambda *told: None
os.waitpid = os.wait = lambda *told: (0, 0)
os.write(1, b"once")
sys.excepthook = lambda *told: 1 / 0
threading._shutdown = lambda: 1 / 0
atexit.register(lambda: os.write(1, b""))
raise SystemExit(7)
""",
        prints="once",
        ends=("exit 7", "exit 1"),
        then=still_works,
    ),
    Hostile(
        name="an error that nobody catches",
        must="it ends as a failure",
        source="""\
class Escape(BaseException):
    def __str__(self): raise Escape
    __repr__ = __str__
raise Escape
""",
        ends=("exit 1",),
        then=still_works,
    ),
    Hostile(
        name="an exit status that is not a number",
        must="it ends as a failure",
        source="""\
class Escape:
    def __index__(self): raise GeneratorExit
    __int__ = __str__ = __repr__ = __bool__ = __index__
raise SystemExit(Escape())
""",
        then=still_works,
    ),
    Hostile(
        name="a walk up to its caller",
        must="there is no caller of ours to change",
        source="""\
frame = sys._getframe()
while frame.f_back:
    frame = frame.f_back
    for name, value in list(frame.f_locals.items()) + list(frame.f_globals.items()):
        try:
            if isinstance(value, socket.socket) and value.fileno() > 2 and value.send(b"forged"):
                got(f"{name} in {frame.f_code.co_name}")
        except OSError:
            pass
print("honest")
sys.exit(3)
""",
        ends=("exit 3",),
        prints="honest\n",
    ),
    Hostile(
        name="the modules of its server changed",
        must="the next answers are true",
        source="""\
for name, module in list(sys.modules.items()):
    for word in ("send", "sendall", "sendmsg", "encode", "pack", "dumps", "run", "serve", "main", "exit"):
        try:
            if callable(getattr(module, word, None)):
                setattr(module, word, lambda *told, **more: got(name))
        except Exception:
            pass
print("honest", flush=True)
libc._exit(3)
""",
        ends=("exit 3",),
        prints="honest\n",
        then=still_works,
    ),
    Hostile(
        name="its output taken by a child, then a crash",
        must="the crash is told",
        source="""\
if os.fork() == 0:
    os.write(1, b"all is well\\n")
    os._exit(0)
os.wait()
ctypes.string_at(0)
""",
        ends=("signal 11",),
        prints="all is well\n",
    ),
    Hostile(
        name="ended by a thread with status 0",
        must="its output until then is told, and nothing else",
        source="""\
import threading
os.write(1, b"part")
threading.Thread(target=lambda: os._exit(0)).start()
time.sleep(5)
os.write(1, b"whole")
""",
        ends=("exit 0",),
        prints="part",
    ),
    Hostile(
        name="a killed child passed off as a limit",
        must="its own exit status is told",
        source="""\
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(child, 0)
sys.stderr.write("killed by memory, wall, lost\\n")
sys.exit(137)
""",
        ends=("exit 137",),
    ),
]
