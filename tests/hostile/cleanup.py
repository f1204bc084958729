# ruff: noqa: E501 - whole programs in strings
"""Programs that want to outlive their end: their mark must be gone from the host when it is told."""

from __future__ import annotations

from .program import BRIEF, Hostile, running

STAY = 'os.execv("/bin/sh", [MARK, "-c", "sleep 20; exit"])'
NOBODY = running(
    """\
for name in filter(str.isdigit, os.listdir("/proc")):
    words = open(f"/proc/{name}/cmdline").read() + open(f"/proc/{name}/comm").read()
    if int(name) not in (os.getpid(), 1) and MARK in words:
        got(f"{name} is still here")
"""
)

PROGRAMS = [
    Hostile(
        name="a child left behind",
        must="ends with its parent",
        source=f"if os.fork() == 0:\n    {STAY}\nprint('done')",
        ends=("exit 0",),
        seconds=15,
        then=NOBODY,
    ),
    Hostile(
        name="a daemon",
        must="ends with its parent",
        source=f"""\
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 3)
        {STAY}
    os._exit(0)
time.sleep(0.05)
""",
        ends=("exit 0",),
        seconds=15,
        then=NOBODY,
    ),
    Hostile(
        name="a daemon by shell",
        must="ends with its parent",
        language="shell",
        source="nohup setsid sh -c 'sleep 20; exit' $MARK >/dev/null 2>&1 & exit 0",
        ends=("exit 0",),
        seconds=15,
        then=NOBODY,
    ),
    Hostile(
        name="a daemon that holds its output",
        must="does not delay the result",
        source=f"if os.fork() == 0:\n    os.setsid()\n    {STAY}\nprint('done', flush=True)",
        prints="done\n",
        ends=("exit 0",),
        seconds=15,
    ),
    Hostile(
        name="a child that ignores every signal",
        must="is killed",
        source="""\
if os.fork() == 0:
    for number in range(1, 65):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    os.setsid()
    for _ in range(200):
        time.sleep(0.1)
    os._exit(0)
time.sleep(0.05)
""",
        ends=("exit 0",),
        seconds=15,
        then=NOBODY,
    ),
    Hostile(
        name="a stopped child",
        must="is killed",
        source="""\
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(0)
os.waitpid(child, os.WUNTRACED)
""",
        ends=("exit 0",),
        seconds=15,
        then=NOBODY,
    ),
    Hostile(
        name="a chain that forks anew fifty times a second",
        must="is broken",
        source="""\
if os.fork() == 0:
    os.setsid()
    for _ in range(500):
        if os.fork():
            os._exit(0)
        time.sleep(0.02)
    os._exit(0)
time.sleep(0.1)
""",
        ends=("exit 0",),
        seconds=15,
        then=NOBODY,
    ),
    Hostile(
        name="a chain that forks as fast as it can",
        must="is broken",
        source="""\
if os.fork() == 0:
    until = time.monotonic() + 5
    while time.monotonic() < until:
        if os.fork():
            os._exit(0)
    os._exit(0)
time.sleep(0.1)
""",
        seconds=15,
        then=NOBODY,
    ),
    Hostile(
        name="children whose end is told to nobody, and brothers",
        must="are killed",
        source="""\
if os.uname().machine == "x86_64":
    for flags in (0, 0x8000, 0x8000 | 10, 34, 0x80000000):  # no signal, CLONE_PARENT, others, CLONE_IO
        if libc.syscall(56, flags, 0, 0, 0, 0) == 0:
            libc.setsid()
            if libc.syscall(56, flags, 0, 0, 0, 0) == 0:
                libc.prctl(1, 19)  # stopped when its parent ends
            libc.sleep(20)
            libc._exit(0)
time.sleep(0.05)
""",
        ends=("exit 0",),
        seconds=15,
        then=NOBODY,
    ),
    Hostile(
        name="the first thread ends before the others",
        must="ends in its time",
        source="""\
import threading
threading.Thread(target=lambda: time.sleep(20), daemon=False).start()
libc.syscall(60 if os.uname().machine == "x86_64" else 93, 0)  # exit of this thread only
""",
        limits=BRIEF,
        ends=("wall", "exit 0"),
    ),
    Hostile(
        name="a child in namespaces of its own",
        must="ends with its parent",
        source=f"""\
libc.unshare(0x10000000)
libc.unshare(0x20000000)
if os.fork() == 0:
    {STAY}
time.sleep(0.05)
""",
        seconds=15,
        then=NOBODY,
    ),
    Hostile(
        name="leaves at the end of its time",
        must="what it left ends too",
        source=f"""\
if os.fork() == 0:
    os.setsid()
    {STAY}
time.sleep(20)
""",
        limits=BRIEF,
        ends=("wall",),
        then=NOBODY,
    ),
    Hostile(
        name="a job for later",
        must="no scheduler of the host is to be reached",
        language="shell",
        source="""\
echo "touch /tmp/$MARK" | at now 2>/dev/null && echo "GOT""-IN $MARK at"
systemd-run --user touch /tmp/$MARK 2>/dev/null && echo "GOT""-IN $MARK systemd"
for folder in /etc/cron.d /var/spool/cron /etc/profile.d /etc/init.d /etc/systemd/system; do
  { : > "$folder/$MARK"; } 2>/dev/null && echo "GOT""-IN $MARK $folder" && rm "$folder/$MARK"
done
true
""",
    ),
    Hostile(
        name="modules planted for the next program",
        must="the next one gets the true modules",
        source="""\
lines = f"import os; os.write(1, b'GO' + b'T-IN {MARK} planted')"
for name in ("json", "os", "re", "socket", "msgspec", "sitecustomize", "usercustomize", "site",
             "encodings", "traceback", "linecache", "tokenize", "__main__", "runpy", "stat"):
    for folder in (WORK, os.environ.get("TMPDIR", "/tmp"),
                   WORK + "/.local/lib/python%d.%d/site-packages" % sys.version_info[:2]):
        os.makedirs(folder, exist_ok=True)
        open(f"{folder}/{name}.py", "w").write(lines)
open(".pythonrc", "w").write(lines)
open("pyvenv.cfg", "w").write("home = /work\\n")
""",
        ends=("exit 0",),
        then=running("import json, re, tokenize, runpy; raise ValueError('a traceback')"),
    ),
    Hostile(
        name="an interpreter changed for the next program",
        must="the next one gets a fresh one",
        source="""\
import builtins, json
builtins.print = lambda *words: got("print")
json.dumps = lambda *words: got("dumps")
sys.modules["re"] = None
sys.meta_path.clear()
os.environ["LD_PRELOAD"] = WORK + "/x.so"
sys.path[:] = [WORK]
""",
        then=running(
            "import json, re, sqlite3; print(json.dumps(1)); assert 'LD_PRELOAD' not in os.environ"
        ),
    ),
]
