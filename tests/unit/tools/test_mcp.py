"""MCP both ways, with the official package: its servers are our tools, its client calls ours."""

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import support
from envserver_records.tasks import Json
from support.cases import cases_of
from support.serving import serving

import envserver
from envserver import (
    AgentError,
    Caller,
    ConfigError,
    McpServer,
    ServiceError,
    Task,
    ToolError,
    tool,
)
from envserver.tools.calling import use_tool
from envserver.tools.loop import open_tools
from envserver.tools.mcp_client import connect
from envserver.tools.mcp_server import serve_tools

CASES = cases_of(__file__)

PROGRAM = Path(support.__file__).with_name("mcp_example.py")
COMMAND = ("python", str(PROGRAM))
EXAMPLE = McpServer(command=COMMAND, env={"EXAMPLE_KEY": "a-${EXAMPLE_PART}"})


class Run:
    """A rollout without a server; `services` answer in its place."""

    def __init__(self, services: Any = None) -> None:
        self.services = services or {}

    async def call_tool(self, name: str, arguments: Json) -> Any:
        caller = Caller("r0", "g0", Task("t", {}, {}), flag=print)
        return await self.services[name](arguments, caller)


async def told(tools: Any, name: str, **arguments: Any) -> str:
    return (await use_tool(tools, name, arguments)).text


