"""Tools that work in a sandbox: files, search, commands, Python, git patches.

They run inside the sandbox (`envserver_tools.inside`) and return bounded JSON and bytes. A failed
request is an observation for the model; a failed sandbox raises SandboxError. With
"envserver_tools.inside" in the sandbox's `preload` a call takes milliseconds; otherwise the source
is sent with each call.
"""

from __future__ import annotations

import json
import signal
import zlib
from collections.abc import Iterable
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from envserver_records.tasks import Json

from envserver import ExecResult, InputError, Sandbox, SandboxLimits

from . import inside
from .calling import Tool, ToolError, described, integer, toolbox

_TOOLS: dict[str, Json] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
NAMES = tuple(_TOOLS)
_TIMED = ("run_cmd", "bash", "python")


def description(name: str, command_seconds: int) -> Json:
    """The tool `name` in OpenAI's shape; commands may ask for up to `command_seconds`."""
    text, properties, required = _TOOLS[name].values()
    if name in _TIMED:
        timeout = f"Seconds until it is killed; default {command_seconds}."
        properties = {**properties, "timeout": integer(timeout, maximum=command_seconds)}
    return described(name, text, properties, required)


PRELOAD = ("envserver_tools.inside",)
"""Value for `SandboxSpec.preload`."""
MAX_CHARACTERS = 24_000
MAX_PATCH_BYTES = 1 << 20
_SHOWN_PATCH_BYTES = 16_000
_MAX_ANSWER_BYTES = 4 << 20
_MODULES = ("files", "patches", "")
"""Modules of envserver_tools.inside, each after those it imports."""


def sandbox_tools(
    sandbox: Sandbox,
    *,
    names: Iterable[str] | None = None,
    command_seconds: int = 60,
    repository: str = ".",
    base: str = "HEAD",
) -> dict[str, Tool]:
    """The tools by name, bound to `sandbox`; all are asynchronous.

    Args:
        names: unset: all of them (`NAMES`).
        command_seconds: time limit of a command or a Python program; the sandbox's own limits
            apply, too.
        repository: the directory of `git_diff`.
        base: the commit to compare with: a full id, or HEAD.
    """
    bound = _Bound(sandbox, command_seconds, repository, base)
    functions = {name: getattr(bound, name, partial(bound.text, name)) for name in NAMES}
    wanted = NAMES if names is None else tuple(names)
    unknown = [name for name in wanted if name not in functions]
    if unknown:
        raise ValueError(f"There is no tool {unknown[0]!r}; there are: {', '.join(functions)}.")
    return toolbox(
        *(
            Tool(description(name, command_seconds), functions[name], MAX_CHARACTERS)
            for name in wanted
        )
    )


async def read_patch(
    sandbox: Sandbox,
    *,
    repository: str = ".",
    base: str = "HEAD",
    max_bytes: int = MAX_PATCH_BYTES,
) -> bytes:
    """Returns the changes since `base` as a patch for `git apply`; empty if there are none.

    New files are included, except those that .gitignore names, temporary files of programs (byte
    code), repositories in the repository, and files over `max_bytes`. Renamed files are deleted and
    created. Nothing planted in the repository has any influence. Raises ToolError: there is no
    repository or no such commit, or the patch is longer.
    """
    return (await _patch(sandbox, repository, base, max_bytes))[0]


async def _patch(
    sandbox: Sandbox, repository: str, base: str, max_bytes: int
) -> tuple[bytes, list[str]]:
    arguments = {"repository": repository, "base": base, "most": max_bytes}
    answer = await _ask(sandbox, "git_patch", **arguments)
    names = answer.get("left_out")
    left_out = [str(name) for name in names] if isinstance(names, list) else []
    if "file" not in answer:
        return str(answer.get("patch", "")).encode("latin-1", "replace"), left_out
    name = str(answer["file"])
    try:
        return await sandbox.read(name, max_bytes), left_out
    except InputError as error:
        raise ToolError(f"the patch cannot be read: {error}") from error
    finally:
        await sandbox.exec(["rm", "-f", "--", name])


