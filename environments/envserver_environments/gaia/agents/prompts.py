"""The agents' prompts. They are short: a system prompt is read before every step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from envserver_tools.calling import Tool
from envserver_tools.web import DESCRIPTIONS as WEB_TOOLS

ANSWER_RULES = """\
Rules for the answer: it is compared with the right one, so give nothing but the answer. A number \
in digits, without commas in it, and without units ($, %) unless they are asked for. A text in as \
few words as possible, without articles and abbreviations (of cities, too), digits as digits. A \
list with commas between its items, each of which follows these rules. What the task itself says \
of the form goes before."""

FINAL_ANSWER = "End your last message with a line of this form:\nFINAL ANSWER: ..."

_CODE = """\
You solve a task by writing Python. In each turn say briefly what you want to do, then write one \
block of code:
<code>
print(open("notes.txt").read()[:500])
</code>
It is executed, and you are told what it printed, the value of its last expression, or its error. \
Variables and files stay for the next turn. You have the standard library and whatever else is \
installed; files that the task names lie in the current directory; {internet}. Do not write what \
the code will print.{imports}{functions}

Call final_answer(answer) in the code when you know the answer; that ends the task.

{rules}"""

_TOOLS = """\
You solve a task by calling tools. Files that the task names lie in the current directory; \
{internet}. Think briefly, then call a tool; you are told its result. Call final_answer, alone, \
when you know the answer; that ends the task.{imports}

{rules}"""

_OF_THE_WEB = frozenset(str(schema["function"]["name"]) for schema in WEB_TOOLS)

PLAN = """\
Before you go on, write a plan and nothing else: what is known, what has to be found out, and the \
next steps, at most ten lines. Do not call anything yet. End with <end_plan>."""
GO_ON = "Now carry out this plan."
OBSERVED = "Observation:\n"
PLANNED = (GO_ON, "Now proceed and carry out this plan")
"""How a message after a plan begins: of this package and of smolagents."""
FAILED = "Observation, ended by an error:\n"
"""First line of an observation of failed code; no output of the code precedes it."""
TOOL_FAILED = "Error: "
"""Prefix of the result of every failed tool call, and of no other."""
NO_CODE = """\
Error: there is no complete block of code in your turn. Write one between <code> and </code>; give \
the answer by final_answer(answer) in it."""
NO_CALL = "Error: you called no tool. Call one; give the answer by calling final_answer."
CUT_OFF = "The model's turn was longer than it may be."


def system_prompt(kind: str, tools: Iterable[Tool], imports: tuple[str, ...] = ()) -> str:
    given = list(tools)
    fields = {
        "imports": f" Imported already: {', '.join(imports)}." if imports else "",
        "internet": _internet(tool.name for tool in given),
        "rules": ANSWER_RULES,
    }
    if kind != "code":
        return _TOOLS.format(**fields)
    functions = "\n".join(_signature(tool) for tool in given)
    if functions:
        functions = f"\n\nThese functions are there, too; each returns a text:\n{functions}"
    return _CODE.format(**fields, functions=functions)


def instructions(tools: Iterable[Tool], imports: tuple[str, ...] = ()) -> str:
    """Returns what a system prompt of smolagents' templates says besides: the instructions."""
    files = "Files that the task names lie in the current directory"
    known = f" Imported already: {', '.join(imports)}." if imports else ""
    return f"{files}; {_internet(tool.name for tool in tools)}.{known}\n\n{ANSWER_RULES}"


def question(public: dict[str, Any]) -> str:
    names = [str(f["name"]) if isinstance(f, dict) else str(f) for f in public.get("files") or ()]
    text = str(public["question"]).strip()
    return f"{text}\n\nFiles: {', '.join(names)}" if names else text


def _internet(names: Iterable[str]) -> str:
    ways = [name for name in names if name in _OF_THE_WEB]
    return f"the internet is reached by {', '.join(ways)} alone" if ways else "there is no internet"


def _signature(tool: Tool) -> str:
    function = tool.description["function"]
    parameters = function["parameters"]
    required = parameters.get("required", ())
    arguments = ", ".join(
        name if name in required else f"{name}=None" for name in parameters["properties"]
    )
    return f"- {tool.name}({arguments}): {function['description']}"
