# ruff: noqa: E501 - whole programs in strings
"""Programs that look for secrets of the host: each of those holds a random word."""

from __future__ import annotations

from .program import BRIEF, Hostile

PROGRAMS = [
    Hostile(
        name="own environment",
        must="holds nothing of the server's",
        source="print(os.environ, os.environb)",
    ),
    Hostile(
        name="environments of all processes",
        must="no process of the host is there",
        source="""\
for name in os.listdir("/proc"):
    show(f"/proc/{name}/environ")
""",
    ),
    Hostile(
        name="environments by shell",
        must="no process of the host is there",
        language="shell",
        source="env; cat /proc/*/environ /proc/*/cmdline /proc/*/task/*/environ 2>/dev/null; true",
    ),
    Hostile(
        name="command lines of all processes",
        must="no process of the host or of a neighbour is there",
        source="""\
for name in os.listdir("/proc"):
    show(f"/proc/{name}/cmdline")
""",
    ),
    Hostile(
        name="own memory",
        must="the interpreter that it was forked from has never held a secret",
        source="""\
word = b"CANA" + b"RY-"
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
    for line in maps:
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if " r" not in line or "[v" in line:
            continue
        try:
            memory.seek(start)
            data = memory.read(end - start)
        except (OSError, ValueError, OverflowError):
            continue
        at = data.find(word)
        while at >= 0:
            os.write(1, data[at:at + 60] + b"\\n")
            at = data.find(word, at + 1)
""",
    ),
    Hostile(
        name="memory of the others",
        must="cannot be read",
        source="""\
for name in filter(str.isdigit, os.listdir("/proc")):
    if int(name) != os.getpid():
        try:
            maps = open(f"/proc/{name}/maps").readlines()
            memory = open(f"/proc/{name}/mem", "rb", 0)
            memory.seek(int(maps[0].split("-")[0], 16))
            memory.read(16)
            got(f"memory of {name}")
        except (OSError, IndexError, ValueError):
            pass
""",
    ),
    Hostile(
        name="inherited descriptors",
        must="there is none that leads anywhere",
        source="""\
import select
for descriptor in range(1024):
    try:
        os.set_blocking(descriptor, False)
        print(descriptor, os.readlink(f"/proc/self/fd/{descriptor}"))
        os.lseek(descriptor, 0, 0)
    except OSError:
        pass
    try:
        os.write(1, os.read(descriptor, 65536))
    except OSError:
        pass
    if descriptor > 2:
        for path in (".", "..", "../../../../../../../../" + SECRET_FILE):
            try:
                found = os.open(path, os.O_RDONLY, dir_fd=descriptor)
                got(f"{path} by {descriptor}")
                os.write(1, os.read(found, 1000))
            except OSError:
                pass
""",
    ),
    Hostile(
        name="a file of the host by its path",
        must="is not there",
        source='show(SECRET_FILE); show("/proc/1/root" + SECRET_FILE); show("//" + SECRET_FILE)',
    ),
    Hostile(
        name="a file of the host by a process",
        must="no process of the host is there",
        source="""\
for name in filter(str.isdigit, os.listdir("/proc")):
    for kind in ("root", "cwd", "task/" + name + "/root", "map_files"):
        show(f"/proc/{name}/{kind}{SECRET_FILE}")
        show(f"/proc/{name}/{kind}/.env")
        show(f"/proc/{name}/{kind}/../.env")
""",
    ),
    Hostile(
        name="open files of the others",
        must="cannot be opened",
        source="""\
for name in filter(str.isdigit, os.listdir("/proc")):
    if int(name) != os.getpid():
        try:
            for descriptor in os.listdir(f"/proc/{name}/fd"):
                os.open(f"/proc/{name}/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK)
                got(f"{descriptor} of {name}")
                break
        except OSError:
            pass
""",
    ),
    Hostile(
        name="the graders' code by import",
        must="has no such module",
        source="""\
for name in ("envserver_environments", "envserver_environments.math", "envserver_tools", "envserver_clients",
             "envserver_records", "envserver_local", "envserver_factory", "envserver.rollouts",
             "envserver.proxy", "envserver.store", "envserver.workers", "envserver.api"):
    try:
        got(f"{name} {__import__(name)!r}")
    except ImportError:
        pass
""",
    ),
    Hostile(
        name="the graders' code by path",
        must="is not there",
        source="""\
for start in (PROJECT, PROJECT + '/environments', *sys.path):
    show(f"{start}/envserver_environments/math/scoring.py")
    try:
        got(f"{start}: {os.listdir(start + '/envserver_environments/math')}")
    except OSError:
        pass
""",
    ),
    Hostile(
        name="the graders' code by search",
        must="is nowhere below /",
        limits=BRIEF,
        language="shell",
        source="""\
find / -xdev \\( -name proc -o -name sys -o -path /usr/share \\) -prune \\
  -o \\( -path '*/envserver_environments/math/*' -o -name neighbour.txt -o -name '*.env' \\) -print 2>/dev/null |
while read -r path; do head -c 4000 "$path"; done
""",
    ),
    Hostile(
        name="a neighbour's files",
        must="are not there",
        source="""\
for folder in ("/work", "/tmp", "/dev/shm", "/var/tmp", "/run", "/mnt", "/home", "/"):
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        show(f"{folder}/{name}/neighbour.txt")
        show(f"{folder}/{name}/work/neighbour.txt")
        show(f"{folder}/neighbour.txt")
""",
    ),
    Hostile(
        name="what an earlier sandbox left",
        must="is not there",
        source="""\
for folder in ("/tmp", "/dev/shm", "/var/tmp", WORK, os.environ.get("TMPDIR", "/tmp")):
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        if name.startswith("hx") and name != MARK:
            got(f"{folder}/{name}")
    try:
        open(f"{folder}/{MARK}", "w").close()
    except OSError:
        pass
""",
    ),
    Hostile(
        name="the password file",
        must="is not to be read",
        source="""\
for path in ("/etc/shadow", "/etc/gshadow", "/etc/sudoers"):
    try:
        if open(path).read().strip():
            got(path)
    except OSError:
        pass
""",
    ),
    Hostile(
        name="homes",
        must="nothing of a home is there but the sandbox's own",
        source="""\
homes = [HOME_OF_SERVER, "/root"]
if os.path.isdir("/home"):
    homes += [f"/home/{name}" for name in os.listdir("/home")]
for home in homes:
    for name in (".bashrc", ".profile", ".ssh", ".netrc", ".gitconfig", ".config", ".cache"):
        if os.path.exists(f"{home}/{name}") and not home.startswith(WORK):
            got(f"{home}/{name}")
""",
    ),
    Hostile(
        name="the root by a handle",
        must="handles cannot be opened",
        source="""\
import fcntl
handle = struct.pack("IiQ", 8, 1, 2)
for path in ("/", WORK, "/usr", "/etc"):
    attempt("open_by_handle_at", os.open(path, os.O_RDONLY), handle, os.O_RDONLY)
""",
    ),
    Hostile(
        name="the kernel's log",
        must="cannot be read",
        source="""\
buffer = ctypes.create_string_buffer(4096)
if call("syslog", 3, buffer, 4096)[0] > 0:
    got("log")
for path in ("/dev/kmsg", "/proc/kcore", "/proc/kallsyms"):
    try:
        line = os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 200)
        if line.strip(b"0 ") and not line.startswith(b"0000000000000000"):
            got(path)
    except OSError:
        pass
""",
    ),
]
