"""A model and its engine, of which a test says what they sample, and an attempt that asks it."""

import json
from collections.abc import Collection
from typing import Any, Literal

import numpy as np
from envserver_records.records import Call, Json, Message, VersionSpan

from envserver.tokens.chat_format import ChatFormat
from envserver.tokens.history import History, PromptPlan
from support.templates import OWN, STOPS_OF, chat_format

ENDS = {name: stops[0] for name, stops in STOPS_OF.items()}
"""The token that ends the model's turn, by the template's name."""


def written(name: str, message: Message, *, indent: int | None = None) -> str:
    """The text that a model of the template `name` samples for `message`, without its end."""
    content = message.get("content") or ""
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]), call["id"])
        for call in message.get("tool_calls", [])
    ]
    if name == "llama" and calls:
        called, arguments, _ = calls[0]
        return json.dumps({"name": called, "parameters": arguments}, indent=indent)
    if name == "mistral" and calls:
        forms = [{"name": n, "arguments": a, "id": i} for n, a, i in calls]
        return "[TOOL_CALLS]" + json.dumps(forms, indent=indent)
    if name == "role_stops":
        return "\n" + content + "".join(_xml_call(n, a) for n, a, _ in calls)
    thought = message.get("reasoning")
    head = f"<think>\n{thought}\n</think>\n\n" if thought is not None else ""
    forms = [json.dumps({"name": n, "arguments": a}, indent=indent) for n, a, _ in calls]
    tags = "\n".join(f"<tool_call>\n{form}\n</tool_call>" for form in forms)
    return head + content + ("\n" if content and tags else "") + tags


def _xml_call(name: str, arguments: Json) -> str:
    values = "".join(
        f"\n<arg_key>{key}</arg_key>\n<arg_value>"
        f"{value if isinstance(value, str) else json.dumps(value)}</arg_value>"
        for key, value in arguments.items()
    )
    return f"\n<tool_call>{name}{values}\n</tool_call>"


class Talk:
    """One attempt: its history, the calls that were committed and their plans.

    Args:
        end: text of the token that ends the model's turn.
    """

    def __init__(
        self,
        format: ChatFormat,
        end: str,
        *,
        edits: Collection[Any] = ("exact", "appended", "whitespace", "calls"),
        think: Literal["template", "keep"] = "template",
    ) -> None:
        self.format = format
        self.end = end
        self.history = History(format, edits=edits, think=think)
        self.calls: list[Call] = []
        self.plans: list[PromptPlan] = []

    def plan(
        self,
        messages: list[Message],
        tools: list[Json] | None = None,
        *,
        agent: str | None = None,
        kwargs: Json | None = None,
        model: str = "m",
    ) -> PromptPlan:
        """How a request's prompt would come to be."""
        return self.history.plan(
            messages, tools or [], kwargs=kwargs or {}, model=model, agent=agent
        )

    def ask(
        self,
        messages: list[Message],
        answer: Message | str,
        *,
        sampled: str | list[int] | None = None,
        tools: list[Json] | None = None,
        agent: str | None = None,
        kwargs: Json | None = None,
        finish: str = "stop",
        stop_reason: int | str | None = None,
        echo: list[int] | None = None,
    ) -> PromptPlan:
        """Plans the request and records that `answer` was sampled, as the engine would say it.

        Args:
            sampled: text or ids of the completion, without its end; the answer's content unless
                given.
            echo: the prompt that the engine says it saw; the planned one unless given.
        """
        if isinstance(answer, str):
            answer = {"role": "assistant", "content": answer}
        plan = self.plan(messages, tools, agent=agent, kwargs=kwargs)
        prompt = echo
        if prompt is None:
            prompt = plan.ids
        if prompt is None:
            prompt = self.format.prompt_ids(messages, tools, kwargs or {})
        ids = sampled if isinstance(sampled, list) else None
        if ids is None:
            ids = self.format.encode(answer["content"] if sampled is None else str(sampled))
        if finish in ("stop", "tool_calls") and not isinstance(stop_reason, str):
            ids = [*ids, *self.format.encode(self.end)]
        call = Call(
            index=len(self.calls),
            model="m",
            prompt_ids=np.array(prompt, np.int32),
            completion_ids=np.array(ids, np.int32),
            logprobs=np.zeros(len(ids), np.float32),
            versions=[VersionSpan(0, 0, len(ids))],
            exact=True,
            finish_reason=finish,
            stop_reason=stop_reason,
            message=answer,
            messages=messages,
            tools=tools or [],
            agent=agent,
            planned_parent=plan.parent,
            edge=plan.edge,
            refusal=plan.refusal,
            flags=list(plan.flags),
        )
        self.calls.append(call)
        self.plans.append(plan)
        self.history.add(call, plan)
        return plan


def talk(name: str, **settings: Any) -> Talk:
    """An attempt with a model of the template `name`; `settings` as of Talk."""
    return Talk(format_of(name), ENDS[name], **settings)


def format_of(name: str) -> ChatFormat:
    special = ["<think>", "</think>"] if name == "thinking" else []
    return chat_format(OWN[name], special=special, stops=[ENDS[name]])
