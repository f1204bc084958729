# ruff: noqa: PTH100, PTH118
"""Runs in the sandbox: pytest, and a report of each test. Sent there as text, not imported here.

In: JSON on stdin. Out, on the original stdout, one line per test: a seal, a running number, the
test's number, its status, and its values (`hoisting`), as JSON. Programs' output is discarded. The
exit status is pytest's.

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
    import builtins
    import functools
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
    from _pytest.config import default_plugins

    for name in [*(f"_pytest.{plugin}" for plugin in default_plugins), *request["plugins"]]:
        importlib.import_module(name)

    write = os.write
    sealing = _hashlib.hmac_new(bytes.fromhex(request.pop("key")), digestmod="sha256")
    numbers = request["numbers"]
    state: dict[str, Any] = {"sent": 0, "values": []}

    def report(number: int, status: bytes, values: bytes) -> None:
        state["sent"] += 1
        body = b"%d %d %s %s" % (state["sent"], number, status, values)
        seal = sealing.copy()
        seal.update(body)
        line = b"%s %s\n" % (seal.hexdigest().encode(), body)
        while line:
            line = line[write(channel, line) :]

    class Unwritable(Exception):
        pass

    tags: dict[Any, str] = {list: "l", tuple: "t", set: "s", frozenset: "z"}

    def shape(value: "Any", depth: int, left: "list[int]") -> "Any":
        left[0] -= 1
        if depth > 40 or left[0] < 0:
            raise Unwritable
        kind = type(value)
        if value is None or kind is bool or (kind is str and len(value) < 50000):
            return value
        if kind is int and value.bit_length() < 60000:
            return value if -(10**18) < value < 10**18 else ["i", format(value, "x")]
        if kind is float:
            return ["f", float.hex(value)]
        if kind is complex:
            return ["c", float.hex(value.real), float.hex(value.imag)]
        if kind is bytes and len(value) < 50000:
            return ["b", value.hex()]
        if kind in tags:
            return [tags[kind], [shape(item, depth + 1, left) for item in list(value)]]
        if kind is dict:
            parts = [part for pair in value.items() for part in pair]
            return ["d", [shape(part, depth + 1, left) for part in parts]]
        raise Unwritable

    def seen(value: object) -> None:
        try:
            text = json.dumps(shape(value, 0, [20000]))
        except Unwritable:
            text = '["?"]'
        state["values"].append(text)

    def number_of(item: "Any") -> "Any":
        return numbers.get(item.nodeid, numbers.get(item.name))

    # Not attributes of the plugin, which whoever holds a test's item can find.
    codes: dict[Any, Any] = {}
    returned: set[Any] = set()
    failed: set[Any] = set()

    def counted(item: "Any", function: "Any") -> "Any":
        """The test's function, which says when it was run to its end."""
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

    class Watch:
        def pytest_collection_modifyitems(self, items: "list[Any]") -> None:
            items[:] = [item for item in items if number_of(item) is not None]
            for item in items:
                function = getattr(item, "function", None)
                codes[item] = getattr(function, "__code__", None)

        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtest_call(self, item: "Any") -> "Any":
            state["values"] = []
            function = getattr(item, "function", None)
            if getattr(function, "__code__", None) is not codes[item]:
                failed.add(item)
            elif function is not None:
                item.obj = counted(item, item.obj)
                case = getattr(item, "instance", None)
                if isinstance(case, unittest.TestCase):
                    # Of an asynchronous one pytest leaves the method as it is.
                    setattr(case, item.name, item.obj)
            result = yield
            return result

        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtest_makereport(self, item: "Any", call: "Any") -> "Any":
            outcome = yield
            if call.excinfo is not None or outcome.outcome != "passed":
                failed.add(item)
            if call.when == "teardown":
                passed = item in returned and item not in failed
                values = "[" + ",".join(state["values"]) + "]" if passed else "[]"
                report(number_of(item), b"passed" if passed else b"failed", values.encode())
            return outcome

    root = os.path.abspath(request["root"])
    roots = [os.path.join(root, "src"), root]
    own = {name for name in request["own"] if name not in sys.stdlib_module_names}

    class OwnPackages:
        """The repository's packages come before installed ones of the same name, nothing else."""

        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> "Any":
            if path is None and name in own:
                return importlib.machinery.PathFinder.find_spec(name, roots)
            return None

    report(-1, b"ready", b"[]")
    os.dup2(nowhere, 2)
    os.close(nowhere)
    setattr(builtins, request["seen"], seen)
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.path[:] = [entry for entry in sys.path if entry not in ("", root)] + roots
    sys.meta_path.insert(0, OwnPackages)
    sys.argv = ["pytest"]
    files = [os.path.join(root, name) for name in request["files"]]
    first, last = request["sentinels"]
    arguments = ["--rootdir", root, *request["arguments"], first, *files, last]
    for name in request["plugins"]:
        arguments[:0] = ["-p", name]
    status = pytest.main(arguments, plugins=[Watch()])
    report(-1, b"end", b"[]")
    raise SystemExit(int(status))


main()