@pytest.fixture
async def opened(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    monkeypatch.setenv("EXAMPLE_PART", "part")
    async with open_tools([EXAMPLE], Run()) as tools:  # type: ignore[arg-type]
        yield tools


async def test_a_servers_tools_are_the_environments(opened: Any) -> None:
    assert list(opened) == ["add", "notes_add", "key", "divide", "crash", "sleep"]
    add = opened["add"].description["function"]
    assert add["description"] == "Add two numbers."
    assert add["parameters"]["required"] == ["a", "b"]
    assert await told(opened, "add", a=1, b=2) == "3"
    assert await told(opened, "key") == "a-part"
    assert (await told(opened, "add", a="x", b=2)).startswith(
        "Error: the arguments of add are not valid: 'x' is not of type 'integer'"
    )
    assert "division by zero" in await told(opened, "divide", a=1, b=0)
    noted = await told(opened, "notes_add", text="x")
    assert noted.split()[2] == str(os.getpid())
    with pytest.raises(ServiceError, match="The MCP server 'mcp' failed: "):
        await told(opened, "crash")


@pytest.mark.parametrize(
    ("server", "told"),
    [
        ({"command": ["/no/such/program"]}, "cannot be started"),
        ({"command": COMMAND, "env": {"A": "${NOT_SET_ANYWHERE}"}}, "needs the variable 'NOT_SET"),
        ({"command": COMMAND, "only": ["fly"]}, "has no tool fly; it has: add, notes.add"),
        # Only a command of each rollout can be in a sandbox.
        ({"in_sandbox": True, "command": COMMAND, "shared": True}, "cannot run in a sandbox"),
    ],
)
async def test_a_server_that_is_not_set_up_well_is_told(server: Json, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        async with connect(McpServer(**server)) as connection:
            await connection.describe()


@pytest.mark.thorough
async def test_a_server_that_does_not_answer_fails_the_rollout() -> None:
    async with connect(McpServer(command=COMMAND, timeout_seconds=0.2)) as connection:
        with pytest.raises(ServiceError, match=r"no answer within 0\.2 seconds"):
            await connection.call("sleep", {})
    with pytest.raises(KeyError, match="mine"):  # what the rollout raises passes as it is
        async with open_tools([McpServer(command=COMMAND)], Run()):  # type: ignore[arg-type]
            raise KeyError("mine")


@tool
async def shout(text: str, times: int = 1) -> str:
    """Shouts.

    Args:
        text: what.
    """
    if not text:
        raise ToolError("there is nothing to shout.")
    return text.upper() * times


@tool
def broken() -> str:
    """Fails."""
    raise KeyError("k")


async def test_the_official_client_lists_and_calls_our_tools() -> None:
    from mcp import Client  # more than a second of CPU, in each process that collects the tests

    seen: list[bool] = []
    on_result = lambda result: seen.append(result.ok)  # noqa: E731 - one line
    async with serve_tools({"shout": shout}, on_result) as url, Client(url) as client:
        (listed,) = (await client.list_tools()).tools
        assert (listed.name, listed.description) == ("shout", "Shouts.")
        assert listed.input_schema == shout.description["function"]["parameters"]
        arguments: list[Json] = [{"text": "a", "times": 2}, {"text": 1}, {"text": ""}]
        answers = [await client.call_tool("shout", one) for one in arguments]
        answers.append(await client.call_tool("fly", {}))
        assert not (await client.list_resources()).resources
        assert not (await client.list_resource_templates()).resource_templates
        assert not (await client.list_prompts()).prompts
        # Only who knows the secret path is served.
        with pytest.raises(Exception):  # noqa: B017 - a kind of the package's own
            async with Client(url.replace("/mcp", "x/mcp")) as stranger:
                await stranger.list_tools()
    good, bad, refused, _ = (one.content[0].text for one in answers)  # type: ignore[union-attr]
    assert good == "AA"
    assert "Expected `str`, got `int` - at `text`" in bad
    assert refused == "Error: there is nothing to shout."
    assert [not one.is_error for one in answers] == seen == [True, False, False, False]
    with pytest.raises(AgentError, match="The tool 'broken' raised KeyError"):  # a bug
        async with serve_tools({"broken": broken}) as url, Client(url) as client:
            with pytest.raises(Exception):  # noqa: B017 - the agent hides it
                await client.call_tool("broken", {})


async def test_a_server_over_http_gets_its_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXAMPLE_KEY", "k")
    from support import mcp_example

    app = mcp_example.server.streamable_http_app()
    async with app.router.lifespan_context(app), serving(app) as url:
        server = McpServer(url=f"{url}/mcp", headers={"x-key": "${EXAMPLE_KEY}-header"})
        async with open_tools([server], Run()) as tools:  # type: ignore[arg-type]
            assert await told(tools, "key") == "k-header"
    with pytest.raises(ServiceError, match="cannot be reached"):
        async with connect(server):
            pass


ENVIRONMENT = CASES["environment"]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["Both", "Sandboxed"])
def test_rollouts_use_servers_and_serve_agents(tmp_path: Path, kind: str) -> None:
    # A sandbox sees installed packages, and no file of this folder: the program is an argument.
    command = ["python", "-c", PROGRAM.read_text()]
    (tmp_path / "both.py").write_text(ENVIRONMENT.replace("COMMAND", repr(command)))
    env, sim = {"total_steps": 1, "group_size": 2}, {"solve_probability": 1.0, "openers": False}
    made = envserver.process(f"{tmp_path}/both.py:{kind}", model="sim", env=env, sim=sim)
    rollouts = made.groups[0].trajectories
    assert [one.score.reward for one in rollouts] == [1.0, 1.0]
    for one in rollouts:  # a server of its own, started by its worker
        assert one.output["noted"][0].split()[::2] == ["x", str(one.output["worker"])]
    shared = sorted(one.output["noted"][1].split() for one in rollouts)
    assert [notes for notes, _, _ in shared] == ["x", "x,x"]  # one server, started by the server
    assert {parent for _, _, parent in shared} == {str(os.getpid())}


@pytest.mark.thorough
def test_a_pooled_environment_runs_a_server_in_a_sandbox(tmp_path: Path) -> None:
    command = ["python3", "-c", PROGRAM.read_text()]
    (tmp_path / "both.py").write_text(ENVIRONMENT.replace("COMMAND", repr(command)))
    one = {"total_steps": 1, "group_size": 1}
    made = envserver.process(f"{tmp_path}/both.py:Boxed", model="sim", env=one)
    (trajectory,) = made.groups[0].trajectories
    output = trajectory.output
    notes = [note.split() for note in output["notes"]]
    assert [note[0] for note in notes] == ["x", "x,y"]  # one program, which remembers
    assert notes[0][2] == "1"  # its parent is process 1 of its own namespace
    assert output["key"] == "k-part"
    assert "Its program ended (exit 3)" in output["crash"]
    assert "(exit 1): no such module" in output["broken"]
    assert trajectory.usage.sandbox is not None and trajectory.usage.sandbox.executions == 2
