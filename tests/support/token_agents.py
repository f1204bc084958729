"""Agents that do to a conversation whatever agents do, through the proxy, over real HTTP.

Each is determined by its seed. It notes how each of its requests continues an answer that it got,
so that what was recorded can be held against what it did.
"""

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from envserver.proxy.retries import digest_of
from support.speaking import (
    Chat,
    Json,
    Message,
    Messages,
    Responses,
    Speaker,
    Texts,
    events_of,
    text_of,
)

CHANGED = ("edited", "rewritten", "compacted", "other_settings")
"""What must not go on with the tokens of the answer."""
OWN = ("own_ids", "own_text")
"""What agents do that complete text themselves: put ids behind those they got, or text."""

STOPS = (["</code>", "e"], ["in"], [" the", "a"], ["1", " "], ["</code>"])
QUESTIONS = (
    "How many apples has Ann?", "Grüß dich, wie geht's?", "数えてください: 一、二、三",
    "👩‍👩‍👧 and é", "Say\n\n  more\t!", "", "<tool_call>?", "x" * 40, "What is 2+2<|im_end|>",
)  # fmt: skip
_ARGUMENTS = {"expression": {"type": "string", "maxLength": 4}}
_ARGUMENTS |= {"digits": {"type": "integer", "minimum": 0, "maximum": 9}}
_SCHEMA: Json = {"type": "object", "properties": _ARGUMENTS, "required": [*_ARGUMENTS]}
_SCHEMA |= {"additionalProperties": False}
_FUNCTION = {"name": "calculate", "description": "Works out a sum.", "parameters": _SCHEMA}
TOOL: Json = {"type": "function", "function": _FUNCTION}
STRICT_TOOL: Json = {"type": "function", "function": {**TOOL["function"], "strict": True}}
OTHER_TOOL: Json = {
    "type": "function",
    "function": {"name": "wait", "description": "Waits.", "parameters": {"type": "object"}},
}
_CALL = (
    r'<tool_call>\n?\{ ?"name": ?"calculate", ?"arguments": ?'
    r'\{ ?"expression" ?: ?"[0-9+]{1,4}", ?"digits": ?[0-9] ?\} ?\}\n?</tool_call>'
)
WRITTEN_CALLS = (_CALL, "[a-z ]{1,9}" + _CALL, f"({_CALL}\n?){{1,2}}")
"""Patterns of answers that call the tool: of itself a random model seldom writes one."""
_CALL_TOKENS = 90


@dataclass(frozen=True)
class Given:
    """An answer that an agent got.

    Args:
        digest: of the request.
        choice: which of its answers.
        id: as the dialect names the answer, or "".
        stops: the stop strings that were asked for.
    """

    digest: bytes
    choice: int
    id: str
    message: Message
    stops: list[str]


@dataclass(frozen=True)
class Boundary:
    """A request that continues, as the agent sees it, the answer `before`, and gave `after`.

    Args:
        kind: what the agent did to `before`: its sense is as it was, or one of CHANGED or OWN.
    """

    kind: str
    before: Given
    after: Given


@dataclass(frozen=True)
class Talk:
    """A conversation as far as it has come; `last`, `kind` are as in Boundary."""

    name: str
    messages: list[Message]
    turns: int
    tools: list[Json] = field(default_factory=list)
    kwargs: Json = field(default_factory=dict)
    codes: bool = False
    last: Given | None = None
    kind: str = "plain"


class Refused(Exception):
    """The proxy answered with an error; holds status and body."""


