"""The agent: decompose, retrieve, reason for each hop, finalize; in one of five ways.

tools      tool calls: search, read, finish
text       the same tools as texts: THOUGHT, TOOL_CALL, FINAL
tags       AFM's way: <plan>, <wiki_search>, <reflection>, <answer>
scripted   fixed steps: a list of sub-questions, a search and a note for each, the answer
memory     the same steps without any search, for a question without passages
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from envserver_records.tasks import Json
from envserver_tools.calling import ToolError, visible_text
from envserver_tools.loop import chat_with_tools
from envserver_tools.protocol import parse_message, run_protocol

from envserver import HarnessTask, Message, PublicTask, Reply, Rollout, Sandbox

from .prompts import (
    SUB_QUESTIONS_WANTED,
    answer_wanted,
    harness_prompt,
    note_wanted,
    system_prompt,
    text_system_prompt,
)
from .scoring import ModelAnswer, extract_answer, has_tagged_answer
from .shelf import MAX_FINISH_CHARACTERS, MAX_QUERY_CHARACTERS, Scope, Shelf, search_of

Mode = Literal["tools", "scripted", "text", "tags"]
Way = Mode | Literal["memory"]
MAX_TOOL_ERRORS = 10
MAX_HOPS = 5
OBSERVATION = "<observation>"
"""Stop string: a model would otherwise invent the search results."""


@dataclass(frozen=True)
class AgentOptions:
    """Options of an agent."""

    mode: Way = "tools"
    scope: Scope = "question"
    top_k: int = 3  # hits per search
    max_searches: int = 8
    unanswerable: bool = False  # tell the model that there may be no answer, and how to say so


async def solve(task: PublicTask, run: Rollout, rules: AgentOptions) -> Json:
    shelf = _shelf(task, run, rules)
    question = task.public["question"]
    said = await _WAYS[rules.mode](question, run, rules, shelf)
    run.log_action("finalize", {"question": question}, said.final)
    finish = shelf.finished or {}
    named = finish.get("supporting_facts")
    facts, passages = shelf.facts(named), shelf.keys(named)
    evidence = finish.get("evidence") or []
    return asdict(replace(said, facts=facts, passages=passages, evidence=evidence))


def harness_task(task: PublicTask, run: Rollout, rules: AgentOptions) -> HarnessTask:

    async def answered(workspace: Sandbox, words: str) -> Json:
        return asdict(ModelAnswer(text=words))

    instruction = harness_prompt(task.public["question"], rules.unanswerable)
    tools = _shelf(task, run, rules).look
    return HarnessTask(instruction=instruction, tools=tools, output=answered)


def _shelf(task: PublicTask, run: Rollout, rules: AgentOptions) -> Shelf:
    return Shelf(
        search_of(task, run, rules.scope),
        run,
        top_k=rules.top_k,
        max_searches=rules.max_searches,
        evidence=task.public["data_set"] == "2wiki",
    )


async def _with_tools(
    question: str, run: Rollout, rules: AgentOptions, shelf: Shelf
) -> ModelAnswer:
    thoughts = _Thoughts(run, question)

    def note(reply: Reply) -> None:
        if reply.tool_calls and reply.finish_reason != "length":
            thoughts.note(reply.content)

    end = await chat_with_tools(
        run,
        _opening(system_prompt("tools", rules.unanswerable), question),
        shelf.tools,
        final="finish",
        max_tool_errors=MAX_TOOL_ERRORS,
        on_reply=note,
        is_answer=has_tagged_answer,
    )
    return ModelAnswer(None if shelf.finished is None else shelf.finished["answer"], end.text)


async def _with_texts(
    question: str, run: Rollout, rules: AgentOptions, shelf: Shelf
) -> ModelAnswer:
    thoughts, text = _Thoughts(run, question), ""

    async def chat(messages: list[Message], **sampling: Any) -> Reply:
        nonlocal text
        reply = await run.chat(messages, **sampling)
        text = reply.content
        for part in parse_message(text):
            if part.type == "thought":
                thoughts.note(part.text)
        return reply

    system = text_system_prompt(shelf.look.values(), rules.unanswerable)
    done = await run_protocol(
        chat,
        shelf.look,
        _opening(system, question),
        max_steps=run.max_turns,
        max_tool_errors=MAX_TOOL_ERRORS,
    )
    run.log_metric("tool_errors", done.tool_errors)
    return ModelAnswer(done.answer, text)


async def _with_tags(question: str, run: Rollout, rules: AgentOptions, shelf: Shelf) -> ModelAnswer:
    messages = _opening(system_prompt("tags", rules.unanswerable), question)
    thoughts, text = _Thoughts(run, question), ""
    for _ in range(run.max_turns):
        reply = await run.chat(messages, stop=[OBSERVATION])
        text = reply.content
        messages.append(reply.message)
        queries = tagged_queries(text)
        if reply.finish_reason == "length" or has_tagged_answer(text) or not queries:
            break
        thoughts.note(_TAGS.sub("", _QUERY.sub("", text)))
        found = "\n\n".join([await _found(shelf, query) for query in queries[: rules.max_searches]])
        messages.append({"role": "user", "content": f"{OBSERVATION}\n{found}\n</observation>"})
    return ModelAnswer(None, text)


async def _by_script(question: str, run: Rollout, rules: AgentOptions, shelf: Shelf) -> ModelAnswer:
    messages = _opening(system_prompt(rules.mode, rules.unanswerable), question)
    messages[-1]["content"] += f"\n\n{SUB_QUESTIONS_WANTED}"
    plan = await _ask(run, messages)
    if plan.finish_reason == "length":
        return ModelAnswer(text=plan.content)
    sub_questions = numbered_list(plan.content)[:MAX_HOPS] or [question]
    run.log_action("decompose", {"question": question}, sub_questions)
    answers: list[str] = []
    for hop, sub_question in enumerate(sub_questions, start=1):
        query = substituted(sub_question, answers)
        found = None if rules.mode == "memory" else await _found(shelf, query)
        note = await _ask(run, messages, note_wanted(hop, query, found))
        answers.append(provisional_answer(note.content))
        run.log_action("reason_hop", {"hop": hop, "question": query}, note.content)
        if note.finish_reason == "length":
            return ModelAnswer(text=note.content)
    last = await _ask(run, messages, answer_wanted(question))
    cut_off = last.finish_reason == "length"
    return ModelAnswer(None if cut_off else final_answer(last.content), last.content)


_WAYS: dict[Way, Callable[[str, Rollout, AgentOptions, Shelf], Awaitable[ModelAnswer]]] = {
    "tools": _with_tools,
    "text": _with_texts,
    "tags": _with_tags,
    "scripted": _by_script,
    "memory": _by_script,
}


async def _ask(run: Rollout, messages: list[Message], ask: str | None = None) -> Reply:
    """Sends `ask` and returns the model's answer; both are added to `messages`."""
    if ask is not None:
        messages.append({"role": "user", "content": ask})
    reply = await run.chat(messages)
    messages.append(reply.message)
    return reply


