"""Programs that reach for other processes: a victim of the host counts what comes to it."""

from __future__ import annotations

from .program import BRIEF, Hostile, still_works

PROGRAMS = [
    Hostile(
        name="a signal to everybody",
        must="the host hears nothing",
        source="os.kill(-1, signal.SIGWINCH); time.sleep(0.1)  # VICTIM",
    ),
    Hostile(
        name="a signal to one process of the host",
        must="it hears nothing",
        source="""\
for pid in (VICTIM, SERVER):
    try:
        os.kill(pid, signal.SIGURG)
    except OSError:
        pass
""",
    ),
    Hostile(
        name="a signal by pidfd",
        must="it hears nothing",
        source="""\
handle = call("pidfd_open", VICTIM, 0)[0]
if handle >= 0:
    call("pidfd_send_signal", handle, int(signal.SIGCHLD), None, 0)
    if call("pidfd_getfd", handle, 0, 0)[0] >= 0:
        got("a descriptor of the host")
""",
    ),
    Hostile(
        name="a signal from the kernel by F_SETOWN",
        must="it hears nothing",
        source="""\
import fcntl
ours, theirs = socket.socketpair()
for owner in (VICTIM, -VICTIM):
    try:
        fcntl.fcntl(ours, fcntl.F_SETOWN, owner)
        fcntl.fcntl(ours, 10, int(signal.SIGCONT))
        fcntl.fcntl(ours, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        theirs.send(b"x")
    except OSError:
        pass
time.sleep(0.1)
""",
    ),
    Hostile(
        name="a signal to its own group",
        must="ends itself only",
        source="os.killpg(0, signal.SIGKILL)",
        ends=("signal 9",),
        then=still_works,
    ),
    Hostile(
        name="the end of whoever started it",
        must="the sandbox lives",
        source="""\
for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCONT, signal.SIGKILL):
    for pid in (1, os.getppid()):
        if pid not in (VICTIM, SERVER):
            try:
                os.kill(pid, sign)
            except OSError:
                pass
print("honest")
""",
        prints="honest\n",
        ends=("exit 0",),
        then=still_works,
    ),
    Hostile(
        name="the server of the sandbox stopped",
        must="it cannot be stopped",
        source="""\
for pid in {1, os.getppid()} - {VICTIM, SERVER}:
    try:
        os.kill(pid, signal.SIGSTOP)
    except OSError:
        pass
print("honest")
""",
        limits=BRIEF,
        prints="honest\n",
        ends=("exit 0",),
        then=still_works,
    ),
    Hostile(
        name="ptrace of the others",
        must="is refused",
        source="""\
for pid in (1, os.getppid(), VICTIM):
    if call("ptrace", 0x4206, pid, None, None)[0] >= 0:  # seize: it is not stopped
        got(f"ptrace {pid}")
""",
    ),
    Hostile(
        name="writing into the others' memory",
        must="is refused",
        source="""\
buffer = ctypes.create_string_buffer(b"x" * 16)
for pid in {1, os.getppid(), VICTIM} - {os.getpid()}:
    try:
        address = int(open(f"/proc/{pid}/maps").readline().split("-")[0], 16)
        open(f"/proc/{pid}/mem", "r+b", 0)
        got(f"memory of {pid}")
    except OSError:
        address = 0x400000
    vector = struct.pack("QQ", ctypes.addressof(buffer), 16)
    remote = struct.pack("QQ", address, 16)
    if call("process_vm_readv", pid, vector, 1, remote, 1, 0)[0] >= 0:
        got(f"read of {pid}")
""",
    ),
    Hostile(
        name="limits and priority of the host's processes",
        must="stay as they are",
        source="""\
import resource
for change in (
    lambda: resource.prlimit(VICTIM, resource.RLIMIT_CORE, (0, 0)),
    lambda: os.setpriority(os.PRIO_PROCESS, VICTIM, 5),
    lambda: os.sched_setaffinity(VICTIM, {0}),
):
    try:
        change()
        got("changed")
    except (OSError, ValueError):
        pass
""",
    ),
    Hostile(
        name="descriptors of its parent",
        must="cannot be taken",
        source="""\
for pid in {1, os.getppid()} - {os.getpid()}:
    handle = call("pidfd_open", pid, 0)[0]
    for descriptor in range(64) if handle >= 0 else ():
        if call("pidfd_getfd", handle, descriptor, 0)[0] >= 0:
            got(f"{descriptor} of {pid}")
""",
    ),
    Hostile(
        name="a look at the others",
        must="no process of the host or of a neighbour is there",
        source="""\
for name in filter(str.isdigit, os.listdir("/proc")):
    if int(name) in (VICTIM, SERVER):
        got(f"sees {name}")
for pid in (VICTIM, SERVER):
    try:
        os.kill(pid, 0)
        got(f"could signal {pid}")
    except OSError:
        pass
""",
    ),
    Hostile(
        name="higher priority",
        must="is refused",
        source="""\
for change in (
    lambda: os.nice(-5),
    lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
    lambda: os.write(os.open("/proc/self/oom_score_adj", os.O_WRONLY), b"-900"),
):
    try:
        change()
        got("changed")
    except OSError:
        pass
""",
    ),
    Hostile(
        name="stops itself",
        must="is killed when its time is over",
        source="os.kill(os.getpid(), signal.SIGSTOP); time.sleep(20)",
        limits=BRIEF,
        ends=("wall",),
    ),
]
