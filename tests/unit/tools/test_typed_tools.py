"""`@tool`: from a typed function to a schema, checked arguments, and results that a model reads.

And the loop that calls tools, and tools that run in the server, with a task's hidden part and keys.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import envserver_environments
import envserver_factory
import envserver_tools
import msgspec
import pytest
from envserver_records.tasks import Json
from envserver_tools.inside.files import Refused, edit, read_file
from envserver_tools.loop import LoopEnd, chat_with_tools
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from support.cases import cases_of
from support.extent import examples

import envserver
from envserver import AgentError, Caller, Environment, Score, Task, Tool, ToolError, tool
from envserver.environment import tools_of
from envserver.tools.calling import call_tool, function_tool, toolbox
from envserver.tools.serving import server_tools

CASES = cases_of(__file__)

README = Path(envserver.__file__).parent / "tools" / "README.md"


ONE = {"total_steps": 1, "group_size": 1}
ALWAYS = {"solve_probability": 1.0, "openers": False}


class Unit(Enum):
    metre = "m"
    mile = "mi"


@dataclass
class Place:
    """A place on the map."""

    x: float
    y: float = 0.0


class Node(msgspec.Struct):
    label: str
    children: list[Node] = []


@tool
def measure(
    start: Place,
    unit: Unit = Unit.metre,
    way: Literal["road", "air"] = "road",
    stops: list[Place] | None = None,
    most: Annotated[int, "how far, at most", msgspec.Meta(ge=1)] = 9,
) -> Json:
    """Measures a way.

    It takes the shortest one.

    Args:
        start (Place): where it begins,
            which may be anywhere.
        unit: of the result.

    Returns:
        The length.

    Raises:
        ToolError: there is no way.
    """
    if start.x < 0:
        raise ToolError("there is no way from there.")
    return {"length": start.x + start.y, "unit": unit.value, "stops": len(stops or [])}


def call(name: str, arguments: Any) -> Json:
    return {"id": name, "function": {"name": name, "arguments": json.dumps(arguments)}}


async def answer(one: Tool, arguments: Any) -> str:
    return (await call_tool(toolbox(one), call(one.name, arguments))).text


def test_the_schema_comes_from_types_and_docstring() -> None:
    expected = cases_of(__file__, "measure.json")
    assert measure.description["function"] == expected


_TYPES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (str, st.text()),
    (int, st.integers(-(2**63), 2**64 - 1)),
    (float, st.floats(allow_nan=False, allow_infinity=False)),
    (bool, st.booleans()),
    (Literal["a", "b"], st.sampled_from(["a", "b"])),
    (Unit, st.sampled_from(Unit)),
    (list[int] | None, st.none() | st.lists(st.integers(0, 9))),
    (dict[str, list[str]], st.dictionaries(st.text(), st.lists(st.text()))),
    (Place, st.builds(Place, st.floats(0, 9), st.floats(0, 9))),
    (Node, st.builds(Node, st.text(), st.lists(st.builds(Node, st.text()), max_size=2))),
]


@settings(max_examples=examples(200))
@given(st.data())
def test_what_fits_the_types_fits_the_schema_and_comes_back(data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(_TYPES), min_size=1, max_size=4))
    space: Json = {f"t{number}": type_ for number, (type_, _) in enumerate(chosen)}
    parameters = ", ".join(f"a{number}: t{number}" for number in range(len(chosen)))
    exec(f"def made({parameters}):\n    'Does nothing.'\n    return locals()", space)
    made = tool(space["made"])
    values = {f"a{number}": data.draw(values) for number, (_, values) in enumerate(chosen)}
    sent = json.loads(msgspec.json.encode(values))
    Draft202012Validator(made.description["function"]["parameters"]).validate(sent)
    assert made(**made.checked(sent)) == values


@pytest.mark.parametrize(("arguments", "told"), CASES["wrong_calls"])
async def test_a_wrong_call_is_told_to_the_model(arguments: Any, told: str) -> None:
    text = await answer(measure, arguments)
    assert text.startswith("Error: ")
    assert told in text


async def test_results_are_texts_or_json() -> None:
    found = json.loads(await answer(measure, {"start": {"x": 1}, "stops": [{"x": 2}]}))
    assert found == {"length": 1.0, "unit": "m", "stops": 1}

    @tool(name="wait", max_characters=3)
    async def waits() -> str:
        """Waits."""
        await asyncio.sleep(0)
        return "12345"

    assert (waits.name, await answer(waits, {})) == ("wait", "123\n[cut: the result is longer]")

    @tool
    def look(name: str) -> str:
        """Looks."""
        return {"a": "b"}[name]

    with pytest.raises(AgentError, match=r"The tool 'look' raised KeyError: 'c'"):
        await answer(look, {"name": "c"})


def _untyped(a) -> str:  # type: ignore[no-untyped-def]
    """Does."""


def _bare(a: int) -> str: ...


def _unheld(a: asyncio.Event) -> str:
    """Does."""


def test_a_function_that_cannot_be_a_tool_is_refused() -> None:
    refused: dict[Any, str] = {
        _untyped: "'a' .* needs a type",
        _bare: "needs a docstring",
        _unheld: "JSON cannot hold",
    }
    for function, told in refused.items():
        with pytest.raises(TypeError, match=told):
            tool(function)


# The loop -----------------------------------------------------------------------------------------


class Run:
    """A rollout whose model says what is listed, and calls tools by name or with arguments."""

    def __init__(self, *replies: tuple[str, list[Any]], cut_off: bool = False) -> None:
        self.max_turns = 20
        self.metrics: dict[str, float] = {}
        self._replies = iter(replies)
        self._reason = "length" if cut_off else "stop"

    async def chat(self, messages: list[Any], tools: list[Any]) -> Any:
        text, calls = next(self._replies)
        message = {"role": "assistant", "content": text}
        calls = [call(one, {}) if isinstance(one, str) else one for one in calls]
        return SimpleNamespace(
            content=text, tool_calls=calls, finish_reason=self._reason, message=message
        )

    def log_metric(self, name: str, value: float) -> None:
        self.metrics[name] = value


async def _fails() -> str:
    raise ToolError("it fails")


TOOLS = toolbox(
    Tool(function_tool("look", "Looks.", {}), lambda: "seen"),
    Tool(function_tool("fail", "Fails.", {}), _fails),
    Tool(function_tool("finish", "Ends.", {}), lambda: "done"),
)


async def _loop(run: Run, **options: Any) -> tuple[LoopEnd, list[Any]]:
    messages: list[Any] = [{"role": "user", "content": "Go."}]
    end = await chat_with_tools(run, messages, TOOLS, final="finish", **options)  # type: ignore[arg-type]
    return end, messages


async def test_the_final_tool_ends_the_loop_and_later_calls_are_not_run() -> None:
    run = Run(("first", ["look"]), ("", ["finish", "fail"]))
    end, messages = await _loop(run)
    assert end == LoopEnd("final_tool", "", "first", "done")
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    assert run.metrics == {"tool_errors": 0}


async def test_a_text_without_calls_ends_the_loop_unless_there_is_a_reminder() -> None:
    assert (await _loop(Run(("answer", []))))[0].reason == "text"
    reminders = {"hm": "Call a tool.", "answer": None}
    end, messages = await _loop(Run(("hm", []), ("answer", [])), reminder=reminders.get)
    assert end.text == "answer"
    assert messages[2] == {"role": "user", "content": "Call a tool."}


async def test_a_message_that_was_cut_off_runs_no_call() -> None:
    end, messages = await _loop(Run(("half", ["finish"]), cut_off=True))
    assert (end.reason, end.result, len(messages)) == ("cut_off", None, 2)


@pytest.mark.parametrize(("in_a_row", "errors"), [(False, 2), (True, 3)])
async def test_too_many_errors_end_the_loop(in_a_row: bool, errors: int) -> None:
    run = Run(("", ["fail"]), ("", ["look"]), ("", ["fail"]), ("", ["fail"]))
    end, _ = await _loop(run, max_tool_errors=2, errors_in_a_row=in_a_row)
    assert (end.reason, run.metrics["tool_errors"]) == ("limit", errors)


async def test_the_smaller_limit_of_turns_counts() -> None:
    end, messages = await _loop(Run(*[("", ["look"])] * 5), max_turns=2)
    assert (end.reason, len(messages)) == ("limit", 5)


async def test_parallel_calls_meet_and_their_results_are_in_order() -> None:
    both = asyncio.Barrier(2)
    done: list[str] = []

    @tool(parallel=True)
    async def meet(name: str) -> str:
        """Waits for the other."""
        await both.wait()
        return name

    @tool
    async def note(name: str) -> str:
        """Notes."""
        done.append(name)
        await asyncio.sleep(0)
        return f"{name} of {len(done)}"

    asked = {"a": "meet", "b": "meet", "c": "note", "d": "note"}
    calls = [call(one, {"name": name}) for name, one in asked.items()]
    messages: list[Any] = []
    end = await chat_with_tools(Run(("", calls), ("", [])), messages, [meet, note])  # type: ignore[arg-type]
    assert end.reason == "text"
    told = [one["content"] for one in messages if one["role"] == "tool"]
    assert told == ["a", "b", "c of 1", "d of 2"]


PLAYED = CASES["played"]


def _example() -> str:
    return README.read_text().split("```python\n")[1].split("```")[0]


def test_the_example_of_the_readme_is_short_and_works(tmp_path: Path) -> None:
    assert len(_example().splitlines()) < 40
    (tmp_path / "shop.py").write_text(_example() + PLAYED)
    made = envserver.process(f"{tmp_path}/shop.py:Played", model="sim", env=ONE, sim=ALWAYS)
    (trajectory,) = made.groups[0].trajectories
    told = [one["content"] for one in trajectory.messages if one["role"] == "tool"]
    assert told == ["3", "8", "Error: there is no fig; there are: apple, pear."]
    assert (trajectory.score.reward, trajectory.metrics["tool_errors"]) == (1.0, 1.0)


# In the server ------------------------------------------------------------------------------------

VAULT = CASES["vault"]


def test_a_tool_on_the_server_knows_what_the_worker_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VAULT_KEY", "-k3y")
    (tmp_path / "vault.py").write_text(VAULT)
    made = envserver.process(f"{tmp_path}/vault.py:Vault", model="sim", env=ONE, sim=ALWAYS)
    output = made.groups[0].trajectories[0].output
    assert output["told"] == [
        f"a{os.getpid()}-k3y",
        "Error: there is no letter 9.",
        "Error: the arguments of letter are not valid: Expected `int`, got `str` - at `place`.",
    ]
    assert output["worker"] != os.getpid() and output["key"] is None


@pytest.mark.thorough
def test_its_bug_is_told_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VAULT_KEY", "")
    (tmp_path / "vault.py").write_text(VAULT)
    with pytest.raises(envserver.EnvserverError) as told:
        envserver.process(f"{tmp_path}/vault.py:Broken", model="sim", env=ONE, sim=ALWAYS)
    assert "The tool 'broken' raised KeyError in the server" in str(told.value)
    assert "vault.py:" in str(told.value) and "amber" not in str(told.value)


def test_the_model_does_not_see_the_caller_and_listed_methods_are_bound() -> None:
    class Shown(Environment):
        def tasks(self, split: str) -> Any: ...

        @tool
        def own(self) -> str:
            """Returns its class."""
            return type(self).__name__

        @tool(on_server=True)
        def look(self, name: str, caller: Caller) -> str:
            """Looks."""
            raise ToolError(f"{name} {caller}")

        tools = [own, len]

        async def rollout(self, task: Any, run: Any) -> None: ...

        def score(self, task: Task, result: object) -> Score:
            return Score(reward=0.0)

    own, other = tools_of(Shown())
    assert (own(), other) == ("Shown", len)  # type: ignore[operator]
    assert [one.name for one in server_tools(Shown())] == ["look"]

    assert list(Shown.look.description["function"]["parameters"]["properties"]) == ["name"]


@pytest.mark.parametrize("package", [envserver_environments, envserver_tools, envserver_factory])
def test_every_public_name_is_there_and_no_other(package: object) -> None:
    for name in package.__all__:  # type: ignore[attr-defined]
        assert getattr(package, name).__doc__ or isinstance(getattr(package, name), tuple | str)
    with pytest.raises(AttributeError, match="no attribute 'Missing'"):
        _ = package.Missing  # type: ignore[attr-defined]


def test_the_packages_import_nothing_heavy() -> None:
    code = "import sys, envserver_environments, envserver_tools; print('envserver' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


# Reading and editing files, as the functions inside a sandbox do it, for any text -----------------


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory that this process is in, as programs of a sandbox are in /work."""
    before, place = Path.cwd(), tmp_path_factory.mktemp("work")
    os.chdir(place)
    yield place
    os.chdir(before)


