# ruff: noqa: E501 - whole programs in strings
"""Programs that try doors of the kernel which no program of a model needs."""

from __future__ import annotations

from .program import Hostile


def refused(name: str, source: str) -> Hostile:
    return Hostile(name=name, must="is refused by the kernel", source=source)


PROGRAMS = [
    refused("mount", 'attempt("mount", b"none", b"/work", b"no-such-type", 0, None)'),
    refused(
        "a mount by the new calls",
        """\
attempt("fsopen", b"tmpfs", 0)
attempt("open_tree", -100, b"/", 1)
""",
    ),
    refused("unmount", 'attempt("umount2", b"/proc", 4); attempt("umount2", b"/work", 4)'),
    refused("remount writable", 'attempt("mount", None, b"/usr", None, 32 | 4096, None)'),
    refused("another root", 'attempt("pivot_root", b"/no", b"/no"); attempt("chroot", b"/")'),
    refused(
        "namespaces of its own",
        """\
for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x02000000, 0x08000000, 0x04000000):
    if os.fork() == 0:
        attempt("unshare", flag)
        os._exit(0)
    os.wait()
""",
    ),
    refused(
        "namespaces by clone3",
        """\
arguments = struct.pack("11Q", 0x10000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0)
result, error = call("clone3", arguments, len(arguments))
if result == 0:
    os._exit(0)
if result > 0 or error not in REFUSED:
    got("clone3")
""",
    ),
    refused(
        "namespaces of others",
        """\
for pid in ("self", "1", VICTIM):
    for kind in ("mnt", "net", "pid", "user"):
        try:
            if call("setns", os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY), 0)[0] == 0:
                got(f"{pid} {kind}")
        except OSError:
            pass
""",
    ),
    refused(
        "rights of root",
        """\
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
for name in ("CapEff", "CapPrm", "CapInh", "CapAmb"):
    if int(status[name], 16):
        got(name + status[name])
for change in (lambda: os.setresuid(12, 12, 12), lambda: os.setresgid(12, 12, 12), lambda: os.setgroups([12])):
    try:
        change()
        got("another user")
    except OSError:
        pass
if 0 in os.getgroups() or 0 in (os.getuid(), os.getgid()):
    print("calls itself root")
""",
    ),
    refused(
        "programs with rights of their own",
        """\
if "NoNewPrivs:\\t1" not in open("/proc/self/status").read():
    got("set-user-id programs work")
""",
    ),
    refused(
        "devices made",
        """\
for folder in (WORK, "/tmp", "/dev/shm"):
    if call("mknodat", -100, f"{folder}/{MARK}".encode(), 0o060600, os.makedev(254, 0))[0] == 0:
        got(folder)
    if call("mknodat", -100, f"{folder}/{MARK}m".encode(), 0o020600, os.makedev(1, 1))[0] == 0:
        got(folder)
""",
    ),
    refused(
        "devices opened",
        """\
usual = {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "stdin", "stdout", "stderr"}
for name in set(os.listdir("/dev") if os.access("/dev", os.R_OK) else ()) | {"kvm", "mem", "fuse", "vda", "sda", "net/tun"}:
    path = f"/dev/{name}"
    harmful = name.startswith(("watchdog", "st", "nst"))  # to open these is an act
    if name not in usual and not harmful and not os.path.isdir(path):
        try:
            os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
            got(path)
        except OSError:
            pass
""",
    ),
    refused("bpf", 'attempt("bpf", 0, struct.pack("4I", 2, 4, 4, 1) + bytes(120), 136)'),
    refused(
        "performance counters",
        'attempt("perf_event_open", struct.pack("IIQ", 1, 128, 0) + bytes(24) + struct.pack("Q", 0x60) + bytes(80), 0, -1, -1, 0)',
    ),
    refused("faults handled by the program", 'attempt("userfaultfd", 1)'),
    refused("rings of calls", 'attempt("io_uring_setup", 1, ctypes.create_string_buffer(120))'),
    refused(
        "keys",
        """\
attempt("add_key", b"user", MARK.encode(), b"y", 1, -4)
attempt("keyctl", 0, -3, 1)
attempt("request_key", b"user", MARK.encode(), None, 0)
""",
    ),
    refused(
        "modules and another kernel",
        """\
attempt("init_module", None, 0, b"")
attempt("finit_module", -1, b"", 0)
attempt("kexec_load", 0, 0, None, 0xFFFF)
""",
    ),
    refused("reboot", 'attempt("reboot", 1, 2, 3, None)'),
    refused(
        "clock and name of the host",
        """\
attempt("settimeofday", None, None)
attempt("sethostname", b"x", -1)
""",
    ),
    refused(
        "swap, accounting, ports",
        """\
attempt("swapon", b"/no", 0)
attempt("acct", b"/no/such")
if CALLS["iopl"] >= 0:
    attempt("iopl", 3)
""",
    ),
    refused(
        "events of all files", 'attempt("fanotify_init", 0x200, 0); attempt("fanotify_init", 0, 0)'
    ),
    refused(
        "calls of 32-bit programs",
        """\
if os.uname().machine == "x86_64":
    import mmap
    page = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(b"\\x53\\xb8\\x36\\x01\\x00\\x00\\xbb\\x00\\x00\\x00\\x10\\xcd\\x80\\x5b\\xc3")  # unshare
    start = ctypes.addressof(ctypes.c_char.from_buffer(page))
    if ctypes.CFUNCTYPE(ctypes.c_int)(start)() == 0:
        got("a user namespace")
""",
    ),
    refused(
        "calls of the x32 kind",
        """\
if os.uname().machine == "x86_64":
    if libc.syscall(ctypes.c_long(0x40000000 | 272), 0x10000000) == 0:
        got("a user namespace")
""",
    ),
    refused(
        "seldom kinds of sockets",
        """\
for family in (3, 4, 5, 9, 15, 17, 21, 27, 29, 30, 31, 37, 38, 39, 40, 41, 42, 43, 44):
    for kind in (1, 2, 3, 5):
        try:
            socket.socket(family, kind, 0).close()
            got(f"family {family} kind {kind}")
        except OSError:
            pass
""",
    ),
    refused(
        "settings of the kernel",
        """\
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sysrq-trigger",
             "/proc/sys/vm/drop_caches", "/proc/sys/vm/overcommit_memory", "/sys/kernel/uevent_helper",
             "/proc/sys/net/ipv4/ip_forward", "/proc/sys/kernel/hostname", "/proc/sys/kernel/shmmax",
             "/proc/sys/fs/binfmt_misc/register", "/proc/irq/0/smp_affinity"):
    try:
        os.open(path, os.O_WRONLY)
        got(path)
    except OSError:
        pass
try:
    os.write(os.open("/proc/self/uid_map", os.O_WRONLY), b"0 0 1")
    got("a map of users")
except OSError:
    pass
""",
    ),
    refused(
        "control groups",
        """\
for folder, folders, files in os.walk("/sys/fs/cgroup"):
    for name in files:
        if name in ("cgroup.procs", "tasks", "release_agent", "notify_on_release", "memory.max"):
            try:
                os.open(f"{folder}/{name}", os.O_WRONLY)
                got(f"{folder}/{name}")
            except OSError:
                pass
""",
    ),
    refused(
        "filter taken off",
        """\
if "Seccomp:\\t2" not in open("/proc/self/status").read():
    got("there is none")
libc.prctl(22, 0, None)
attempt("mount", b"none", b"/work", b"no-such-type", 0, None)
""",
    ),
    refused(
        "rights regained by executing a file",
        """\
import shutil, subprocess
shutil.copy("/bin/cat", "tool")
try:
    os.chmod("tool", 0o6755)
    os.setxattr("tool", "security.capability", struct.pack("<5I", 0x02000001, 0xFFFFFFFF, 0, 0xFFFFFFFF, 0))
    got("capabilities of a file")
except OSError:
    pass
for option, value in ((8, 1), (28, 0x2F), (38, 0), (23, 0)):  # keep, secure bits, new privileges
    libc.prctl(option, value, 0, 0, 0)
libc.prctl(47, 2, 21, 0, 0)  # an ambient right
for tool in ("./tool", "/bin/cat"):
    told = subprocess.run([tool, "/proc/self/status"], capture_output=True, text=True).stdout
    for line in told.splitlines():
        name, _, value = line.partition(":")
        if name in ("CapEff", "CapPrm", "CapAmb") and int(value, 16) or (name, value.strip()) == ("NoNewPrivs", "0"):
            got(line)
""",
    ),
    Hostile(
        name="nonsense calls",
        must="leaves the sandbox alive",
        source="""\
import random
chance = random.Random(4)
harmless = [9, 11, 12, 28, 39, 96, 102, 104, 202, 218, 228, 230, 262, 273, 302, 318, 332, 334]
for _ in range(60):
    if os.fork() == 0:
        for _ in range(40):
            number = chance.choice(harmless) if os.uname().machine == "x86_64" else 172
            libc.syscall(number, *(chance.getrandbits(31) for _ in range(5)))
        os._exit(0)
    os.wait()
""",
        seconds=250,
    ),
]
