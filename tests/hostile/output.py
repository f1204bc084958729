"""Programs that say too much, or in the wrong way."""

from __future__ import annotations

from .program import BRIEF, Hostile, still_works

PROGRAMS = [
    Hostile(
        name="endless output",
        must="is cut off, and the program ended",
        language="shell",
        source="timeout 10 yes $MARK",
        limits=BRIEF,
        ends=("output", "wall", "cpu"),
    ),
    Hostile(
        name="endless errors",
        must="is cut off, and the program ended",
        source="""\
until = time.monotonic() + 10
while time.monotonic() < until:
    os.write(2, b"x" * 65536)
""",
        limits=BRIEF,
        ends=("output", "wall", "cpu"),
    ),
    Hostile(
        name="endless output of a child",
        must="is cut off, and all ended",
        language="shell",
        source="timeout 10 yes $MARK & timeout 10 yes $MARK >&2 & wait",
        limits=BRIEF,
        ends=("output", "wall", "cpu"),
    ),
    Hostile(
        name="output closed, then an endless loop",
        must="is killed when its time is over",
        source="""\
os.close(1)
os.close(2)
until = time.monotonic() + 20
while time.monotonic() < until:
    pass
""",
        limits=BRIEF,
        ends=("wall", "cpu"),
    ),
    Hostile(
        name="output opened again by name",
        must="goes nowhere else",
        source="""\
for name in ("/dev/stdout", "/proc/self/fd/1", "/proc/self/fd/0", "/dev/tty", "/dev/console"):
    try:
        os.write(os.open(name, os.O_WRONLY | os.O_NOCTTY), b"seen\\n")
    except OSError:
        pass
if sys.stdout.isatty():
    got("a terminal")
""",
        then=still_works,
    ),
    Hostile(
        name="bytes that are not text",
        must="come as they are",
        source="os.write(1, bytes(range(256)) * 4)",
        prints=(bytes(range(256)) * 4).decode("latin-1"),
        ends=("exit 0",),
    ),
    Hostile(
        name="output in single bytes",
        must="comes whole",
        source="for _ in range(3000): os.write(1, b'.')",
        prints="." * 3000,
        ends=("exit 0",),
    ),
]
