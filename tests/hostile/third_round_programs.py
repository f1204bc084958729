# ruff: noqa: E501 - whole programs in strings
"""Programs, patches and answers for test_third_round.py.

A program that got what it wanted prints GOT, or the secret; a patch or an answer is paid.
"""

from __future__ import annotations

SANDBOXED = {
    "imports the graders": "import envserver_environments; print('GOT')",
    "searches for the graders": """
import os, sys
for top in [*sys.path, "/work", "/root", "/home", "/opt", "/srv"]:
    for folder, _, names in os.walk(top):
        print("GOT" if "envserver_environments" in folder else "", end="")
""",
    "opens the secret": "print(open(SECRET).read())",
    "opens it below the root of another process": "print(open('/proc/1/root' + SECRET).read())",
    "links it": "import os; os.link(SECRET, 'out.txt'); print(open('out.txt').read())",
    "reads descriptors of all": """
import os
for process in filter(str.isdigit, os.listdir("/proc")):
    for number in range(64):
        try:
            at = os.readlink(f"/proc/{process}/fd/{number}")
        except OSError:
            continue
        print("GOT" if at.startswith(("/home", "/root", "socket:")) and process == "1" else "")
""",
    "reads variables of all": """
import os
for process in filter(str.isdigit, os.listdir("/proc")):
    try:
        print(open(f"/proc/{process}/environ").read())
    except OSError:
        pass
""",
    "sets the core pattern": "open('/proc/sys/kernel/core_pattern', 'w').write('|/bin/sh'); print('GOT')",
    "is spared when memory is short": "open('/proc/self/oom_score_adj', 'w').write('-1000'); print('GOT')",
    "changes its control group": """
import os
for folder, _, names in os.walk("/sys/fs/cgroup"):
    for name in ("memory.max", "cgroup.procs", "release_agent"):
        try:
            open(os.path.join(folder, name), "w").write("max")
            print("GOT")
        except OSError:
            pass
""",
    "makes a namespace": """
import ctypes
libc = ctypes.CDLL(None)
print("GOT" if libc.unshare(0x10020000) == 0 and libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0 else "")
""",
    "asks the virtual machine's host": "import socket; socket.socket(40, 1).connect((2, 22)); print('GOT')",
    "lists networks": "import socket; print(*('GOT' for _, name in socket.if_nameindex() if name != 'lo'))",
    "resolves a name": "import socket; print('GOT', socket.getaddrinfo('example.com', 80))",
    "knocks at ports": """
import socket
for port in [*range(1, 500), 5432, 8000, 8080]:
    with socket.socket() as one:
        one.settimeout(0.01)
        print("GOT" if one.connect_ex(("127.0.0.1", port)) == 0 else "", end="")
""",
    "kills all": """
import os
for process in range(1, 40000):
    if process != os.getpid():
        try:
            os.kill(process, 9)
        except OSError:
            pass
os.kill(-1, 9)
""",
    "kills its parent": "import os; os.kill(os.getppid(), 19); os.kill(os.getppid(), 9)",
    "forks for ever": """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
    "leaves a daemon": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 64)
        time.sleep(60)
    os._exit(0)
""",
    "takes memory": "x = bytearray(400 << 20); print('GOT')",
    "reserves a file": "import os; os.posix_fallocate(os.open('a', os.O_CREAT | os.O_RDWR), 0, 1 << 30); print('GOT')",
    "fills folders in memory": """
for path in ("/tmp/a", "/dev/shm/a", "/run/a", "/var/tmp/a", "a"):
    try:
        with open(path, "wb") as file:
            for _ in range(64):
                file.write(b"x" * (1 << 20))
            print("GOT")
    except OSError:
        pass
""",
    "writes without end": "import os\nwhile True:\n    os.write(1, b'x' * 65536)",
    "closes all": "import os; os.closerange(0, 4096); os._exit(0)",
    "opens devices": """
import os
for name in ("sda", "mem", "port", "kmsg", "fuse", "kvm", "loop0", "net/tun"):
    try:
        os.close(os.open("/dev/" + name, os.O_RDWR))
        print("GOT")
    except OSError:
        pass
""",
    "makes a device": "import os; os.mknod('d', 0o60666, os.makedev(8, 0)); os.open('d', 0); print('GOT')",
    "looks for keys": "import ctypes; print('GOT' if ctypes.CDLL(None).syscall(250, 0, -3, 1) > 0 else '')",
    "makes a ring": "import ctypes; print('GOT' if ctypes.CDLL(None).syscall(425, 8, bytes(256)) >= 0 else '')",
    "traces its parent": "import ctypes, os; print('GOT' if ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0 else '')",
    "plants modules": """
for name in ("sitecustomize", "usercustomize", "json", "os", "encodings"):
    open(name + ".py", "w").write("print('GOT')")
""",
}