class _Bound:
    def __init__(self, sandbox: Sandbox, seconds: int, repository: str, base: str) -> None:
        self._sandbox, self._seconds = sandbox, seconds
        self._repository, self._base = repository, base

    async def run_cmd(self, cmd: list[str], timeout: float | None = None) -> str:
        request = _request("run_command", argv=cmd, seconds=timeout or self._seconds)
        return _said(await _run(self._sandbox, request))

    async def bash(self, command: str, timeout: float | None = None) -> str:
        return await self.run_cmd(["bash", "-c", command], timeout)

    async def python(self, code: str, timeout: float | None = None) -> str:
        result = await self._sandbox.run_python(
            _PYTHON.format(code=code), limits=_only_seconds(timeout or self._seconds)
        )
        output = result.stdout + result.stderr
        head, tail = output[:_HEAD_BYTES], output[_HEAD_BYTES:][-_HEAD_BYTES:]
        cut = len(output) - len(head) - len(tail)
        end = "\n[cut: it said more]" if result.truncated else ""
        return _end_of(result) + _joined(head, cut, tail) + end

    async def git_diff(self) -> str:
        patch, left_out = await _patch(self._sandbox, self._repository, self._base, MAX_PATCH_BYTES)
        text = patch[:_SHOWN_PATCH_BYTES].decode("utf-8", "replace")
        if len(patch) > _SHOWN_PATCH_BYTES:
            text += f"\n[cut: the patch has {len(patch)} bytes]\n"
        if left_out:
            text += f"[left out: {', '.join(left_out[:20])}{' ...' * (len(left_out) > 20)}]\n"
        return text or "[nothing has changed]"

    async def text(self, tool: str, **arguments: Any) -> str:
        return str((await _ask(self._sandbox, tool, **arguments)).get("text"))


_HEAD_BYTES = 5000
_PYTHON = (
    "import sys\nsys.path.insert(0, '')\n"
    "exec(compile({code!r}, '<python>', 'exec'), {{'__name__': '__main__'}})"
)


def _only_seconds(seconds: float) -> SandboxLimits:
    """The sandbox's own limits hold for the rest."""
    most = 2**31
    return SandboxLimits(
        wall_seconds=seconds,
        cpu_seconds=most,
        memory_mb=most,
        disk_mb=most,
        inodes=most,
        processes=most,
        open_files=most,
        output_kb=most,
        input_kb=most,
    )


async def _ask(sandbox: Sandbox, tool: str, **arguments: Any) -> Json:
    result = await _run(sandbox, _request(tool, **arguments))
    answer = _decoded(result)
    if answer is None:
        said = result.stderr[-300:].decode("utf-8", "replace")
        raise ToolError(f"the tool did not end as it should: {_end_of(result)}{said}")
    return answer


async def _run(sandbox: Sandbox, request: bytes) -> ExecResult:
    try:
        return await sandbox.run_python(_PROGRAM, stdin=request)
    except InputError as error:
        raise ToolError("the arguments are too long.") from error


def _request(tool: str, **arguments: Any) -> bytes:
    return zlib.compress(json.dumps({"tool": tool, "arguments": arguments}).encode(), 1)


def _decoded(result: ExecResult) -> Json | None:
    """None: there is no answer. The model's program may have forged it."""
    if not result.ok:
        return None
    try:
        text = zlib.decompressobj().decompress(result.stdout, _MAX_ANSWER_BYTES)
        answer = json.loads(text)
    except (zlib.error, ValueError, RecursionError):
        return None
    if not isinstance(answer, dict):
        return None
    if "error" in answer:
        raise ToolError(str(answer["error"]))
    return answer


