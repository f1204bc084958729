"""`@tool`: from a typed function to a schema, checked arguments, and results that a model reads."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from support.extent import examples

import envserver
from envserver import AgentError, Tool, ToolError, tool
from envserver.tools.calling import call_tool, toolbox
from envserver.tools.loop import chat_with_tools

README = Path(envserver.__file__).parent / "tools" / "README.md"


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
) -> dict[str, Any]:
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


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": name, "function": {"name": name, "arguments": json.dumps(arguments)}}


async def answer(one: Tool, arguments: Any) -> str:
    return (await call_tool(toolbox(one), call(one.name, arguments))).text


def test_the_schema_comes_from_types_and_docstring() -> None:
    place = {
        "description": "A place on the map.",
        "type": "object",
        "properties": {"x": {"type": "number"}, "y": {"type": "number", "default": 0.0}},
        "required": ["x"],
    }
    function = measure.description["function"]
    assert function["description"] == (
        "Measures a way.\n\nIt takes the shortest one.\n\nReturns:\n    The length."
    )
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "start": {**place, "description": "where it begins, which may be anywhere."},
            "unit": {"enum": ["m", "mi"], "default": "m", "description": "of the result."},
            "way": {"enum": ["air", "road"], "default": "road"},
            "stops": {
                "anyOf": [{"type": "array", "items": place}, {"type": "null"}],
                "default": None,
            },
            "most": {
                "type": "integer",
                "minimum": 1,
                "default": 9,
                "description": "how far, at most",
            },
        },
        "required": ["start"],
        "additionalProperties": False,
    }


def test_recursive_types_stay_references() -> None:
    @tool
    def count(tree: Node) -> int:
        """Counts nodes."""
        return 1 + sum(map(count, tree.children))

    parameters = count.description["function"]["parameters"]
    nested = {"label": "a", "children": [{"label": "b", "children": [{"label": "c"}]}]}
    assert Draft202012Validator(parameters).is_valid({"tree": nested})
    assert not Draft202012Validator(parameters).is_valid({"tree": {"label": "a", "children": [1]}})
    assert count(**count.checked({"tree": nested})) == 3


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
    space: dict[str, Any] = {f"t{number}": type_ for number, (type_, _) in enumerate(chosen)}
    parameters = ", ".join(f"a{number}: t{number}" for number in range(len(chosen)))
    exec(f"def made({parameters}):\n    'Does nothing.'\n    return locals()", space)
    made = tool(space["made"])
    values = {f"a{number}": data.draw(values) for number, (_, values) in enumerate(chosen)}
    sent = json.loads(msgspec.json.encode(values))
    Draft202012Validator(made.description["function"]["parameters"]).validate(sent)
    assert made(**made.checked(sent)) == values


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"start": {"x": 1}, "most": "far"}, "Expected `int`, got `str` - at `most`"),
        ({"start": {"x": 1}, "most": 0}, "Expected `int` >= 1 - at `most`"),
        ({"start": {"x": "1"}}, "Expected `float`, got `str` - at `start.x`"),
        ({"start": {"x": 1}, "unit": "foot"}, "Invalid enum value 'foot' - at `unit`"),
        ({}, "missing required field `start`"),
        ({"start": {"x": 1}, "colour": 1}, "contains unknown field `colour`"),
        ([], "must be a JSON object"),
        ({"start": {"x": -1}}, "Error: there is no way from there."),
    ],
)
async def test_a_wrong_call_is_told_to_the_model(arguments: Any, told: str) -> None:
    text = await answer(measure, arguments)
    assert text.startswith("Error: ")
    assert told in text


async def test_described_tools_name_the_argument_too() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    described = {"type": "function", "function": {"name": "f", "parameters": schema}}
    text = await answer(Tool(described, lambda n: ""), {"n": "x"})
    assert (
        text == "Error: the arguments of f are not valid: 'x' is not of type 'integer' (at `$.n`)"
    )


async def test_results_are_texts_or_json() -> None:
    assert json.loads(await answer(measure, {"start": {"x": 1}, "stops": [{"x": 2}]})) == {
        "length": 1.0,
        "unit": "m",
        "stops": 1,
    }

    @tool(name="wait", max_characters=3)
    async def waits() -> str:
        """Waits."""
        await asyncio.sleep(0)
        return "12345"

    assert (waits.name, await answer(waits, {})) == ("wait", "123\n[cut: the result is longer]")


async def test_methods_are_tools_of_their_object() -> None:
    class Bench:
        def __init__(self, count: int) -> None:
            self.count = count

        @tool
        async def take(self, some: int) -> int:
            """Takes some."""
            self.count -= some
            return self.count

    first, second = Bench(5), Bench(9)
    assert [await answer(first.take, {"some": 2}), await answer(second.take, {"some": 1})] == [
        "3",
        "8",
    ]
    assert await first.take(1) == 2


async def test_what_the_author_did_not_mean_is_a_bug() -> None:
    @tool
    def look(name: str) -> str:
        """Looks."""
        return {"a": "b"}[name]

    with pytest.raises(AgentError, match=r"The tool 'look' raised KeyError: 'c'"):
        await answer(look, {"name": "c"})


def _untyped(a) -> str:  # type: ignore[no-untyped-def]
    """Does."""
    return str(a)


def _starred(*a: int) -> str:
    """Does."""
    return str(a)


def _bare(a: int) -> str:
    return str(a)


def _other(a: int) -> str:
    """Does.

    Args:
        b: another one.
    """
    return str(a)


def _unheld(a: asyncio.Event) -> str:
    """Does."""
    return str(a)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (_untyped, "'a' .* needs a type"),
        (_starred, "a model names each argument"),
        (_bare, "needs a docstring"),
        (_other, r"describes \['b'\]"),
        (_unheld, "JSON cannot hold"),
        (lambda: 1, "is not a name for a tool"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused(function: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        tool(function)


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

    calls = [
        *(call("meet", {"name": name}) for name in "ab"),
        *(call("note", {"name": name}) for name in "cd"),
    ]
    replies = iter([calls, []])

    async def chat(messages: Any, tools: Any) -> Any:
        return SimpleNamespace(
            content="",
            tool_calls=next(replies),
            finish_reason="stop",
            message={"role": "assistant"},
        )

    run = SimpleNamespace(chat=chat, max_turns=3, log_metric=lambda name, value: None)
    messages: list[Any] = []
    end = await chat_with_tools(run, messages, [meet, note])  # type: ignore[arg-type]
    assert end.reason == "text"
    assert [one["content"] for one in messages if one["role"] == "tool"] == [
        "a",
        "b",
        "c of 1",
        "d of 2",
    ]


PLAYED = """

