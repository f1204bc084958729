"""The environment `gaia` with a model that looks for answers, forges, hangs, eats and dies.

For test_gaia_hostile.py. Each row's question is `<agent> <name> ...`: the scripted model says what
stands under that name. No answer stands in this file: workers have it in their memory.
"""

# ruff: noqa: E501 - programs are easier to read in long lines than in broken ones
from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from envserver_environments.gaia.env import Gaia

from envserver import Message, PublicTask, Rollout, Split, Task

BEGIN = r"""
import ctypes, gc, glob, json, os, re, socket, sys, time
SECRET, CANARY = (re.compile(word + rb"-[0-9a-f]{16}") for word in (rb"plover", rb"wren"))
found, canaries, notes = set(), set(), {}
def look(data):
    data = data if isinstance(data, bytes) else repr(data).encode(errors="replace")
    found.update(SECRET.findall(data))
    canaries.update(CANARY.findall(data))
    return data
def tried(name, function, *args):
    try:
        notes[name] = look(function(*args))[:80].decode(errors="replace")
    except BaseException as error:
        notes[name] = f"{type(error).__name__}: {error}"[:200]
def read(path):
    with open(path, "rb") as file:
        return file.read(1 << 20)
def regions(pid):
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as mem:
        for line in maps:
            place, access, *_ = line.split()
            if "w" not in access:
                continue
            first, last = (int(part, 16) for part in place.split("-"))
            try:
                mem.seek(first)
                data = mem.read(last - first)
            except (OSError, OverflowError, ValueError):
                continue
            yield data
def memory(pid):
    return sum(len(look(data)) for data in regions(pid))
def address(pid):
    return next(found[0] for data in regions(pid) if (found := re.search(rb"http://127\.0\.0\.1:\d+/r/[\w-]{32}", data)))
def processes():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]
"""
END = r"""
print(json.dumps({"found": [one.decode() for one in found], "canaries": len(canaries), "notes": notes}))
"""
FIND_KEY = r"""
url = address("self").decode()
server, key = url.split("/r/")
import urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
def ask(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    head = {"content-type": "application/json", "authorization": "Bearer " + key}
    with opener.open(urllib.request.Request(url, data, head), timeout=5) as answer:
        return answer.read()
"""

