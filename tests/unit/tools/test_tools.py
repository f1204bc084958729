"""Tools in a sandbox: what a model gets to see of files, commands and changes."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from envserver_tools.calling import (
    ToolError,
    ToolResult,
    call_tool,
    descriptions,
    run_tool_call,
    use_tool,
)
from envserver_tools.sandboxed import PRELOAD, read_patch, sandbox_tools
from support.cases import cases_of
from support.sandboxes import sandboxes

from envserver import ConfigError, Sandbox, Sandboxes, SandboxLimits, SandboxSpec

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMITS = SandboxLimits(wall_seconds=200.0, cpu_seconds=20.0, processes=64)


class Bench:
    """A sandbox and its tools, called as a model calls them."""

    def __init__(self, sandbox: Sandbox, **options: Any) -> None:
        self.sandbox = sandbox
        self.tools = sandbox_tools(sandbox, **options)

    async def __call__(self, name: str, **arguments: Any) -> str:
        """The text of a call that must be in order."""
        result = await self.result(name, **arguments)
        assert result.ok, result.text
        return result.text

    async def refused(self, name: str, **arguments: Any) -> str:
        """The text of a call that must not be."""
        result = await self.result(name, **arguments)
        assert not result.ok, result.text
        assert result.text.startswith("Error: ")
        return result.text

    async def result(self, name: str, **arguments: Any) -> ToolResult:
        return await use_tool(self.tools, name, arguments)

    async def sh(self, script: str) -> str:
        """What a script says that must end well."""
        done = await self.sandbox.exec(["bash", "-euc", script])
        assert done.ok, done.stderr + done.stdout
        return done.stdout.decode(errors="replace")


Open = Callable[..., AbstractAsyncContextManager[Bench]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Open]:
    """Opens a sandbox with its tools; the service of each backend is made when it is asked for."""
    houses: dict[str, Sandboxes] = {}
    async with AsyncExitStack() as stack:

        @asynccontextmanager
        async def open_bench(
            backend: str = "namespace", preload: tuple[str, ...] = PRELOAD, **options: Any
        ) -> AsyncIterator[Bench]:
            if backend not in houses:
                try:
                    houses[backend] = await stack.enter_async_context(sandboxes(backend))
                except ConfigError as error:
                    pytest.skip(str(error))
            async with houses[backend].open(SandboxSpec(preload=preload, limits=LIMITS)) as sandbox:
                yield Bench(sandbox, **options)

        yield open_bench


@pytest.mark.parametrize(
    ("backend", "preload"),
    [("namespace", PRELOAD), ("namespace", ()), ("landlock", PRELOAD), ("unsafe-local", PRELOAD)],
)
async def test_a_file_is_made_read_changed_and_found(
    bench: Open, backend: str, preload: tuple[str, ...]
) -> None:
    async with bench(backend, preload) as use:
        assert await use("list_dir") == "[the directory is empty]"
        text = await use("write_file", path="src/a.py", content="x = 1\ny = 2\nx = 1\n")
        assert text == "Made src/a.py: 18 bytes, 3 lines."
        assert await use("read_file", path="/work/src/a.py", start=2, lines=1) == (
            "     2\ty = 2\n[1 more line; go on with start=3]"
        )
        assert await use("edit", path="src/a.py", old="y = 2", new="y = 3\nz = 4") == (
            "Replaced the one occurrence in src/a.py, now at lines 2 to 3."
        )
        await use("append_file", path="src/a.py", content="end")
        assert await use("grep", pattern=r"= \d", glob="src/**/*.py", max=3) == (
            "src/a.py:1: x = 1\nsrc/a.py:2: y = 3\nsrc/a.py:3: z = 4\n"
            "[cut: the first 3 lines, there are more]"
        )
        assert await use("list_dir", depth=2) == "src/\nsrc/a.py  27 bytes"
        assert await use("run_cmd", cmd=["cat", "src/a.py"]) == (
            "[exit status 0]\nx = 1\ny = 3\nz = 4\nx = 1\nend"
        )
        python = "import sys\nprint(open('src/a.py').read()[-3:], file=sys.stderr)"
        assert await use("python", code=python) == "[exit status 0]\nend\n"


async def test_paths_end_where_the_workspace_ends(bench: Open) -> None:
    async with bench() as use:
        await use.sh(
            "mkdir -p .git/hooks d; echo secret > .git/config; ln -s /etc d/out; ln -s .git g;"
            "ln -s /etc/passwd p; ln -s a loop; ln -s loop a; ln -s inside.txt l;"
            "echo in > inside.txt; ln -s ../../../etc/hostname d/rel; ln -s nowhere dangling;"
            "ln -s /work/../etc/passwd d/tricky"
        )
        for path in (
            "/etc/passwd", "../etc/passwd", "p", "d/out/passwd", "d/rel", "d/tricky",
            "/proc/1/environ", "/workshop", "/", "..", "/dev/zero",
        ):  # fmt: skip
            assert "only paths below /work are allowed" in await use.refused("read_file", path=path)
        assert await use("read_file", path="l") == "     1\tin"
        for path in ("d/out/x", "../x", "/etc/x", "d/out/new/x"):
            said = await use.refused("write_file", path=path, content="x")
            assert "only paths below /work" in said
        for path in (".git/hooks/pre-commit", "g/config", "d/../.git/config", "sub/.GIT/x", ".git"):
            for name in ("write_file", "append_file"):
                assert ".git cannot be written" in await use.refused(name, path=path, content="x")
        assert ".git cannot" in await use.refused("edit", path=".git/config", old="secret", new="x")
        for path in ("p", "l", "loop", "dangling"):
            assert "is a link" in await use.refused("write_file", path=path, content="x")
        for path in ("d", "d/", ".", "new/", ".."):
            assert (await use.refused("write_file", path=path, content="x")).startswith("Error: ")
        for name, more in (("list_dir", {}), ("grep", {"pattern": "root"})):
            said = await use.refused(name, path="d/out", **more)
            assert "only paths below /work" in said
        assert await use("grep", pattern=".") == "inside.txt:1: in"  # links and .git are left out
        assert await use.sh("cat .git/config inside.txt; ls") == (
            "secret\nin\na\nd\ndangling\ng\ninside.txt\nl\nloop\np\n"
        )


async def test_strange_files_are_named_and_never_waited_for(bench: Open) -> None:
    async with bench() as use:
        await use.sh(
            "mkfifo fifo; mkdir dir; head -c 100000 /dev/zero > zeros; truncate -s 60M sparse;"
            "printf 'caf\\351\\n' > latin; : > empty; printf 'a\\nb' > noend;"
            "echo x > $'new\\nline'; echo y > $'bad\\377'; echo z > secret; chmod 000 secret"
        )
        for path, words in (
            ("fifo", "is a FIFO"),
            ("dir", "is a directory"),
            ("secret", "Permission denied"),
            ("empty/x", "Not a directory"),
            ("nul\0", "null"),
            ("half\udc80" + "\ud800", "Error"),
        ):
            assert words in await use.refused("read_file", path=path)
        for name in ("write_file", "append_file"):
            assert "is a FIFO" in await use.refused(name, path="fifo", content="x")
        assert "is a FIFO" in await use.refused("edit", path="fifo", old="x", new="y")
        assert await use("read_file", path="zeros") == "[binary file, 100000 bytes]"
        assert await use("read_file", path="sparse") == f"[binary file, {60 * 2**20} bytes]"
        assert await use("read_file", path="latin") == "     1\tcaf\ufffd"
        await use.sh("chmod 751 latin")
        await use("edit", path="latin", old="ca", new="né")
        assert await use.sandbox.read("latin") == b"n\xc3\xa9f\xe9\n"  # the rest is as it was
        assert await use.sh("stat -c %a latin") == "751\n"
        assert await use("read_file", path="empty") == "[the file is empty]"
        assert await use("read_file", path="noend") == "     1\ta\n     2\tb"
        assert "has 2 lines" in await use.refused("read_file", path="noend", start=3)
        found = await use("grep", pattern="^[xyz]")
        assert found.splitlines()[:2] == ["bad\\xff:1: y", "new\\nline:1: x"]
        assert "2 binary" in found and "1 unreadable" in found
        assert "fifo  (FIFO)" in await use("list_dir")


async def test_deep_and_wide_trees_are_cut(bench: Open) -> None:
    async with bench() as use:
        await use.sh("mkdir -p $(printf 'd/%.0s' $(seq 900))")
        await use.sh("mkdir w; cd w; touch $(seq 1000 1999)")
        wide = (await use("list_dir", path="w")).splitlines()
        assert (wide[0], wide[199]) == ("1000  0 bytes", "1199  0 bytes")
        assert wide[200] == "[cut: the first 200 entries; there are more]"
        tree = (await use("list_dir", depth=5)).splitlines()
        assert tree[:5] == ["d/", "d/d/", "d/d/d/", "d/d/d/d/", "d/d/d/d/d/"]
        assert await use("grep", pattern="x") == "[no line matches]"


async def test_long_results_are_cut_and_say_so(bench: Open) -> None:
    async with bench() as use:
        await use(
            "write_file", path="long", content="".join(f"{n} {'é' * 99}\n" for n in range(900))
        )
        text = await use("read_file", path="long", lines=2000)
        assert len(text) < 16_100
        left = 900 - text.count("\n")
        assert text.endswith(f"[{left} more lines; go on with start={901 - left}]")
        await use("write_file", path="wide", content="w" * 900_000)
        wide = await use("read_file", path="wide")
        assert len(wide) < 2100 and wide.endswith("[cut: the line has 900000 bytes]")
        found = await use("grep", pattern="é", max=500)
        assert len(found) < 21_000 and "[cut" in found
        said = await use.refused("write_file", path="x", content="x" * 1_000_001)
        assert "too long" in said and len(said) < 1000
        assert "No such file" in await use.refused("read_file", path="x")


async def test_a_full_disk_leaves_a_file_as_it_was(bench: Open) -> None:
    async with bench() as use:
        await use("write_file", path="a", content="before\n")
        done = await use.sandbox.exec(["sh", "-c", "cat /dev/zero > fill"])
        assert not done.ok
        left = "x" * 900_000
        for name in ("write_file", "append_file"):
            said = await use.refused(name, path="a", content=left)
            assert said == "Error: a: No space left on device."
        assert await use.sandbox.read("a") == b"before\n"
        assert await use.sh("ls -A") == "a\nfill\n"


async def test_a_command_shows_head_and_tail_and_how_it_ended(bench: Open) -> None:
    async with bench(command_seconds=30) as use:
        said = await use("bash", command="echo out; echo err >&2; echo out; exit 3")
        assert said == "[exit status 3]\nout\nerr\nout\n"
        assert await use("run_cmd", cmd=["printf", "%s|", "$HOME", "a b"]) == (
            "[exit status 0]\n$HOME|a b|"
        )
        assert "cannot be started" in await use.refused("run_cmd", cmd=["no-such-program"])
        said = await use("bash", command="sleep 100 & seq 1 1000000")
        assert said.startswith("[exit status 0]\n1\n2\n") and said.endswith("999999\n1000000\n")
        assert f"[cut: {6_888_896 - 10_000} bytes]" in said and len(said) < 10_100
        said = await use("bash", command="echo first; sleep 60; echo never", timeout=3)
        assert said == "[killed: it took too long]\nfirst\n"
        assert await use("bash", command="kill -SEGV $$") == "[killed by signal 11 (SIGSEGV)]\n"
        assert (await use("bash", command="yes", timeout=3)).startswith("[killed: it ")
        assert await use("bash", command="cat; echo end") == "[exit status 0]\nend\n"  # no input
        assert await use.sh("ps ax 2>/dev/null | grep -c '[s]leep' || true") == "0\n"
        assert "less than or equal to 30" in await use.refused(
            "bash", command="true", timeout=60
        ) or ("maximum of 30" in await use.refused("bash", command="true", timeout=60))


async def test_what_a_killed_command_said_is_shown(bench: Open) -> None:
    """And a program that answers for the tool is no harm."""
    forge = "for f in /proc/$PPID/fd/1; do head -c 100 /dev/urandom > $f; done; echo said; sleep 1"
    async with bench() as use:
        assert "said" in await use("bash", command=forge)
        hungry = "import sys\nprint('first', flush=True)\nx = [b'x' * 10**6 for _ in range(10**5)]"
        await use("write_file", path="hungry.py", content=hungry)
        said = await use("run_cmd", cmd=["python3", "hungry.py"])
        assert "first\n" in said and ("memory" in said or "MemoryError" in said)
        said = await use("python", code=hungry)
        assert "first\n" in said and ("memory" in said or "MemoryError" in said)


async def test_what_is_planted_in_the_workspace_is_not_run_by_tools(bench: Open) -> None:
    async with bench(preload=()) as use:
        for name in ("json", "zlib", "envserver_tools", "subprocess", "sitecustomize", "secrets"):
            await use("write_file", path=f"{name}.py", content="open('OWNED', 'w')\n")
        await use("write_file", path="envserver_tools/inside.py", content="open('OWNED', 'w')\n")
        await use("read_file", path="json.py")
        await use("run_cmd", cmd=["true"])
        assert "OWNED" not in await use("list_dir")


MAKE = r"""
git init -q repo; cd repo; git config user.email a@b; git config user.name n; mkdir sub dir
printf 'a\nb\nc\n' > text; printf 'no end' > noend; printf '\0\1bin' > bin; echo > run.sh
printf 'x\r\ny\r\n' > crlf; echo old > sub/gone; printf 'r\n1\n2\n3\n' > from; ln -s text link
echo f > fifo; echo d > todir; printf 'caf\351\n' > latin; echo q > 'we"ird	näme'; echo 1 > dir/x
echo t > tolink; echo '*.ign' > .gitignore; git add -A; git commit -qm base; cp -a . ../pristine
"""
CHANGE = r"""
cd repo; printf 'a\nB\nc' > text; printf 'no end!' > noend; head -c 40000 /dev/urandom > bin
chmod +x run.sh; printf 'x\r\nz\r\n' > crlf; rm sub/gone; mv from to; ln -sf noend link
rm fifo; mkfifo fifo; rm todir; mkdir todir; echo in > todir/file; printf 'caf\350\n' > latin
echo r > 'we"ird	näme'; printf 'new\0bin' > newbin; : > empty; echo i > x.ign; mkdir -p deep/er
echo n > deep/er/new.py; chmod +x deep/er/new.py; rm -r dir; echo file > dir; rm tolink
ln -s /etc/passwd tolink; mkfifo other; mkdir __pycache__; echo > __pycache__/a.pyc
printf b > $'bad\377name'; git init -q nested; echo n > nested/n
truncate -s 60M large; mkdir -p $(printf 'd/%.0s' $(seq 900))
"""
PLANT = cases_of(__file__)["plant"]
APPLY = r"""
rm -f /work/.gitconfig; cd /work/pristine; git apply ../the.patch
diff -r --no-dereference -x .git /work/repo . || true
find . -path ./.git -prune -o -type f -perm -100 -printf '%P\n' | sort
"""
NOT_IN_THE_PATCH = {"__pycache__", "d", "fifo", "large", "nested", "other", "sub", "x.ign"}


async def _work(use: Bench) -> str:
    return (await use.sh("pwd")).strip()


@pytest.mark.parametrize("backend", ["namespace", "landlock", "unsafe-local"])
async def test_a_patch_holds_all_changes_whatever_was_planted(bench: Open, backend: str) -> None:
    async with bench(backend, repository="repo") as use:
        await use.sh(MAKE)
        assert await use("git_diff") == "[nothing has changed]"
        await use.sh(CHANGE)
        await use.sh(PLANT.replace("/work", await _work(use)))
        before = await use.sh("cd repo; find .git -type f | sort | xargs sha256sum")
        patch = await read_patch(use.sandbox, repository="repo")
        assert len(patch) > 50_000  # it came by a file, of which nothing is left
        assert "patch" not in await use("list_dir")
        assert "OWNED" not in await use("list_dir")
        assert before == await use.sh("cd repo; find .git -type f | sort | xargs sha256sum")
        await use.sandbox.write("the.patch", patch)
        *left, last = (await use.sh(APPLY.replace("/work", await _work(use)))).split(
            "deep/er/new.py", 1
        )
        only = {line.rpartition(": ")[2] for line in left[0].splitlines() if ": " in line}
        assert only == NOT_IN_THE_PATCH
        assert "differ" not in left[0]
        assert "run.sh" in last.split()
        assert b"deleted file mode" in patch and b"GIT binary patch" in patch
        shown = await use("git_diff")
        end = f"[cut: the patch has {len(patch)} bytes]\n[left out: large, nested/]\n"
        assert shown.endswith(end) and len(shown) < 17_000


async def test_a_patch_starts_where_it_is_told(bench: Open) -> None:
    async with bench() as use:
        await use.sh(
            "git init -q .; git config user.email a@b; git config user.name n; echo 1 > a;"
            "git add a; git commit -qm one"
        )
        base = (await use.sh("git rev-parse HEAD")).strip()
        await use.sh("echo 2 > a; git commit -qam two; echo 3 > b; git add b; git pack-refs --all")
        since_head = await read_patch(use.sandbox)
        assert b"b/b" in since_head and b"a/a" not in since_head
        assert b"+2\n" in await read_patch(use.sandbox, base=base)
        await use.sh(f"git checkout -q --detach; git gc -q; git replace HEAD {base} 2>/dev/null")
        assert await read_patch(use.sandbox) == since_head
        with pytest.raises(ToolError, match="longer than 100 bytes"):
            await read_patch(use.sandbox, base=base, max_bytes=100)
        with pytest.raises(ToolError, match="git failed"):
            await read_patch(use.sandbox, base="1" * 40)
        await use.sh("echo 'ref: refs/heads/../../../etc/passwd' > .git/HEAD")
        assert "HEAD is not a commit" in await use.refused("git_diff")
        await use.sh("rm -rf .git")
        assert "there is no git repository" in await use.refused("git_diff")
        await use.sh(
            "git init -q --object-format=sha256 .; git config user.email a@b;"
            "git config user.name n; echo 1 > a; git add a; git commit -qm one; echo 2 > a"
        )
        assert b"-1\n+2\n" in await read_patch(use.sandbox)


async def test_tools_are_called_in_openai_s_shape(bench: Open) -> None:
    def call(name: str, arguments: Any) -> dict[str, Any]:
        source = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return {"id": "c", "type": "function", "function": {"name": name, "arguments": source}}

    async with bench(names=["read_file", "bash"]) as use:
        described = descriptions(use.tools.values())
        assert [d["function"]["name"] for d in described] == ["read_file", "bash"]
        assert all(d["function"]["parameters"]["additionalProperties"] is False for d in described)
        good = await call_tool(use.tools, call("bash", {"command": "echo hi"}))
        assert good == ToolResult("[exit status 0]\nhi\n", ok=True)
        for name, arguments in (
            ("write_file", {"path": "a", "content": ""}),
            ("bash", '{"command": "ls", "command": "rm"}'),
            ("bash", '{"command": "\\udc80"}'),
            ("read_file", '{"path": ' + "[" * 400 + "]" * 400 + "}"),
        ):
            assert (await call_tool(use.tools, call(name, arguments))).ok is False
        with pytest.raises(TypeError, match="asynchronous"):
            run_tool_call(use.tools, call("bash", {"command": "true"}))
    with pytest.raises(ValueError, match="no tool 'fly'"):
        sandbox_tools(use.sandbox, names=["fly"])


async def test_smolagents_uses_the_same_tools(bench: Open) -> None:
    smolagents = pytest.importorskip("smolagents")
    from envserver_tools.smolagents_adapter import as_smolagents

    async with bench() as use:
        write, bash = as_smolagents(use.tools["write_file"]), as_smolagents(use.tools["bash"])

        class Scripted(smolagents.Model):
            turns = iter(
                ["write_file(path='a', content='from the agent')", "final_answer(bash('cat a', 5))"]
            )

            def generate(self, messages: Any, **_: Any) -> Any:
                text = f"<code>\n{next(self.turns)}\n</code>"
                return smolagents.ChatMessage(role="assistant", content=text)

        agent = smolagents.CodeAgent([write, bash], Scripted(), verbosity_level=0)
        answer = await asyncio.to_thread(agent.run, "Write it.")
        assert answer == "[exit status 0]\nfrom the agent"
        refused = await asyncio.to_thread(lambda: write(path="../x", content=""))
        assert refused.startswith("Error: ../x is outside of /work")
        with pytest.raises(RuntimeError, match="its own thread"):
            bash(command="true")