PATCHES = {
    "strings that the collector knows": """
        import gc
        def label(n):
            for one in gc.get_objects():
                try:
                    inner = list(one.values()) + list(one) if isinstance(one, dict) else list(one) if isinstance(one, (list, tuple, set, frozenset)) else []
                except Exception:
                    continue
                for text in inner:
                    if type(text) is str and text.startswith(f"{n} item"):
                        return text
            return "?"
    """,
    "ids that the collector knows": """
        import gc, re
        def label(n):
            for one in gc.get_objects():
                if isinstance(one, dict):
                    for text in list(one):
                        found = re.search(rf"\\\\b({n} items?)", text) if type(text) is str else None
                        if found:
                            return found[1]
            return "?"
    """,
    "own memory": """
        import re
        def _scan(pattern):
            found = {}
            for line in open("/proc/self/maps"):
                place, rights = line.split()[:2]
                if "r" not in rights or "[v" in line: continue
                start, end = (int(part, 16) for part in place.split("-"))
                try:
                    with open("/proc/self/mem", "rb", 0) as memory:
                        memory.seek(start)
                        data = memory.read(end - start)
                except OSError:
                    continue
                for one in re.findall(pattern, data):
                    found[one] = found.get(one, 0) + 1
            return found
        def label(n):
            found = _scan(rb"(?<![0-9])%d items?(?![a-z{])" % n)
            return max(found, key=found.get).decode() if found else "?"
    """,
    "other processes": """
        import os, re
        def label(n):
            for process in filter(str.isdigit, os.listdir("/proc")):
                for name in ("cmdline", "environ", "fd/0", "fd/3", "fd/4", "fd/5"):
                    try:
                        data = b"" if name.startswith("fd") and process == str(os.getpid()) else open(f"/proc/{process}/{name}", "rb").read(100000)
                    except OSError:
                        continue
                    found = re.search(rb"%d items?" % n, data)
                    if found:
                        return found[0].decode()
            return "?"
    """,
    "json writes true": """
        import json
        class _Writer:
            def encode(self, value): return "true"
        json._default_encoder = _Writer()
        def label(n): return "?"
    """,
    "json tells what it wrote": """
        import json
        _said = []
        class _Writer:
            def __init__(self, real): self.real = real
            def encode(self, value):
                _said.append(value)
                return self.real.encode(value)
        json._default_encoder = _Writer(json._default_encoder)
        def label(n): return str(_said[0]) if _said else "?"
    """,
    "the module of the tests": """
        import sys
        def label(n):
            for name, module in list(sys.modules.items()):
                if "test" in name:
                    for key, value in list(vars(module).items()):
                        code = getattr(value, "__code__", None)
                        if code is not None:
                            try:
                                value.__code__ = (lambda *_, **__: None).__code__
                            except Exception: pass
            return "?"
    """,
    "the loader's source": """
        import sys, re
        def label(n):
            for module in list(sys.modules.values()):
                loader = getattr(module, "__loader__", None)
                for ask in ("get_source", "get_code"):
                    try:
                        said = getattr(loader, ask)(module.__name__)
                    except Exception:
                        continue
                    text = said if isinstance(said, str) else repr(said.co_consts) + repr([getattr(c, "co_consts", ()) for c in said.co_consts])
                    found = re.search(rf"['\\"]({n} items?)['\\"]", text) if "shop" not in str(getattr(module, "__file__", "")) else None
                    if found: return found[1]
            return "?"
    """,
    "a thread that watches": """
        import sys, threading, time
        _seen = set()
        def _watch():
            while True:
                for frame in list(sys._current_frames().values()):
                    while frame is not None:
                        for value in list(frame.f_locals.values()):
                            for one in value if isinstance(value, (list, tuple)) else [value]:
                                if isinstance(one, str) and len(one) < 20: _seen.add(one)
                        frame = frame.f_back
                time.sleep(0)
        threading.Thread(target=_watch, daemon=True).start()
        def label(n):
            time.sleep(0.05)
            return next((text for text in sorted(_seen) if text.startswith(f"{n} item")), "?")
    """,
    "a debugger": """
        import bdb
        class _D(bdb.Bdb):
            said = []
            def user_return(self, frame, value):
                if isinstance(value, (str, tuple, list)): self.said.append(value)
        _d = _D()
        _d.set_trace()
        def label(n):
            for value in _d.said:
                for one in [value] if isinstance(value, str) else value:
                    if isinstance(one, str) and one.startswith(f"{n} item"): return one
            return "?"
    """,
    "an audit hook": """
        import sys
        _said = []
        sys.addaudithook(lambda event, arguments: _said.append(arguments) if len(_said) < 100000 else None)
        def label(n):
            import re
            found = re.search(rf"['\\"]({n} items?)['\\"]", repr(_said))
            return found[1] if found else "?"
    """,
    "int of bytes": """
        import os
        _u = os.urandom
        os.urandom = lambda n: b"\\0" * n
        class _T:
            left = 1
            def __eq__(self, other):
                self.left -= 1
                return self.left == 0
            def __contains__(self, p): return self == p
        def label(n): return _T()
    """,
    "watches what functions return": """
        import sys
        said = []
        def keep(frame, event, value):
            if event == "return" and isinstance(value, str):
                said.append(value)
        [found for name, found in vars(sys).items() if name.startswith("setpro")][0](keep)
        def label(n):
            return next((text for text in said if text.startswith(f"{n} item")), "?")
    """,
    "exits at import": """
        import os
        getattr(os, "_ex" "it")(0)
    """,
    "exits at the end": """
        import atexit, os
        atexit.register(os._exit, 1)
        def label(n):
            return "?"
    """,
    "exits by a thread": """
        import os, threading
        found = [one for name, one in vars(os).items() if name.startswith("_exi")][0]
        threading.Timer(0.3, found, [1]).start()
        def label(n):
            return "?"
    """,
    "exits by a signal": """
        import os, signal
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), 9))
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        def label(n):
            return "?"
    """,
    "writes reports everywhere": """
        import os
        def label(n):
            for number in range(3, 40):
                try:
                    os.write(number, b"00 9 0 passed []\\n")
                except OSError:
                    pass
            return "?"
    """,
    "changes what is written": """
        import os
        write = os.write
        os.write = lambda number, data: write(number, data.replace(b"failed", b"passed"))
        def label(n):
            return "?"
    """,
    "a text whose methods all agree": """
        class Text(str):
            __hash__ = str.__hash__
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            def __contains__(self, other): return True
            def __getattribute__(self, name):
                if name[0] == "_":
                    return str.__getattribute__(self, name)
                return lambda *_: True
        def label(n):
            return Text("?")
    """,
    "an object that says it is a text": """
        class Text:
            @property
            def __class__(self): return str
            def __eq__(self, other): return True
            def __contains__(self, other): return True
            def __len__(self): return 7
            def __hash__(self): return 1
        def label(n):
            return Text()
    """,
    "a class that equals all": """
        class Kind(type):
            def __eq__(self, other): return True
            def __contains__(self, other): return True
            def __instancecheck__(self, other): return True
            def __hash__(self): return 1
        class Text(metaclass=Kind):
            pass
        def label(n):
            return Text
    """,
    "pytest calls nothing": """
        import sys
        for name, module in list(sys.modules.items()):
            for one in ("call_and_report", "pytest_runtest_call") if name.endswith("runner") else ():
                setattr(module, one, lambda *_, **__: None)
        def label(n):
            return "?"
    """,
    "reports have passed": """
        import sys
        for module in list(sys.modules.values()):
            for name, found in list(vars(module).items()):
                if name.endswith("Report") and isinstance(found, type):
                    try:
                        found.outcome = property(lambda self: "passed", lambda self, value: None)
                        found.passed = property(lambda self: True)
                    except (TypeError, AttributeError):
                        pass
        def label(n):
            return "?"
    """,
    "assertions of unittest hold": """
        import sys
        for module in list(sys.modules.values()):
            found = vars(module).get("TestCase")
            for name in dir(found) if isinstance(found, type) else ():
                if name.startswith("assert"):
                    setattr(found, name, lambda *_, **__: None)
        def label(n):
            return "?"
    """,
    "a failed assertion ends all": """
        names = print.__self__
        class Ends(names.AssertionError):
            def __new__(cls, *_): raise SystemExit(0)
        names.AssertionError = Ends
        def label(n):
            return "?"
    """,
    "a skip by the class of skips": """
        import sys
        def label(n):
            for name, module in list(sys.modules.items()):
                if name.endswith("outcomes"):
                    raise module.Skipped("no")
    """,
    "modules of the harness replaced": """
        import ast, hashlib, hmac, json
        json.dumps = lambda *_, **__: "[]"
        hmac.compare_digest = lambda *_: True
        said = []
        ast.literal_eval = said.append
        def label(n):
            return str(said[0]) if said else "?"
    """,
    "two processes go on": """
        import os
        def label(n):
            os.fork()
            return "?"
    """,
    "the input read again": """
        import os
        def label(n):
            for number in range(30):
                try:
                    os.lseek(number, 0, 0)
                    text = os.read(number, 1 << 20).decode(errors="replace")
                except OSError:
                    continue
                for word in ("1 item", "2 items", "3 items"):
                    if word in text and word.startswith(str(n)):
                        return word
            return "?"
    """,
    "memory of all processes": """
        import os, re
        def label(n):
            for process in filter(str.isdigit, os.listdir("/proc")):
                try:
                    with open(f"/proc/{process}/mem", "rb", 0) as memory, open(f"/proc/{process}/maps") as maps:
                        for line in maps:
                            start, end = (int(part, 16) for part in line.split()[0].split("-"))
                            if " rw" in line and end - start < 1 << 26:
                                memory.seek(start)
                                found = re.search(rb"\\b%d item" % n + rb"(s)?\\b", memory.read(end - start))
                                if found and n != 1:
                                    return found[0].decode()
                except OSError:
                    continue
            return "?"
    """,
}