async def _found(shelf: Shelf, query: str) -> str:
    try:
        return await shelf.search(query[:MAX_QUERY_CHARACTERS])
    except ToolError as error:
        return f"None: {error}"


class _Thoughts:
    """The model's text between calls: first its division of the question, then a note per hop."""

    def __init__(self, run: Rollout, question: str) -> None:
        self._run = run
        self._question = question
        self._hop = 0

    def note(self, text: str) -> None:
        said = (visible_text(text) or "").strip()
        if not said:
            return
        if self._hop:
            self._run.log_action("reason_hop", {"hop": self._hop}, said)
        else:
            self._run.log_action("decompose", {"question": self._question}, said)
        self._hop += 1


def tagged_queries(text: str) -> list[str]:
    tagged = _QUERY.findall(visible_text(text) or "")
    return [query.strip() for part in tagged for query in part.split("|") if query.strip()]


def numbered_list(text: str) -> list[str]:
    return [found.strip() for found in _ENTRY.findall(visible_text(text) or "") if found.strip()]


def substituted(sub_question: str, answers: list[str]) -> str:
    """`sub_question` with the answers of earlier hops in the place of #1, #2 ..."""

    def answer(found: re.Match[str]) -> str:
        number = int(found[1])
        return answers[number - 1] if 0 < number <= len(answers) else found[0]

    return _REFERENCE.sub(answer, sub_question)


def provisional_answer(note: str) -> str:
    marked = extract_answer(note)
    if marked is not None:
        return marked[:MAX_FINISH_CHARACTERS]
    lines = (visible_text(note) or "").strip().splitlines()
    return lines[-1].strip()[:MAX_FINISH_CHARACTERS] if lines else ""


def final_answer(text: str) -> str | None:
    """Returns the answer in a message that should hold nothing else: marked, or a short text."""
    marked = extract_answer(text)
    if marked is not None:
        return marked
    said = (visible_text(text) or "").strip()
    return said if said and len(said) <= MAX_FINISH_CHARACTERS else None


def _opening(system: str, question: str) -> list[Message]:
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": f"Question: {question}"},
    ]


_ENTRY = re.compile(r"^[ \t]*(?:\d{1,2}[.):]|#\d{1,2}[.):]?)[ \t]+(.+)$", re.MULTILINE)
_QUERY = re.compile(r"<wiki_search>(.*?)(?:</wiki_search>|\Z)", re.DOTALL)
_TAGS = re.compile(r"</?(?:plan|reflection)>")
_REFERENCE = re.compile(r"#(\d{1,2})\b")