class Line:
    """How one agent asks.

    Args:
        url: of its attempt, `http://.../r/KEY`.
        agent: its name, None for the only one; `in_path`: it stands there, not in a header.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        speaker: Speaker,
        agent: str | None = None,
        *,
        in_path: bool = False,
    ) -> None:
        self.speaker = speaker
        self._http = http
        self._agent = agent
        self._url = f"{url}/a/{agent}" if agent and in_path else url
        self._headers = {"x-agent": agent} if agent and not in_path else {}

    async def ask(self, body: Json, mishap: str) -> list[Given]:
        """The answers to `body`.

        Args:
            mishap: "lost": an answer comes, but gets lost within the agent; "dropped": the agent
                hangs up before it comes. It then asks again, and says that it does.

        Raises:
            Refused: there are none.
        """
        data = json.dumps(body).encode()
        first: Json | None = None
        if mishap == "lost":
            first = await self._post(data, body, {})
        elif mishap == "dropped":
            await self.hang_up(body)
        whole = await self._post(data, body, {"x-stainless-retry-count": "1"} if mishap else {})
        messages = self.speaker.answers(whole)
        truly_streamed = body.get("stream") and not body.get("tools")
        if first is not None and not truly_streamed:
            assert messages == self.speaker.answers(first), "a retry got another answer"
        stops = body.get("stop") or body.get("stop_sequences") or []
        digest = digest_of(self.speaker.path, self._agent, data)
        return [
            Given(digest, choice, whole.get("id", ""), message, stops)
            for choice, message in enumerate(messages)
        ]

    async def hang_up(self, body: Json) -> None:
        """Asks, and is gone after a moment."""
        data = json.dumps(body).encode()
        asking = asyncio.create_task(self._post(data, body, {}))
        await asyncio.wait({asking}, timeout=random.Random(data).choice([0.002, 0.03, 0.2]))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    async def _post(self, data: bytes, body: Json, headers: dict[str, str]) -> Json:
        url = f"{self._url}/{self.speaker.path}"
        async with self._http.post(url, data=data, headers=self._headers | headers) as answer:
            told = await answer.read()
            if answer.status != 200:
                raise Refused(answer.status, told.decode())
            if not body.get("stream"):
                whole: Json = json.loads(told)
                return whole
            return self.speaker.joined(events_of(told))


@dataclass
class Agent:
    """One rollout.

    Args:
        url: of its attempt.
        encode: text to ids, for agents that complete text themselves.
    """

    http: aiohttp.ClientSession
    url: str
    seed: int
    encode: Callable[[str], list[int]]
    boundaries: list[Boundary] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)

    async def run(self) -> None:
        dice = random.Random(self.seed)
        speaker = dice.choices([Chat(), Responses(), Messages(), Texts()], [55, 15, 17, 13])[0]
        turns = dice.randint(2, 6)
        line = Line(self.http, self.url, speaker, "main")
        talk = self._begun(dice, "main", turns, speaker)
        match dice.choices(["one", "parallel", "team"], [7, 1, 2])[0]:
            case "one":
                await self._talk(line, talk)
            case "parallel":  # the same conversation thrice at once
                talks = [replace(talk, name=f"p{n}", turns=2) for n in range(3)]
                await asyncio.gather(*(self._talk(line, each) for each in talks))
            case "team":
                helper = Line(self.http, self.url, speaker, "helper", in_path=True)
                critic = Line(self.http, self.url, Chat(), "critic")
                await asyncio.gather(
                    self._talk(line, talk),
                    self._talk(helper, replace(talk, name="helper", turns=2)),
                    self._talk(critic, self._begun(dice, "critic", 2, critic.speaker)),
                )

    def _begun(self, dice: random.Random, name: str, turns: int, speaker: Speaker) -> Talk:
        question = {"role": "user", "content": dice.choice(QUESTIONS)}
        if isinstance(speaker, Texts):
            return Talk(name, [{"role": "user", "content": f"Q: {dice.choice(QUESTIONS)}"}], turns)
        system = {"role": "system", "content": dice.choice(["Be brief.", "Antworte kürzest."])}
        return Talk(
            name,
            [system, question] if dice.random() < 0.4 else [question],
            turns,
            tools=[dice.choice([TOOL, TOOL, STRICT_TOOL])] if dice.random() < 0.25 else [],
            kwargs={"tone": 1} if dice.random() < 0.1 else {},
            codes=dice.random() < 0.3,
        )

    async def _talk(self, line: Line, talk: Talk) -> None:
        dice = random.Random(f"{self.seed} {talk.name} {talk.turns}")
        try:
            answers = await self._answers(line, talk, dice)
        except Refused as refused:
            self.refused.append(refused)
            return
        if talk.last is not None:
            before = talk.last
            self.boundaries += [Boundary(talk.kind, before, given) for given in answers]
        if talk.turns == 1:
            return
        chosen = answers if dice.random() < 0.3 else [dice.choice(answers)]
        gone_on = self._completed if isinstance(line.speaker, Texts) else self._replayed
        talks = [gone_on(dice, talk, given, f"{talk.name}.{n}") for n, given in enumerate(chosen)]
        await asyncio.gather(*(self._talk(line, each) for each in talks))

    async def _answers(self, line: Line, talk: Talk, dice: random.Random) -> list[Given]:
        wishes = self._wishes(dice, talk)
        goes_on = ""
        if isinstance(line.speaker, Responses) and talk.kind == "plain" and dice.random() < 0.5:
            goes_on = talk.last.id if talk.last is not None else ""
        body = line.speaker.body(talk.messages, talk.tools, wishes, goes_on)
        how = dice.choices(["once", "again", "lost", "dropped", "abandoned"], [80, 6, 5, 5, 4])[0]
        if how == "again":
            return [*await line.ask(body, ""), *await line.ask(body, "")]
        if how == "abandoned":
            await line.hang_up({**body, "seed": 0})
        return await line.ask(body, how if how in ("lost", "dropped") else "")

    def _wishes(self, dice: random.Random, talk: Talk) -> Json:
        most = dice.choice([1, 2, 4, 8, 12, 16])
        # Nobody can tell whether a request is another's retry if both are the same.
        wishes: Json = {"max_tokens": most, "user": talk.name}
        if dice.random() < 0.7:
            wishes["seed"] = dice.getrandbits(31)
        if dice.random() < 0.35:
            wishes["stream"] = True
        if talk.kwargs:
            wishes["chat_template_kwargs"] = talk.kwargs
        if talk.tools and dice.random() < 0.4:
            return wishes | _calling(dice)
        if talk.codes or dice.random() < 0.25:
            wishes["stop"] = dice.choice(STOPS)
            if dice.random() < 0.1:
                wishes["include_stop_str_in_output"] = True
        if dice.random() < 0.1:
            wishes["min_tokens"] = min(most, 3)
        if dice.random() < 0.1:
            wishes["n"] = 2
        return wishes

    def _completed(self, dice: random.Random, talk: Talk, given: Given, name: str) -> Talk:
        before, added = talk.messages[-1]["content"], f"\n{dice.choice(QUESTIONS)} "
        prompt: Any
        if isinstance(before, str) and dice.random() < 0.3:
            kind, prompt = "own_text", before + given.message["content"] + added
        else:
            ids = self.encode(before) if isinstance(before, str) else before
            kind, prompt = "own_ids", ids + given.message["token_ids"] + self.encode(added)
        messages = [{"role": "user", "content": prompt}]
        return replace(
            talk, name=name, messages=messages, turns=talk.turns - 1, last=given, kind=kind
        )

    def _replayed(self, dice: random.Random, talk: Talk, given: Given, name: str) -> Talk:
        """The next request: the answer as the agent sends it back, and what it puts behind."""
        kind = _kind(dice, talk, given)
        messages = [*talk.messages, _changed(dice, kind, given)]
        talk = replace(talk, name=name, turns=talk.turns - 1, last=given, kind=kind)
        if kind == "compacted":
            said = "Summary: " + " ".join(text_of(message) for message in messages[-3:])
            new = [{"role": "user", "content": said}]
            messages = [message for message in messages if message["role"] == "system"]
        else:
            new = _behind(dice, messages[-1])
        if kind == "rewritten":
            first = next(n for n, message in enumerate(messages) if message["role"] == "user")
            messages[first] = {"role": "user", "content": f"Forget that, says {name}."}
        if kind == "other_settings" and talk.tools:
            talk = replace(talk, tools=[*talk.tools, OTHER_TOOL])
        elif kind == "other_settings":
            talk = replace(talk, kwargs={"tone": talk.kwargs.get("tone", 0) + 1})
        return replace(talk, messages=[*messages, *new])


def _calling(dice: random.Random) -> Json:
    if dice.random() < 0.2:
        choice = {"type": "function", "function": {"name": TOOL["function"]["name"]}}
        return {"tool_choice": choice, "max_tokens": _CALL_TOKENS}
    pattern = dice.choice(WRITTEN_CALLS)
    most = 12 if dice.random() < 0.1 else _CALL_TOKENS
    return {"structured_outputs": {"regex": pattern}, "max_tokens": most}


def _kind(dice: random.Random, talk: Talk, given: Given) -> str:
    weights = {"plain": 50, "stripped": 14, "parts": 12, "edited": 6, "compacted": 4}
    weights |= {"rewritten": 3, "other_settings": 2}
    if given.message.get("tool_calls"):
        weights["reformatted"] = 40
    elif given.stops:
        weights["appended"] = 80 if talk.codes else 20
    return dice.choices([*weights], [*weights.values()])[0]


def _behind(dice: random.Random, answer: Message) -> list[Message]:
    results = [
        {"role": "tool", "tool_call_id": made["id"], "content": str(dice.randrange(999))}
        for made in answer.get("tool_calls") or []
    ]
    question = {"role": "user", "content": dice.choice(QUESTIONS)}
    if results and dice.random() < 0.7:
        return results
    return [*results, question, question] if dice.random() < 0.1 else [*results, question]


def _changed(dice: random.Random, kind: str, given: Given) -> Message:
    message: Message = json.loads(json.dumps(given.message))
    text = text_of(message)
    if kind == "stripped":
        message["content"] = text.strip()
    elif kind == "parts":
        text = text.strip() if dice.random() < 0.5 else text
        message["content"] = [{"type": "text", "text": text}]
    elif kind == "appended":  # of several stop strings it need not be the one that stopped it
        called = "\nCalling tools:\n[{'id': 1}]" if dice.random() < 0.5 else ""
        message["content"] = text + given.stops[0] + called
    elif kind == "edited":
        message["content"] = "Well, " + text
    elif kind == "reformatted":
        for made in message["tool_calls"]:
            held = json.loads(made["function"]["arguments"])
            turned = dict(reversed(held.items())) if isinstance(held, dict) else held
            made["function"]["arguments"] = json.dumps(turned, indent=dice.choice([None, 2]))
    return message