TEXTS = st.text(st.sampled_from("ab\n\ré\t"), max_size=60)


@settings(max_examples=examples(150), deadline=None)
@given(text=TEXTS, lines=st.integers(1, 9))
def test_pages_put_together_are_the_file(workspace: Path, text: str, lines: int) -> None:
    Path("page").write_bytes(text.encode())
    whole, start = [], 1
    while text:
        page = read_file("page", start, lines)["text"].split("\n")
        footer = page.pop() if page[-1].startswith("[") else ""
        whole += [line.partition("\t")[2] for line in page]
        assert len(page) <= lines
        if not footer:
            break
        start += len(page)
        assert footer.endswith(f"go on with start={start}]")
    assert "\n".join(whole) == text.removesuffix("\n")


@settings(max_examples=examples(150), deadline=None)
@given(text=TEXTS, old=st.text(st.sampled_from("ab\n"), min_size=1, max_size=3), new=TEXTS)
def test_an_edit_is_replacement_or_nothing(workspace: Path, text: str, old: str, new: str) -> None:
    Path("edited").write_bytes(text.encode())
    count = sum(text.startswith(old, at) for at in range(len(text)))
    if count == 1 and old != new:
        edit("edited", old, new)
        text = text.replace(old, new)
    else:
        with pytest.raises(Refused, match="same" if old == new else f"occurs {count} times"):
            edit("edited", old, new)
    assert Path("edited").read_bytes() == text.encode()
