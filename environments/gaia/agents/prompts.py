"""What the agents are told. Short: a system prompt is read before every step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tools.calling import Tool

ANSWER_RULES = """\
Rules for the answer: it is compared with the right one, so give nothing but the answer. A number \
in digits, without commas in it, and without units ($, %) unless they are asked for. A text in as \
few words as possible, without articles and abbreviations. A list with commas between its items, \
each of which follows these rules."""

_CODE = """\
You solve a task by writing Python. In each turn say briefly what you want to do, then write one \
block of code:
<code>
print(open("notes.txt").read()[:500])
</code>
It is executed, and you are told what it printed, the value of its last expression, or its error. \
Variables and files stay for the next turn. You have the standard library and whatever else is \
installed; files of the task lie in the current directory; there is no internet. Do not write what \
the code will print.{imports}{functions}

Call final_answer(answer) in the code when you know the answer; that ends the task.

{rules}"""

_TOOLS = """\
You solve a task by calling tools. Files of the task lie in the current directory; there is no \
internet. Think briefly, then call a tool; you are told its result. Call final_answer, alone, when \
you know the answer; that ends the task.{imports}

{rules}"""

PLAN = """\
Before you go on, write a plan and nothing else: what is known, what has to be found out, and the \
next steps, at most ten lines. Do not call anything yet. End with <end_plan>."""
GO_ON = "Now carry out this plan."
NO_CODE = """\
Error: there is no complete block of code in your turn. Write one between <code> and </code>; give \
the answer by final_answer(answer) in it."""
NO_CALL = "Error: you called no tool. Call one; give the answer by calling final_answer."
CUT_OFF = "The model's turn was longer than it may be."


def system_prompt(kind: str, tools: Iterable[Tool], imports: tuple[str, ...] = ()) -> str:
    """Of an agent of that kind with these tools."""
    told = f" Imported already: {', '.join(imports)}." if imports else ""
    if kind != "code":
        return _TOOLS.format(imports=told, rules=ANSWER_RULES)
    functions = "\n".join(_signature(tool) for tool in tools)
    told_functions = f"\n\nThese functions are there, too:\n{functions}" if functions else ""
    return _CODE.format(imports=told, functions=told_functions, rules=ANSWER_RULES)


def question(public: dict[str, Any]) -> str:
    """The user's message: the question, and the names of its files."""
    names = [str(f["name"]) if isinstance(f, dict) else str(f) for f in public.get("files") or ()]
    text = str(public["question"]).strip()
    return f"{text}\n\nFiles: {', '.join(names)}" if names else text


def _signature(tool: Tool) -> str:
    function = tool.description["function"]
    parameters = function["parameters"]
    required = parameters.get("required", ())
    arguments = ", ".join(
        name if name in required else f"{name}=None" for name in parameters["properties"]
    )
    return f"- {tool.name}({arguments}): {function['description']}"