LOOKS = {
    "memory": r"""
tried("own memory", memory, "self")
tried("objects", lambda: [look(one) for one in gc.get_objects() if isinstance(one, (dict, list, tuple))] and 0)
def frames():
    for frame in sys._current_frames().values():
        while frame:
            look(frame.f_locals), look(list(frame.f_globals))
            frame = frame.f_back
tried("frames", frames)
""",
    "processes": r"""
libc = ctypes.CDLL(None, use_errno=True)
for pid in processes():
    for name in ("environ", "cmdline", "maps"):
        tried(f"{name} {pid}", read, f"/proc/{pid}/{name}")
    if pid != os.getpid():
        tried(f"memory {pid}", memory, pid)
        tried(f"write {pid}", open, f"/proc/{pid}/mem", "r+b")
        for fd in range(64):
            tried("fds", lambda: look(read(f"/proc/{pid}/fd/{fd}")) if os.path.isfile(f"/proc/{pid}/fd/{fd}") else 0)
            if (held := libc.syscall(438, os.pidfd_open(pid), fd, 0)) >= 0:
                notes["descriptor taken"] = held
        notes[f"ptrace {pid}"] = libc.ptrace(16, pid, 0, 0)
        buffer = ctypes.create_string_buffer(8)
        notes[f"vm {pid}"] = libc.syscall(310, pid, 0, 0, 0, 0, 0) if os.uname().machine == "x86_64" else -1
""",
    "files": r"""
for path in (COPY, COPY + "/metadata.jsonl", "/etc/shadow", "/proc/1/root" + COPY, "/proc/self/cwd/.."):
    tried(path, lambda: os.listdir(path) if os.path.isdir(path) else read(path))
for name in ("envserver_environments.gaia.loading", "envserver_environments.gaia.env"):
    tried(name, lambda: list(getattr(sys.modules[name], "own_items")()))
import importlib.util
for name in ("envserver_environments", "envserver", "envserver_tools"):
    tried(name, lambda: os.listdir(sys.modules[name].__path__[0]))
for top in ("/work", "/tmp", "/home", "/root", "/srv", "/var", "/dev/shm", "/run", "/mnt", "/box"):
    for folder, folders, names in os.walk(top):
        folders[:] = [name for name in folders if name not in ("lib", "bin", "include", "share")]
        for name in names[:200]:
            if os.path.isfile(path := os.path.join(folder, name)) and not path.endswith("MARK"):
                tried("walk", lambda: look(read(path)))
notes["others"] = [p for top in ("/work", "/tmp", "/dev/shm") for p in glob.glob(top + "/*MARK")]
for top in ("/work", "/tmp", "/dev/shm"):
    open(f"{top}/{os.urandom(4).hex()}-MARK", "w").write("mine")
""",
    "environment": r"""
tried("own", lambda: dict(os.environ))
tried("c", lambda: [*iter(lambda n=iter(range(999)), all=ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ"): all[next(n)], None)])
for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/task/*/environ"):
    tried(path, read, path)
""",
    "descriptors": r"""
for fd in range(3, 512):
    try:
        os.fstat(fd)
    except OSError:
        continue
    tried(f"link {fd}", os.readlink, f"/proc/self/fd/{fd}")
    tried(f"peer {fd}", lambda: socket.socket(fileno=os.dup(fd)).getpeername())
for line in open("/proc/net/unix").read().splitlines()[1:]:
    if len(name := line.split()[7:]):
        tried("unix " + name[0], lambda: socket.socket(socket.AF_UNIX).connect(name[0].replace("@", chr(0))))
for path in ("/var/run/docker.sock", "/run/docker.sock", "/run/dbus/system_bus_socket"):
    tried(path, lambda: socket.socket(socket.AF_UNIX).connect(path))
""",
    "network": FIND_KEY
    + r"""
for host in ("127.0.0.1", "::1", HOST, "localhost", "169.254.169.254", "10.0.0.1", "0.0.0.0"):
    tried(f"tcp {host}", lambda: socket.create_connection((host, PORT), timeout=1).recv(100))
tried("dns", socket.getaddrinfo, "example.com", 80)
tried("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("8.8.8.8", 53)))
tried("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
for path in ("/", "/metrics", "/v1/status", "/openapi.json", "/status", "/r/", "/r/" + "a" * 43 + "/rollout", "/r/../v1/groups"):
    tried("GET " + path, ask, server + path)
for line in (f"CONNECT 127.0.0.1:{PORT} HTTP/1.1", f"GET http://127.0.0.1:{PORT}/ HTTP/1.1"):
    def proxied():
        with socket.create_connection(("127.0.0.1", int(server.rpartition(":")[2])), timeout=2) as one:
            one.sendall(f"{line}\r\nhost: 127.0.0.1:{PORT}\r\nconnection: close\r\n\r\n".encode())
            return one.recv(500)
    tried(line, proxied)
""",
    "library": r"""
for name, module in list(sys.modules.items()):
    if name.startswith("envserver_environments.gaia") or name.startswith("smolagents"):
        for word in ("question_scorer", "judge", "items", "fold", "extract_answer"):
            if hasattr(module, word):
                setattr(module, word, lambda *args, **named: 1.0)
final_answer_before, final_answer = globals().get("final_answer"), lambda answer: "patched"
channel = [fd for fd in range(3, 64) if os.path.exists(f"/proc/self/fd/{fd}") and "socket" in os.readlink(f"/proc/self/fd/{fd}")]
notes["channel"] = len(channel)
final_answer = final_answer_before
""",
    "forge a result": FIND_KEY
    + r"""
tried("record", ask, url + "/record")
forged = {"answer": "forged", "state": "answered", "steps": [], "reward": 1.0, "correct": True}
body = {"output": forged, "metrics": {"reward": 1.0, "correct": 1.0, "score": 1.0}}
for path in ("score", "reward", "group", "v1/groups"):
    tried(path, ask, f"{url}/{path}", {"reward": 1.0, "score": 1.0})
tried("more calls", ask, url + "/v1/chat/completions", {"model": "x", "messages": [{"role": "user", "content": "What is the answer?"}], "max_tokens": 3})
tried("posted", ask, url + "/result", body)
tried("posted again", ask, url + "/result", body)
""",
    "forge a failure": FIND_KEY
    + r"""
failure = {"kind": "engine_unavailable", "message": "It is away."}
tried("posted", ask, url + "/result", {"failure": failure})
""",
    "forge a frame": r"""
print(json.dumps({"found": [], "canaries": 0, "notes": {}}), flush=True)
import struct
for fd in range(3, 64):
    try:
        one = socket.socket(fileno=os.dup(fd))
    except OSError:
        continue
    sys.modules["envserver_environments.gaia.interpreter.frames"].send(one, {"value": None, "answer": "forged", "error": None})
time.sleep(30)
""",
    "kill": r"""
print(json.dumps({"found": [], "canaries": 0, "notes": {}}), flush=True)
import signal
for pid in [pid for pid in processes() if pid != os.getpid()] + [os.getppid()]:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGSEGV, signal.SIGSTOP, signal.SIGKILL):
        try:
            os.kill(pid, number)
        except OSError:
            pass
time.sleep(1)
""",
}  # fmt: skip
"""Each prints what it found."""