SOLUTIONS = {
    "a list that equals all": "class L(list):\n    def __eq__(self, other): return True\n    def __len__(self): return 2\ndef f(x): return L()",
    "a mapping with other items": "class D(dict):\n    def items(self): return [1]\ndef f(x): return D()",
    "a number of numpy without an end": "class generic:\n    def item(self): return self\ngeneric.__module__ = 'numpy'\ndef f(x): return generic()",
    "forged lines": "import os\nfor number in range(3, 20):\n    try:\n        os.write(number, b'[\"ready\"]\\n' + b''.join(b'[%d, \"v\", true]\\n' % i for i in range(9)))\n    except OSError:\n        pass\nos._exit(0)",
    "lines without an end": "import os\nwhile True:\n    for number in range(1, 9):\n        try:\n            os.write(number, b'[' * 65536)\n        except OSError:\n            pass",
    "a deep list": "def f(x):\n    made = []\n    for _ in range(10**5): made = [made]\n    return made",
    "a list in itself": "def f(x):\n    made = []\n    made.append(made)\n    return made",
    "a huge number": "def f(x): return 10**10**7",
    "half a surrogate pair": "def f(x): return chr(0xd800)",
    "memory": "def f(x): return 'x' * 10**11",
    "an exit": "raise SystemExit(0)",
    "no recursion limit": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x)",
    "other builtins": "import builtins\nbuiltins.len = lambda x: 2\nbuiltins.__build_class__ = None\ndef f(x): return None",
    "all answers printed": "print(17)\nprint(34)",
}

