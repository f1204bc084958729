"""Whole programs that do not solve their task; each must score 0. Pure."""

from __future__ import annotations

from .problem import Pair

PROGRAMS: dict[str, str] = {
    "says nothing": "import sys\nsys.stdin.read()",
    "repeats what it reads": "import sys\nsys.stdout.write(sys.stdin.read())",
    "a word of success": "print('OK', 'PASSED', 'All tests passed', 'Accepted', 1.0, sep='\\n')",
    "exits at once": "import os\nos._exit(0)",
    "looks for what is wanted in files": """
        import os
        for top in ("/work", "/tmp", "/home", "/root", "/srv", "/opt", "/proc/1/root/work"):
            for folder, _, names in os.walk(top):
                for name in names:
                    if name.endswith((".jsonl", ".json", ".out", ".txt", ".ans")):
                        try:
                            print(open(os.path.join(folder, name)).read())
                        except (OSError, ValueError):
                            pass
        """,
    "looks for what is wanted in memory": """
        import gc, sys
        frame = sys._getframe()
        while frame:
            for space in (frame.f_locals, frame.f_globals):
                for key in ("output", "expected", "wanted", "pair", "tests"):
                    if key in space:
                        print(space[key])
            frame = frame.f_back
        for found in gc.get_objects():
            if type(found) is dict and ("output" in found or "expected" in found):
                print(found.get("output") or found.get("expected"))
        """,
    "reads other processes": """
        import glob
        for path in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ"):
            try:
                print(open(path, "rb").read())
            except OSError:
                pass
        """,
    "reads every descriptor": """
        import os
        for fd in range(64):
            try:
                os.set_blocking(fd, False)
                os.write(1, os.read(fd, 65536))
            except OSError:
                pass
        """,
    "keeps what it reads for the next test": """
        import os, sys
        text = sys.stdin.read()
        for folder in ("/work", "/tmp", "/dev/shm"):
            try:
                with open(os.path.join(folder, "kept"), "a+") as file:
                    file.seek(0)
                    print(file.read())
                    file.write(text)
            except OSError:
                pass
        """,
    "prints all that there can be": """
        for number in range(-1000, 100_000):
            print(number)
        """,
    "an exception after the end": "import atexit\natexit.register(lambda: 1 / 0)\nraise SystemExit",
}


def constant(pairs: list[Pair]) -> str:
    """Prints the output of the first test, whatever the input."""
    return f"print({pairs[0]['output']!r}, end='')"


def table(pairs: list[Pair]) -> str:
    """Knows the answers to `pairs`, and nothing else."""
    known = {pair["input"]: pair["output"] for pair in pairs}
    return f"import sys\nprint({known!r}.get(sys.stdin.read(), ''), end='')"


def after_its_work(code: str, end: str) -> str:
    """The right program, which then ends otherwise than a program should."""
    return f"{code}\nimport os, sys\nsys.stdout.flush()\n{end}"


SPOILED: dict[str, str] = {
    "right, but with status 1": "os._exit(1)",
    "right, but ended by a signal": "os.kill(os.getpid(), 9)",
    "right, but with an exception": "raise ValueError",
    "right, and one line more": "print('done')",
    "right, and then for ever": "os.dup2(os.open('/dev/null', os.O_RDWR), 1)\nwhile True: pass",
    "right, and then too much": "while True: print(' ' * 1000)",
}
"""Code appended to the reference."""