class Played(Shop):
    def demonstration(self, task):
        import json

        def call(**arguments):
            function = {"name": "price", "arguments": json.dumps(arguments)}
            return {"id": arguments["item"], "type": "function", "function": function}

        calls = [call(item="apple"), call(item="pear", count=2), call(item="fig")]
        return [
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "assistant", "content": "11"},
        ]
"""
BUG = '''

class Broken(Played):
    @tool
    def price(self, item: str, count: int = 1) -> int:
        """Returns a price."""
        return PRICES[item] * count
'''


def _example() -> str:
    return README.read_text().split("```python\n")[1].split("```")[0]


def test_the_example_of_the_readme_is_short_and_works(tmp_path: Path) -> None:
    assert len(_example().splitlines()) < 40
    (tmp_path / "shop.py").write_text(_example() + PLAYED)
    made = envserver.process(
        f"{tmp_path}/shop.py:Played", model="sim", env={"total_steps": 1, "group_size": 2},
        sim={"solve_probability": 1.0, "openers": False},
    )  # fmt: skip
    for trajectory in made.groups[0].trajectories:
        told = [one["content"] for one in trajectory.messages if one["role"] == "tool"]
        assert told == ["3", "8", "Error: there is no fig; there are: apple, pear."]
        assert (trajectory.score.reward, trajectory.metrics["tool_errors"]) == (1.0, 1.0)


@pytest.mark.thorough
def test_a_bug_in_a_tool_is_told_once_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(_example() + PLAYED + BUG)
    with pytest.raises(envserver.EnvserverError, match=r"raised KeyError: 'fig'.*shop.py:\d+"):
        envserver.process(
            f"{tmp_path}/shop.py:Broken", model="sim", env={"total_steps": 1, "group_size": 2}
        )
