# ruff: noqa: E501 - whole programs in strings
"""Programs that take more than they may. Each stops by itself before it could hurt the host."""

from __future__ import annotations

from envserver import SandboxLimits

from .program import BRIEF, Hostile, still_works

SMALL = SandboxLimits(
    wall_seconds=40,
    cpu_seconds=40,
    memory_mb=96,
    disk_mb=16,
    inodes=512,
    processes=16,
    open_files=64,
    output_kb=16,
)
# Fills memory in pieces of 8 MB and says so when it has far more than its 96 MB.
TAKE = """\
taken = []
for total in range(8, 800, 8):
    try:
        take()
    except (OSError, MemoryError, ValueError):
        break
    if total > 3 * 96:
        got(f"{total} MB")
        break
    time.sleep(0.01)
time.sleep(0.3)
"""
FILES = """\
def fill(folder, megabytes=40):
    "How many MB fit; the file stays."
    try:
        file = os.open(f"{folder}/{MARK}", os.O_CREAT | os.O_WRONLY, 0o600)
    except OSError:
        return 0
    for written in range(megabytes):
        try:
            os.write(file, bytes(1 << 20))
        except OSError:
            return written
    return written

"""

PROGRAMS = [
    Hostile(
        name="an endless loop",
        must="is killed when its time is over",
        source="""\
until = time.monotonic() + 20
while time.monotonic() < until:
    pass
""",
        limits=BRIEF,
        ends=("wall", "cpu"),
        then=still_works,
    ),
    Hostile(
        name="an endless sleep",
        must="is killed when its time is over",
        language="shell",
        source="sleep 20",
        limits=BRIEF,
        ends=("wall",),
    ),
    Hostile(
        name="an endless sleep that ignores signals",
        must="is killed when its time is over",
        source="""\
for number in range(1, 65):
    try:
        signal.signal(number, lambda *told: None)
    except (OSError, ValueError):
        pass
until = time.monotonic() + 20
while time.monotonic() < until:
    time.sleep(1)
""",
        limits=BRIEF,
        ends=("wall",),
    ),
    Hostile(
        name="CPU time in many processes",
        must="is counted and ended",
        source="""\
for _ in range(5):
    if os.fork() == 0:
        until = time.monotonic() + 10
        while time.monotonic() < until:
            pass
        os._exit(0)
time.sleep(10)
""",
        limits=BRIEF,
        ends=("wall", "cpu"),
    ),
    Hostile(
        name="CPU time in children that nobody waits for",
        must="is over with the wall time",
        source="""\
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
until = time.monotonic() + 10
while time.monotonic() < until:
    if os.fork() == 0:
        end = time.monotonic() + 0.02
        while time.monotonic() < end:
            pass
        os._exit(0)
    time.sleep(0.02)
""",
        limits=BRIEF,
        ends=("wall", "cpu"),
    ),
    Hostile(
        name="more CPU time by its own word",
        must="limits only go down",
        source="""\
import resource
for kind in range(16):
    try:
        soft, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            resource.setrlimit(kind, (soft, resource.RLIM_INFINITY))
            got(f"limit {kind}")
    except (OSError, ValueError):
        pass
""",
    ),
    Hostile(
        name="memory at once",
        must="does not get it",
        source="data = bytearray(600 << 20); got('600 MB')",
        limits=SMALL,
        then=still_works,
    ),
    Hostile(
        name="memory bit by bit",
        must="is stopped near the limit",
        source="take = lambda: taken.append(bytearray(os.urandom(1024)) * 8192)\n" + TAKE,
        limits=SMALL,
        then=still_works,
    ),
    Hostile(
        name="memory that is shared",
        must="is stopped near the limit",
        source="""\
import mmap
def take():
    taken.append(mmap.mmap(-1, 8 << 20))
    for at in range(0, 8 << 20, 4096):
        taken[-1][at] = 1
"""
        + TAKE,
        limits=SMALL,
    ),
    Hostile(
        name="memory that is shared and mapped no more",
        must="is stopped near the limit",
        source="""\
import mmap
def take():
    taken.append(mmap.mmap(-1, 8 << 20))
    taken[-1].write(bytes(8 << 20))
    taken[-1].madvise(mmap.MADV_DONTNEED)
"""
        + TAKE,
        limits=SMALL,
    ),
    Hostile(
        name="memory of the device of zeros",
        must="is stopped near the limit",
        source="""\
import mmap
def take():
    taken.append(mmap.mmap(os.open("/dev/zero", os.O_RDWR), 8 << 20))
    taken[-1].write(bytes(8 << 20))
    taken[-1].madvise(mmap.MADV_DONTNEED)
"""
        + TAKE,
        limits=SMALL,
    ),
    Hostile(
        name="huge pages of the host",
        must="are not given",
        source="""\
import mmap
for flags in (mmap.MAP_PRIVATE, mmap.MAP_SHARED):
    for size in (0, 21 << 26, 30 << 26):
        try:
            mmap.mmap(-1, 1 << 30, flags | mmap.MAP_ANONYMOUS | 0x40000 | size, mmap.PROT_READ)
            got(f"{flags} {size}")
        except OSError as error:
            if error.errno not in REFUSED:
                got(f"asked for {flags} {size}: {error}")
""",
    ),
    Hostile(
        name="memory in files without a name",
        must="is stopped near the limit",
        source="""\
def take():
    taken.append(call("memfd_create", MARK.encode(), 0)[0])
    os.write(taken[-1], bytes(8 << 20))
"""
        + TAKE,
        limits=SMALL,
    ),
    Hostile(
        name="memory in shared segments that nobody holds",
        must="is stopped near the limit",
        source="""\
libc.shmat.restype = ctypes.c_void_p
libc.shmdt.argtypes = [ctypes.c_void_p]
def take():
    segment, error = call("shmget", 0, 8 << 20, 0o1600)
    if segment < 0:
        raise OSError(error)
    address = libc.shmat(segment, None, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError("attach")
    ctypes.memset(address, 1, 8 << 20)
    libc.shmdt(address)
"""
        + TAKE,
        limits=SMALL,
    ),
    Hostile(
        name="memory in message queues",
        must="is stopped near the limit",
        source="""\
message = struct.pack("q", 1) + bytes(8192)
def take():
    for _ in range(512):
        queue = call("msgget", 0, 0o1600)[0]
        if queue < 0 or call("msgsnd", queue, message, 8192, 0o4000)[0] < 0:
            raise OSError("full")
        call("msgsnd", queue, message, 8192, 0o4000)
"""
        + TAKE,
        limits=SMALL,
    ),
    Hostile(
        name="memory in pipes",
        must="is stopped near the limit",
        source="""\
import fcntl
def take():
    for _ in range(8):
        reader, writer = os.pipe()
        fcntl.fcntl(writer, 1031, 1 << 20)
        os.set_blocking(writer, False)
        os.write(writer, bytes(1 << 20))
"""
        + TAKE,
        limits=SMALL,
    ),
    Hostile(
        name="memory in sockets on their way",
        must="is stopped near the limit",
        source="""\
import array
def take():
    for _ in range(40):
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        for _ in range(64):
            try:
                ours.send(bytes(65536))
            except BlockingIOError:
                break
        carrier, keeper = taken[0] if taken else socket.socketpair()
        taken[:] = [(carrier, keeper)]
        carrier.setblocking(False)
        carrier.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [ours.fileno(), theirs.fileno()]))])
"""
        + TAKE,
        limits=SMALL,
    ),
    Hostile(
        name="memory in many processes",
        must="is stopped near the limit together",
        source="""\
for number in range(8):
    if os.fork() == 0:
        data = bytearray(os.urandom(1024)) * (60 << 10)
        time.sleep(20)
        os.write(1, b".")
        os._exit(0)
time.sleep(25)
""",
        limits=SMALL,
        ends=("memory",),
    ),
    Hostile(
        name="many processes",
        must="gets no more than its share",
        source="""\
forked = 0
for _ in range(200):
    try:
        if os.fork() == 0:
            time.sleep(2)
            os._exit(0)
        forked += 1
    except OSError:
        break
if forked > 24:
    got(f"{forked} processes")
""",
        then=still_works,
    ),
    Hostile(
        name="a bomb of forks",
        must="ends, and the sandbox lives",
        source="""\
for _ in range(8):
    try:
        os.fork()
    except OSError:
        pass
time.sleep(2)
""",
        limits=BRIEF,
        then=still_works,
    ),
    Hostile(
        name="a bomb of forks by shell",
        must="ends, and the sandbox lives",
        language="shell",
        source='bomb() { [ "$1" -gt 9 ] || { bomb $(($1+1)) & bomb $(($1+1)) & wait; }; }; bomb 3',
        limits=BRIEF,
        then=still_works,
    ),
    Hostile(
        name="many threads",
        must="gets no more than its share",
        source="""\
import threading
started = 0
for _ in range(200):
    try:
        threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
        started += 1
    except RuntimeError:
        break
if started > 24:
    got(f"{started} threads")
""",
        then=still_works,
    ),
    Hostile(
        name="many open files",
        must="gets no more than its share",
        source="""\
opened = []
try:
    while len(opened) < 500:
        opened.append(open("/dev/null"))
except OSError:
    pass
if len(opened) > 64:
    got(f"{len(opened)} files")
""",
        then=still_works,
    ),
    Hostile(
        name="a big file in each folder",
        must="there is room for the limit, and nothing of it lands on the host",
        source=FILES
        + """\
total = 0
for folder in (WORK, "/tmp", "/dev/shm", "/dev", "/", "/run", "/var/tmp", "/mnt", "/proc", "/dev/mqueue", "/home", "/sys"):
    total += fill(folder)
if total > 40:
    got(f"{total} MB")
""",
        limits=SMALL,
    ),
    Hostile(
        name="many big files",
        must="is stopped near the limit",
        source="""\
written = 0
try:
    for number in range(300):
        with open(f"{number}", "wb") as file:
            written += file.write(bytes(1 << 20))
except OSError:
    pass
if written > 40 << 20:
    got(f"{written >> 20} MB")
""",
        then=still_works,
    ),
    Hostile(
        name="big files that were removed and are open",
        must="is stopped near the limit",
        source="""\
written, kept = 0, []
try:
    for number in range(40):
        file = open("file", "wb", 0)
        os.unlink("file")
        kept.append(file)
        for _ in range(8):
            written += file.write(bytes(1 << 20))
except OSError:
    pass
if written > 40 << 20:
    got(f"{written >> 20} MB")
""",
        then=still_works,
    ),
    Hostile(
        name="room taken without writing",
        must="is stopped near the limit",
        source="""\
try:
    os.posix_fallocate(os.open("file", os.O_CREAT | os.O_RDWR), 0, 300 << 20)
    got("300 MB")
except OSError:
    pass
""",
        then=still_works,
    ),
    Hostile(
        name="sixty thousand empty files",
        must="is stopped near the limit",
        source="""\
for folder in (WORK, "/tmp", "/dev/shm", "/dev", "/run", "/"):
    made = 0
    try:
        os.mkdir(f"{folder}/{MARK}")
        for made in range(10_000):
            os.close(os.open(f"{folder}/{MARK}/{made}", os.O_CREAT | os.O_WRONLY))
    except OSError:
        pass
    if made > 2_000:
        got(f"{made} files in {folder}")
        break
""",
        then=still_works,
    ),
    Hostile(
        name="five thousand folders in each other",
        must="does not hinder the end",
        source="""\
try:
    for _ in range(5_000):
        os.mkdir("d")
        os.chdir("d")
except OSError:
    pass
""",
        seconds=250,
        then=still_works,
    ),
    Hostile(
        name="a dead program's memory",
        must="is not written to the host",
        source="""\
import resource
try:
    resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
    if resource.getrlimit(resource.RLIMIT_CORE)[1] != 0:
        got("core files")
except (OSError, ValueError):
    pass
os.abort()
""",
        ends=("signal 6",),
    ),
    Hostile(
        name="locked memory",
        must="is not granted",
        source="""\
import mmap
page = mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE)
if libc.mlock(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page))), ctypes.c_size_t(64 << 20)) == 0:
    got("64 MB")
""",
    ),
]
