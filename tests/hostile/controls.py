# ruff: noqa: E501 - whole programs in strings
"""Ordinary programs: a wall that stops these is none that anybody could use."""

from __future__ import annotations

from .program import Ordinary

CONTROLS = [
    Ordinary(
        name="zeros without end",
        language="shell",
        source="head -c 5000000 /dev/zero | wc -c; dd if=/dev/zero of=big bs=1M count=3 2>/dev/null; wc -c <big",
        prints="5000000\n3145728",
    ),
    Ordinary(
        name="numpy",
        source="import numpy; print(numpy.linalg.inv(numpy.eye(3) * 2).trace())",
        prints="1.5",
        needs="numpy",
    ),
    Ordinary(
        name="threads",
        source="""\
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    print(sum(pool.map(lambda x: x * x, range(100))))
""",
        prints="328350",
    ),
    Ordinary(
        name="programs that talk through pipes",
        source="""\
import subprocess
print(subprocess.run(["sort", "-r"], input="a\\nc\\nb\\n", capture_output=True, text=True, check=True).stdout)
""",
        prints="c\nb\na\n",
    ),
    Ordinary(
        name="a database in its folder",
        source="""\
import sqlite3
with sqlite3.connect("data.db") as database:
    database.execute("create table t (x)")
    database.executemany("insert into t values (?)", [(x,) for x in range(1000)])
print(database.execute("select sum(x) from t").fetchone())
""",
        prints="499500",
    ),
    Ordinary(
        name="a git repository",
        language="shell",
        source="""\
set -e
git init -q .
git config user.email a@example.org && git config user.name a
echo one > file && git add file && git commit -q -m first
echo two > file && git diff --stat && git log --oneline | wc -l
""",
        prints="1 insertion(+), 1 deletion(-)",
        needs="git",
    ),
    Ordinary(
        name="a run of pytest",
        language="shell",
        source="""\
printf 'def test_sum():\\n    assert 1 + 1 == 2\\n' > test_it.py
python -m pytest -q -p no:cacheprovider test_it.py
""",
        prints="1 passed",
        needs="pytest",
    ),
    Ordinary(
        name="a pool of processes",
        source="""\
import multiprocessing, os
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(3) as pool:
        print(sum(pool.map(abs, range(-50, 50))))
""",
        prints="2500",
    ),
    Ordinary(
        name="all the world's letters",
        source="print('Grüße, 你好, 🙂'); open('ж', 'w').write('ж'); print(open('ж').read())",
        prints="Grüße, 你好, 🙂\nж",
    ),
    Ordinary(
        name="thirty megabytes",
        source="data = bytearray(30 << 20); data[::4096] = b'x' * len(data[::4096]); print(len(data))",
        prints="31457280",
    ),
    Ordinary(
        name="a million numbers",
        source="import random; n = sorted(random.random() for _ in range(10**6)); print(len(n), n == sorted(n))",
        prints="1000000 True",
    ),
    Ordinary(
        name="a server of its own",
        source="""\
import http.server, threading, urllib.request
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/").status)
""",
        prints="200",
    ),
    Ordinary(
        name="much output",
        source="print('line of output ' * 4000)",
        prints="line of output " * 4000,
    ),
    Ordinary(
        name="temporary files",
        language="shell",
        source='file=$(mktemp) && echo kept > "$file" && cat "$file" && ls -l /dev/null && test -d /proc/self',
        prints="kept",
    ),
    Ordinary(
        name="files that it was given",
        language="shell",
        source='wc -c < data/input.bin; python3 -c "import module; print(module.answer)"',
        prints="3000\n42",
        files={"data/input.bin": bytes(3000), "module.py": b"answer = 42\n"},
    ),
    Ordinary(
        name="an event loop",
        source="""\
import asyncio, sys
async def main():
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(6 * 7)", stdout=-1)
    print((await child.communicate())[0].decode())
asyncio.run(main())
""",
        prints="42",
    ),
]