def _said(result: ExecResult) -> str:
    """How a command ended, and its output; the head comes through standard error."""
    answer = _decoded(result)
    if answer is None:
        rest = "\n[what it said after that is lost]" * (len(result.stderr) >= _HEAD_BYTES)
        return _end_of(result) + _joined(result.stderr[:_HEAD_BYTES], 0, b"") + rest
    status, killed_by = answer.get("status"), answer.get("killed_by")
    cut, tail = answer.get("cut"), str(answer.get("tail", "")).encode("latin-1", "replace")
    ending = _ending(status, killed_by) if isinstance(status, int) else "[it ended]"
    shown = _joined(result.stderr, cut if isinstance(cut, int) else 0, tail)
    return f"{ending}\n{shown}"


def _ending(status: int, killed_by: object) -> str:
    if isinstance(killed_by, str) and killed_by in _LIMITS:
        return f"[killed: {_LIMITS[killed_by]}]"
    return f"[killed by signal {_signal(-status)}]" if status < 0 else f"[exit status {status}]"


_LIMITS = {
    "wall": "it took too long",
    "cpu": "it used too much CPU time",
    "memory": "it used too much memory",
    "disk": "it filled the disk",
    "inodes": "it made too many files",
    "processes": "it started too many processes",
    "output": "it said too much",
}


def _end_of(result: ExecResult) -> str:
    if result.killed_by:
        return f"[killed: {_LIMITS.get(result.killed_by, result.killed_by)}]\n"
    status = -(result.signal or 0) if result.exit is None else result.exit
    return f"{_ending(status, '')}\n"


def _signal(number: int) -> str:
    try:
        return f"{number} ({signal.Signals(number).name})"
    except ValueError:
        return str(number)


def _joined(head: bytes, cut: int, tail: bytes) -> str:
    start, end = head.decode("utf-8", "replace"), tail.decode("utf-8", "replace")
    if not cut:
        return (head + tail).decode("utf-8", "replace")
    return f"{start}\n[cut: {cut} bytes]\n{end}"


def _program() -> str:
    """What runs `envserver_tools.inside.main`, preloaded or from its source. Never looks in the
    workspace."""
    folder = resources.files("envserver_tools.inside")
    sources = {
        f"envserver_tools.inside.{name}".rstrip("."): (
            folder / f"{name or '__init__'}.py"
        ).read_text()
        for name in _MODULES
    }
    return f"SOURCES = {sources!r}\n{_BOOTSTRAP}"


_BOOTSTRAP = """
import sys, types
if "envserver_tools.inside" not in sys.modules:
    for name in ("envserver_tools", "envserver_tools.inside"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    for name, source in SOURCES.items():
        module = sys.modules.setdefault(name, types.ModuleType(name))
        module.__package__ = "envserver_tools.inside"
        exec(compile(source, name, "exec"), module.__dict__)
sys.modules["envserver_tools.inside"].main()
"""
_PROGRAM = _program()
"""Read now: a worker in a sandbox does not see these files."""


# File tools of an agent whose own process is in a sandbox already: they work in its current
# directory by the same code (`inside`), which refuses paths that lead out of it, also by links,
# writes to links, devices and git's files, and contents over a megabyte.

_IN_A_FOLDER = {
    "read_file": "read_file",
    "write_file": "write_file",
    "append_to_file": "append_file",
}
"""A tool's name, and what carries it out."""


def folder_tools() -> dict[str, Tool]:
    """Returns `read_file`, `write_file` and `append_to_file` for the current directory."""
    return toolbox(*(_folder_tool(*names) for names in _IN_A_FOLDER.items()))


def _folder_tool(name: str, implementation: str) -> Tool:
    described = description(implementation, command_seconds=0)
    function = {**described["function"], "name": name}
    run = partial(_run_here, implementation)
    return Tool({**described, "function": function}, run, inside.MAX_CHARACTERS + 100)


def _run_here(implementation: str, **arguments: Any) -> str:
    answer = inside.answer_to(implementation, arguments)
    if "error" in answer:
        raise ToolError(str(answer["error"]))
    return str(answer["text"])
