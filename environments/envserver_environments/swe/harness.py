# ruff: noqa: PTH100, PTH118
"""Runs in the sandbox: pytest, and a report of each test. Sent there as text, not imported here.

Out, on the original stdout, one line per test: a seal, a running number, the test's number, its
status, and its values, as JSON. The exit status is pytest's.

The tested code shares this process. It finds none of these names: all of this is in one function's
scope, and `__main__` is emptied first. The seal is an HMAC whose key stays inside OpenSSL. A test's
outcome is observed at the call of its function, not read from pytest's report alone. Code that gets
past all this through frames or memory can forge a status, but not the values of tests whose answers
were taken out.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:  # Type checkers take it for true: nothing is imported in the sandbox.
    from typing import Any


def main() -> None:
    import _hashlib
    import ast
    import builtins
    import contextlib
    import functools
    import hashlib
    import importlib.machinery
    import inspect
    import json
    import os
    import sys
    import types
    import unittest

    request = json.loads(sys.stdin.buffer.read())
    channel = os.dup(1)
    nowhere = os.open("/dev/null", os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"

    # Everything that is ours is imported before the repository can be.
    import pytest
    from _pytest import runner
    from _pytest.config import default_plugins

    for name in [*(f"_pytest.{plugin}" for plugin in default_plugins), *request["plugins"]]:
        importlib.import_module(name)

    write = os.write
    sealing = _hashlib.hmac_new(bytes.fromhex(request.pop("key")), digestmod="sha256")
    numbers = request["numbers"]
    # What is told while no test runs counts for all of them: nobody may try answers in between.
    state: dict[str, Any] = {"sent": 0, "item": None, "values": [], "outside": [], "size": 0}

    def report(number: int, status: bytes, values: bytes) -> None:
        state["sent"] += 1
        body = b"%d %d %s %s" % (state["sent"], number, status, values)
        seal = sealing.copy()
        seal.update(body)
        line = b"%s %s\n" % (seal.hexdigest().encode(), body)
        while line:
            line = line[write(channel, line) :]

    # Its own functions: the tested code may replace those of everybody.
    judging: dict[str, Any] = {"__builtins__": dict(vars(builtins)), "__name__": "judging"}
    exec(compile(request["judging"], "judging", "exec", dont_inherit=True), judging)
    dumps, shape, unwritable = json.dumps, judging["shape"], judging["Unwritable"]

    # An answer is decrypted when its value is known, and only if it is needed.
    answers, exact = request["answers"], request["exact"]
    spaces: list[Any] = []
    equality: Any = None
    from_bytes, urandom = int.from_bytes, os.urandom
    literal, shake_256 = ast.literal_eval, hashlib.shake_256

    def below(end: int) -> int:
        return from_bytes(urandom(64), "big") % end

    def keep(number: int, kind: str, text: str) -> None:
        values = state["outside"] if state["item"] is None else state["values"]
        line = f'[{number:d},"{kind}",{text}]'
        if line not in values:
            values.append(line)
            state["size"] += len(line)

    def decrypted(number: int) -> "Any":
        data = bytes.fromhex(answers.get(str(number), ""))
        if not data:
            return "", []
        seed = sealing.copy()
        seed.update(b"answer %d" % number)
        stream = shake_256(seed.digest()).digest(len(data))
        text = from_bytes(data, "big") ^ from_bytes(stream, "big")
        return literal(text.to_bytes(len(data), "big").decode())

    def plain(value: "Any") -> bool:
        try:
            shape(value, False)
        except unwritable:
            return False
        return True

    def veiled(number: int, *values: "Any") -> "Any":
        if len(values) == 2:
            equal = equality(*values)
            keep(number, "equal" if all(map(plain, values)) else "objects", dumps(equal))
            return equal
        try:
            text = dumps(shape(values[0], exact))
        except unwritable:
            text = None
        if text is not None and len(text) + state["size"] < judging["MAX_REPORT"]:
            return keep(number, "value", text)
        operator, candidates = decrypted(number)
        said = judging["comparisons"](operator, values[0], candidates)
        return keep(number, "compared", dumps(said))

    def number_of(item: "Any") -> "Any":
        return numbers.get(item.nodeid, numbers.get(item.name))

    # Not attributes of the plugin, which code that holds a test's item can find.
    codes: dict[Any, Any] = {}
    returned: set[Any] = set()
    failed: set[Any] = set()

    def counted(item: "Any", function: "Any") -> "Any":
        if inspect.iscoroutinefunction(function):

            async def awaited(*arguments: "Any", **keywords: "Any") -> "Any":
                result = await function(*arguments, **keywords)
                returned.add(item)
                return result

            return functools.wraps(function)(awaited)

        def test(*arguments: "Any", **keywords: "Any") -> "Any":
            result = function(*arguments, **keywords)
            returned.add(item)
            return result

        return functools.wraps(function)(test)

    # Spaces of modules and classes that are not the repository's, and the functions and classes in
    # them. Those that tests name are looked at after each test, all after the collection and at
    # the end.
    foreign: list[Any] = []
    near: list[Any] = []
    replaced: set[str] = set()

    def keep_foreign(name: str, space: "Any", is_near: bool) -> None:
        callables = {key: value for key, value in list(space.items()) if callable(value)}
        foreign.append((name, space, callables))
        if is_near:
            near.append(foreign[-1])
        for key, value in callables.items():
            if isinstance(value, type) and value.__module__ == name:
                keep_foreign(f"{name}.{key}", vars(value), is_near)

    def note_replaced(spaces: "list[Any]") -> None:
        for name, space, callables in spaces:
            replaced.update(
                f"{name}.{key}" for key, value in callables.items() if space.get(key) is not value
            )

    class Watch:
        def pytest_collection_modifyitems(self, items: "list[Any]") -> None:
            items[:] = [item for item in items if number_of(item) is not None]
            for item in items:
                function = getattr(item, "function", None)
                codes[item] = getattr(function, "__code__", None)
            note_replaced(foreign)

        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtest_setup(self, item: "Any") -> "Any":
            state.update(item=item, values=[], size=0)
            return (yield)

        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtest_call(self, item: "Any") -> "Any":
            function = getattr(item, "function", None)
            if getattr(function, "__code__", None) is not codes[item]:
                failed.add(item)
            elif function is not None:
                item.obj = counted(item, item.obj)
                case = getattr(item, "instance", None)
                if isinstance(case, unittest.TestCase):
                    # Of an asynchronous one pytest leaves the method as it is.
                    setattr(case, item.name, item.obj)
            return (yield)

        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtest_makereport(self, item: "Any", call: "Any") -> "Any":
            outcome = yield
            if call.excinfo is not None or outcome.outcome != "passed":
                failed.add(item)
            if call.when == "teardown":
                note_replaced(near)
                passed = item in returned and item not in failed
                reported = [*state["outside"], *state["values"]]
                values = "[" + ",".join(reported) + "]" if passed else "[]"
                state["item"] = None
                report(number_of(item), b"passed" if passed else b"failed", values.encode())
            return outcome

    root = os.path.abspath(request["root"])
    roots = [os.path.join(root, "src"), root]
    # Python 3.9 lists the compiled ones only.
    standard = getattr(sys, "stdlib_module_names", sys.builtin_module_names)
    own = {name for name in request["own"] if name not in standard}

    # Tests are only in memory: where their files should be are empty ones.
    realpath, find_spec = os.path.realpath, importlib.machinery.PathFinder.find_spec
    sources = {realpath(os.path.join(root, p)): text for p, text in request["sources"].items()}
    names = [path[: -len(".py")].split("/") for path in sources]
    tails = {parts[-2] if parts[-1] == "__init__" else parts[-1] for parts in names}

    class FromMemory(importlib.machinery.SourceFileLoader):
        def get_code(self, fullname: str) -> "Any":
            source = sources[realpath(self.path)]
            return compile(source, self.path, "exec", dont_inherit=True)

        def exec_module(self, module: "Any") -> None:
            spaces.append(vars(module))
            super().exec_module(module)

    class OwnPackages:
        """The repository's packages come before installed ones of the same name, nothing else."""

        @staticmethod
        def find_spec(name: str, path: "Any" = None, target: object = None) -> "Any":
            is_own = path is None and name in own
            if not is_own and name.rpartition(".")[2] not in tails:
                return None
            spec = find_spec(name, roots if is_own else path)
            if spec is not None and spec.origin and realpath(spec.origin) in sources:
                spec.loader = FromMemory(name, spec.origin)
                return spec
            return spec if is_own else None

    if request["veiled"]:
        import unittest.mock

        equality = judging["equality"](judging["classes_now"](), spaces, below)
    if hasattr(runner, "_update_current_test_var"):
        # A variable with the test's name, which may have answers in it.
        runner._update_current_test_var = lambda item, when: None
        os.environ["PYTEST_CURRENT_TEST"] = "a test (call)"

    report(-1, b"ready", b"[]")
    os.dup2(nowhere, 2)
    os.close(nowhere)
    setattr(builtins, request["seen"], veiled)
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.path[:] = [entry for entry in sys.path if entry not in ("", root)]
    # Before the repository can change them; the first changes `typing` when it is imported.
    for name in ["typing_extensions", *request["imports"]]:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType):
            is_near = name == "builtins" or name in request["imports"]
            keep_foreign(name, vars(module), is_near)
    foreign.append(("sys.modules", sys.modules, dict(sys.modules)))
    sys.path += roots
    sys.meta_path.insert(0, OwnPackages)
    sys.argv = ["pytest"]
    files = [os.path.join(root, name) for name in request["files"]]
    first, last = request["sentinels"]
    arguments = ["--rootdir", root, *request["arguments"], first, *files, last]
    for name in request["plugins"]:
        arguments[:0] = ["-p", name]
    status = pytest.main(arguments, plugins=[Watch()])
    note_replaced(foreign)
    report(-1, b"end", " ".join(replaced).encode())  # json may be what was replaced
    raise SystemExit(int(status))


main()