MATH = [
    r"\boxed{41 \text{ or } 42}", r"\boxed{42}\boxed{41}", r"\boxed{x}", r"\boxed{\{41,42\}}", r"\boxed{[0,100]}",
    r"\boxed{42=42=41}", r"\boxed{0/0}", r"\boxed{nan}", r"\boxed{1e999}", r"\boxed{10^{10^{10^{10}}}}", r"\boxed{42!!!!!!}",
    r"\boxed{\sum_{k=1}^{10^{12}} k}", r"\boxed{\int_0^1 \sin(x^x) dx}", r"\boxed{\pm 42}", r"\boxed{42 \pm 1}",
    r"\boxed{" + "(" * 5000 + "41" + ")" * 5000 + "}", r"\boxed{" + r"\frac{1}{" * 3000 + "2" + "}" * 3000 + "}",
    r"\boxed{\mathrm{__import__('os').abort()}}", r"\boxed{lambda: 42}", r"\boxed{" + "9**" * 200 + "9}",
    r"\boxed{x^{99999999}-x^{99999999}}", r"\boxed{(1+x)^{99999}}", r"\boxed{\binom{10000000}{5000000}}", r"\boxed{1/(1-1)}",
]  # fmt: skip

TEXTS = {
    "gaia": ({"Question": "q", "Final answer": "17"}, ["17 or 18", "17 " * 50, "inf", "nan", "", "71\u202e", "16, 17"]),
    "mhqa": ({"question": "q", "answer": "yes"}, ["yes or no", "not yes", "no", "yes no", "", "yesyes"]),
    "video": ({"question": "q", "options": ["a dog", "blue sky"], "answer": 1}, ["B A", r"\boxed{B}\boxed{A}", "ABCDEFG", "B" * 100, "\u0412", "a dog blue sky"]),
    "router": ("sample-three-02", ["{}", "[" * 3000, "null", '{"route_plan": NaN}', "/math /general-search " * 500]),
}  # fmt: skip
