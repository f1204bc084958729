# ruff: noqa: E501 - whole programs in strings
"""Programs that write where they should not, or leave traps for whoever reads what they wrote."""

from __future__ import annotations

import asyncio
import contextlib

from envserver import InputError, Sandbox

from .program import Hostile, Told, reading, still_works


async def writes_and_reads(box: Sandbox, told: Told) -> bytes:
    """The file tools at every trap that the program has laid."""
    seen = b""
    for name in ("link", "folder/file", "pipe", "chain", "device", "loop", "socket"):
        with contextlib.suppress(InputError):
            seen += await asyncio.wait_for(box.read(name), 60)
        with contextlib.suppress(InputError):
            await asyncio.wait_for(box.write(name, b"written through " + name.encode()), 60)
    return seen


PROGRAMS = [
    Hostile(
        name="writes to files of the host",
        must="they stay as they are",
        source="""\
for path in (WRITABLE_FILE, FOLDER + "/" + MARK, "/proc/1/root" + WRITABLE_FILE):
    try:
        open(path, "w").write(MARK)
    except OSError:
        pass
""",
    ),
    Hostile(
        name="changes files of the host without opening them",
        must="they stay as they are",
        source="""\
for change in (os.unlink, lambda path: os.truncate(path, 0), lambda path: os.chmod(path, 0o777),
               lambda path: os.rename(path, path + MARK), lambda path: os.utime(path, (1, 1)),
               lambda path: os.link(path, WORK + "/" + MARK), lambda path: os.chown(path, 31337, 31337),
               lambda path: os.setxattr(path, "user.mark", b"x")):
    try:
        change(WRITABLE_FILE)  # some walls say that they did: the host looks for itself
    except OSError:
        pass
""",
    ),
    Hostile(
        name="writes into the system",
        must="is refused",
        source="""\
import site, sysconfig
for folder in ("/", "/etc", "/usr", "/usr/bin", "/usr/lib", "/bin", "/lib", "/opt", "/var", "/root",
               "/boot", "/sys", "/proc", "/dev", *site.getsitepackages(), sysconfig.get_path("stdlib"),
               os.path.dirname(sys.executable), os.path.dirname(os.__file__) + "/__pycache__", PROJECT):
    try:
        open(f"{folder}/{MARK}", "w").close()
        os.unlink(f"{folder}/{MARK}")
        got(folder)
    except OSError:
        pass
for path in ("/etc/passwd", "/etc/ld.so.cache", "/usr/bin/env", os.__file__, sys.executable):
    try:
        os.open(path, os.O_WRONLY)
        got(path)
    except OSError:
        pass
""",
    ),
    Hostile(
        name="links to files of the host",
        must="lead nowhere",
        source="""\
os.symlink(SECRET_FILE, "link")
os.symlink(os.path.dirname(SECRET_FILE), "folder")
os.symlink("link", "chain")
os.symlink("loop", "loop")
""",
        ends=("exit 0",),
        then=writes_and_reads,
    ),
    Hostile(
        name="links to files that may be written",
        must="the file stays as it is",
        source="""\
os.symlink(WRITABLE_FILE, "link")
os.symlink(FOLDER, "folder")
os.symlink("folder/" + MARK, "chain")
""",
        ends=("exit 0",),
        then=writes_and_reads,
    ),
    Hostile(
        name="links to the insides of processes",
        must="nothing of ours is read or written",
        source="""\
os.symlink("/proc/1/environ", "link")
os.symlink("/proc/self/mem", "chain")
os.symlink("/proc/self", "folder")
os.symlink("/proc/1/fd/0", "device")
os.symlink("/proc/self/fd/3", "loop")
""",
        ends=("exit 0",),
        then=writes_and_reads,
    ),
    Hostile(
        name="pipes, sockets and devices instead of files",
        must="neither hold up nor break whoever reads",
        source="""\
os.mkfifo("pipe")
os.symlink("/dev/zero", "device")
os.symlink("/dev/stdin", "link")
os.makedirs("chain")
os.makedirs("folder/file")
try:
    socket.socket(socket.AF_UNIX).bind("socket")
except OSError:
    pass
""",
        ends=("exit 0",),
        seconds=250,
        then=writes_and_reads,
    ),
    Hostile(
        name="an endless file",
        must="only its start is read",
        source='os.truncate(os.open("file", os.O_CREAT | os.O_RDWR), 10 << 20)',
        then=reading("file"),
    ),
    Hostile(
        name="names that are not text",
        must="hinder nothing",
        source="""\
for name in (b"\\xff\\xfe", b"new\\nline", b"x" * 255, b"--help", b"-rf", "\\u202e".encode(), b"\\x1b[2J"):
    open(name, "w").close()
""",
        ends=("exit 0",),
        then=reading("../work/-rf"),
    ),
    Hostile(
        name="its folder taken away",
        must="the sandbox lives",
        source="""\
for change in (lambda: os.chmod(WORK, 0), lambda: os.rmdir(WORK), lambda: os.rename(WORK, WORK + "w"),
               lambda: os.chmod("/tmp", 0), lambda: os.chmod(os.environ.get("TMPDIR", "/tmp"), 0)):
    try:
        change()
    except OSError:
        pass
""",
        then=still_works,
    ),
    Hostile(
        name="paths that climb",
        must="end at the sandbox's own root",
        source='show(WORK + "/.." * 40 + SECRET_FILE); show("../" * 40 + SECRET_FILE[1:])',
        then=reading("../" * 40 + "etc/shadow"),
    ),
    Hostile(
        name="settings of git planted in its folder",
        must="nobody runs git there but programs of the sandbox",
        language="shell",
        source="""\
git init -q . 2>/dev/null
git config core.fsmonitor "touch $FOLDER/$MARK" 2>/dev/null
git config core.pager "touch $FOLDER/$MARK" 2>/dev/null
mkdir -p .git/hooks && printf '#!/bin/sh\\ntouch %s\\n' "$FOLDER/$MARK" > .git/hooks/post-checkout
chmod +x .git/hooks/post-checkout; git status >/dev/null 2>&1; true
""",
        then=reading(".git/config"),
    ),
]