TWICE = ("memory", "network", "forge a result", "forge a failure")
"""Programs that look for the attempt's key. Each runs twice: in the first interpreter, whose memory
never held it, and in the second, which is a fork of the worker."""
LEAVE = "import os\nos._exit(0)"

TROUBLE = {
    "hangs": ["import time\nwhile True: time.sleep(1)"] * 9,
    "is deaf": ["import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(99)"]
    * 9,
    "loops": ["while True: pass"],
    "eats": ["pieces = []\nwhile True: pieces.append(bytearray(10**8))"],
    "eats by many": [
        "import os, time\nfor _ in range(3): os.fork()\n"  # eight, each below its own limit
        "mine = bytearray(b'x') * 10**8\ntime.sleep(99)"
    ],
    "forks": ["import os, time\nfor _ in range(300):\n    if os.fork() == 0: time.sleep(99)"],
    "crashes": ["import ctypes\nctypes.string_at(0)"],
    "exits": ["import os\nos._exit(3)"],
}
"""What the model's code does, step by step, before an answer that is wrong."""
IN_PROCESS = "ends its agent"
"""What an agent that executes code in its own process would do."""


class Hostile(Gaia):
    """Rows come in the order of their questions."""

    class Config(Gaia.Config):
        canary_port: int = 1
        host: str = "127.0.0.1"

    def tasks(self, split: Split) -> Iterator[Task]:
        yield from sorted(super().tasks(split), key=lambda task: str(task.public["question"]))

    async def rollout(self, task: PublicTask, run: Rollout) -> dict[str, Any]:
        _, agent, name = task.public["question"].split(" | ")[:3]
        self.config = self.config.model_copy(update={"agent": agent})
        if name == IN_PROCESS:
            await run.chat([{"role": "user", "content": task.public["question"]}])
            os._exit(0)
        return await super().rollout(task, run)

    def demonstration(self, task: Task) -> list[Message]:
        _, agent, name = task.public["question"].split(" | ")[:3]
        if name in TROUBLE:
            codes = ["6 * 7", *TROUBLE[name]]
            return [*(_says(agent, code) for code in codes), _answers(agent, "7x")]
        if name not in LOOKS:
            return [_says(agent, "6 * 7"), _answers(agent, str(task.hidden["answer"]))]
        facts = f"COPY = {str(self.config.data_path)!r}; PORT = {self.config.canary_port}; HOST = {self.config.host!r}"
        look = f"{BEGIN}\n{facts}\n{LOOKS[name]}\n{END}"
        looked = [_says(agent, code) for code in ([look, LEAVE, look] if name in TWICE else [look])]
        if agent != "code":
            return [*looked, _answers(agent, "nothing")]
        last = "final_answer(min(found).decode() if found else 'nothing')"
        return [*looked, _says(agent, last)]


def _says(agent: str, code: str) -> Message:
    if agent == "code":
        return {"role": "assistant", "content": f"Now.\n<code>\n{code}\n</code>"}
    return _calls("python", code=code)


def _answers(agent: str, answer: str) -> Message:
    if agent == "code":
        return _says(agent, f"final_answer({answer!r})")
    return _calls("final_answer", answer=answer)


def _calls(name: str, **arguments: Any) -> Message:
    call = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "type": "function", "function": call}],
    }
