"""Conversations that solve a task, and results with a known reward: nothing, cheats. Pure."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from envserver_environments.demonstrations import text_message
from envserver_records.tasks import Json

from envserver import KnownResult, Message, Result

from .agent import AGENT
from .domains.world import Domain, World
from .episodes import GREETING, STOP, TRANSFER, Episode, EpisodeRules, is_user_stop
from .evaluation import HAND_OVER, MAX_SAID_CHARACTERS, expected_world, pays_for_nothing
from .speaking import USER, Rule, ScriptedCustomer, as_openai, assistant_calls, matching_rule
from .tasks import Action, Criteria, TauMessage, TauTask, has_text, read_task

# Demonstrations run in a world, so that results and a scripted customer's answers are real.

_MOST_TURNS = 200
_MOST_CLOSINGS = 2
_OPTIONAL = re.compile(r"\([^()]*\)\?|\w\?| \?")


@dataclass
class Demonstration:
    """A played conversation, with the messages of each side's model (none of a scripted
    customer)."""

    agent: list[Message] = field(default_factory=list)
    user: list[Message] = field(default_factory=list)
    messages: list[TauMessage] = field(default_factory=list)
    ending: str | None = None
    world: World | None = None

    def by_agent(self) -> dict[str, list[Message]]:
        return {AGENT: self.agent, USER: self.user} if self.user else {AGENT: self.agent}


def demonstrate(
    domain: Domain,
    task: TauTask,
    script: Sequence[Rule],
    rules: EpisodeRules,
    *,
    actions: Sequence[Action] | None = None,
) -> Demonstration:
    episode = Episode(domain, task, rules)
    if actions is None:
        actions = expected_actions(episode.world, task)
    play = _Play(episode, script, deque(actions))
    for _ in range(_MOST_TURNS):
        if episode.speaker is None or play.closings > _MOST_CLOSINGS:
            break
        play.turn()
    play.done.messages = episode.messages
    play.done.ending = episode.ending
    play.done.world = episode.world
    return play.done


def expected_actions(world: World, task: TauTask) -> list[Action]:
    expected = list(task.criteria.actions or ())
    return expected or [Action(name=name, arguments={}) for name in _plain_reads(world)][:1]


def opening(task: TauTask) -> str:
    instructions = task.user_scenario.get("instructions")
    reason = instructions.get("reason_for_call") if isinstance(instructions, dict) else instructions
    return str(reason or task.ticket or "Hello, I need help.")


class _Play:
    def __init__(self, episode: Episode, script: Sequence[Rule], actions: deque[Action]) -> None:
        self.done = Demonstration()
        self.closings = 0
        self._episode = episode
        self._script = script
        self._actions = actions
        self._customer = ScriptedCustomer(script, episode.messages) if script else None
        self._his_turns: deque[Message] = deque([text_message(opening(episode.task))])

    def turn(self) -> None:
        if self._episode.speaker == "assistant":
            self._agent_turn()
        elif self._customer is not None:
            said = self._customer.say()
            results = self._episode.say(said.content, said.calls)
            if said.calls:
                self._customer.receive(results)
        else:
            self._say(self._his_turns.popleft(), self.done.user)

    def _agent_turn(self) -> None:
        if not self._actions:
            self._close()
        elif self._actions[0].requestor == "assistant":
            action = self._actions.popleft()
            self._say(assistant_calls((action.name, action.arguments)), self.done.agent)
        else:
            self._ask_customer()

    def _ask_customer(self) -> None:
        actions = [self._actions.popleft()]
        if self._customer is None:
            while self._actions and self._actions[0].requestor == "user":
                actions.append(self._actions.popleft())
            self._his_turns += [assistant_calls((a.name, a.arguments)) for a in actions]
            self._his_turns.append(text_message("Done."))
            names = ", ".join(action.name for action in actions)
            self._say(text_message(f"Please do this at your side: {names}."), self.done.agent)
            return
        place = next((p for p, rule in enumerate(self._script) if _does(rule, actions[0])), None)
        if place is None:
            return
        while self._actions and _does(self._script[place], self._actions[0]):
            self._actions.popleft()
        self._tell(words_for(self._script, [place], "Please have a look at this: {words}."))

    def _close(self) -> None:
        info = ", ".join(self._episode.task.criteria.communicate_info or ())
        ending = [
            place
            for place, rule in enumerate(self._script)
            if is_user_stop(text_message(rule["say"]))
        ]
        self.closings += 1
        self._his_turns.append(text_message(f"Thank you. {STOP}"))
        form = "That is it; {words}: " + info if info else "That is it; {words}."
        text = words_for(self._script, ending, form) if ending else form.replace("{words}", "done")
        last = self.done.agent[-1] if self.done.agent else {}
        if not info and self.closings == 1 and last.get("tool_calls"):
            # So the simulated engine, which spoils the last turn, spoils what counts. Words beside
            # a call are lost; it repeats them when asked for more.
            last["content"] = text
            self._tell(text, note=False)
        else:
            self._tell(text)

    def _tell(self, text: str, *, note: bool = True) -> None:
        self._say(text_message(text), self.done.agent if note else [])
        if self._customer is not None:
            self._customer.hear(text)

    def _say(self, message: Message, turns: list[Message]) -> None:
        turns.append(message)
        calls = [
            {"id": f"{len(self._episode.messages)}_{place}", "name": name, "arguments": arguments}
            for place, (name, arguments) in enumerate(_calls(message))
        ]
        self._episode.say(None if calls else message["content"], calls)


def words_for(script: Sequence[Rule], places: Sequence[int], form: str) -> str:
    """A text that makes the customer follow one of the rules at `places`; {words} in `form` is what
    the rule matches."""
    texts = [form.replace("{words}", "all is done")]
    for place in places:
        texts += [form.replace("{words}", words) for words in _literals(script[place]["if"])]
    return next((text for text in texts if matching_rule(script, text) in places), texts[-1])


def _literals(pattern: str) -> Iterator[str]:
    """Returns texts that a simple pattern matches: its alternatives without optional parts."""
    for alternative in re.split(r"\|(?![^(]*\))", pattern):
        plain = _OPTIONAL.sub("", alternative)
        plain = re.sub(r"\((?:\?:)?([^()|]*)[^()]*\)", r"\1", plain)
        plain = re.sub(r"\\d\+|\\d", "1", plain)
        plain = re.sub(r"\.\*|\\b|[\^$]", " ", plain)
        yield re.sub(r"\\(.)", r"\1", plain).strip()


def _does(rule: Rule, action: Action) -> bool:
    return action.requestor == "user" and any(
        call["name"] == action.name and call["arguments"] == action.arguments
        for call in rule.get("calls") or ()
    )


def _plain_reads(world: World) -> Iterator[str]:
    for tool in world.agent.tools().values():
        required = tool.schema["function"]["parameters"].get("required")
        if tool.kind == "read" and not required:
            yield tool.name


def _calls(message: Message) -> Iterator[tuple[str, Any]]:
    for call in message.get("tool_calls") or ():
        yield call["function"]["name"], json.loads(call["function"]["arguments"])


_MOST_STRANGE_WRITES = 40


@dataclass(frozen=True)
class KnownConversations:
    """Conversations about a task with a known reward; `verdicts`: of a judge who agrees; None: the
    reward needs none."""

    domain: Domain
    task: TauTask
    script: Sequence[Rule]
    rules: EpisodeRules
    strict: bool
    verdicts: list[bool] | None

    def played(self, actions: Sequence[Action] | None = None) -> Demonstration:
        return demonstrate(self.domain, self.task, self.script, self.rules, actions=actions)

    def all(self) -> Iterator[KnownResult]:
        criteria, played = self.task.criteria, self.played()
        gold = played.messages
        if played.ending == "user_stop" and _is_fulfilled(criteria, played.world):
            yield self._known("gold", gold, least=1.0, most=1.0)
            yield self._known("gold, without its end", gold[:-1])
            if self.verdicts:
                yield self._known("gold, the judge disagrees", gold, unmet=True)
            if self.strict:
                flood = " word" * (MAX_SAID_CHARACTERS // 5 + 1)
                flooded = _rewritten(gold, lambda said: said + flood, len(self.task.history))
                yield self._known("gold, and a flood of words", flooded)
            said = self.strict or "COMMUNICATE" in criteria.reward_basis
            if criteria.communicate_info and said:
                yield from self._hidden_words(gold, criteria.communicate_info)
            if "DB" in criteria.reward_basis and criteria.actions is not None:
                yield from self._other_writes(played)
        if not self.task.history:
            yield from self._short_ones()

    def _short_ones(self) -> Iterator[KnownResult]:
        free = pays_for_nothing(self.domain, self.task)
        opened = [_said("assistant", GREETING), _said("user", opening(self.task))]
        lazy = float(free and not self.strict)
        for name, words in (("nothing done", "I am sorry."), ("promises", "All of it is done.")):
            ended = [*opened, _said("assistant", words), _said("user", STOP)]
            yield self._known(name, ended, most=lazy, unmet=True)
        stopped = [*opened, _said("assistant", STOP)]
        yield self._known("the assistant ends it", stopped, unmet=True)
        if self.domain.world().tool(HAND_OVER) is None:
            return
        handed = [action.name == HAND_OVER for action in self.task.criteria.actions or ()]
        # Strictly, too, it is right where nothing else is expected.
        right = all(handed) if handed else free
        right = right or (free and any(handed) and "ACTION" not in self.task.criteria.reward_basis)
        arguments = {"summary": "A customer."}
        call = {"id": "h", "name": HAND_OVER, "arguments": arguments}
        result = Episode(self.domain, self.task).world.call("assistant", HAND_OVER, arguments)
        over: list[TauMessage] = [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "id": "h", "requestor": "assistant", **asdict(result)},
            _said("assistant", "A colleague comes."),
            _said("user", TRANSFER),
        ]
        most = float(right or (free and not self.strict))
        yield self._known("handed over at once", [*opened, *over], most=most, unmet=True)

    def _hidden_words(
        self, gold: Sequence[TauMessage], expected: Sequence[str]
    ) -> Iterator[KnownResult]:
        without = _replaced(gold, expected, "...")
        yield self._known("gold, without what is to be said", without)
        if self.strict and all(info[:1].isalnum() and info[-1:].isalnum() for info in expected):
            inside = _replaced(gold, expected, "9{}9")
            yield self._known("gold, what is to be said within longer words", inside)

    def _other_writes(self, played: Demonstration) -> Iterator[KnownResult]:
        world = self.domain.world()
        actions = expected_actions(world, self.task)
        writes = [place for place, action in enumerate(actions) if _is_write(world, action)]
        cases = {}
        if writes:
            left = [action for place, action in enumerate(actions) if place != writes[-1]]
            cases["the last write left out"] = left
        strange = _strange_write(self.domain, self.task)
        if strange is not None:
            cases["a write that nobody asked for"] = [*actions, strange]
        for name, changed in cases.items():
            other = self.played(changed)
            if other.ending != "user_stop" or other.world is None or played.world is None:
                continue
            if not other.world.same_as(played.world):
                yield self._known(name, other.messages)

    def _known(
        self,
        name: str,
        messages: Sequence[TauMessage],
        *,
        least: float = 0.0,
        most: float = 0.0,
        unmet: bool = False,
    ) -> KnownResult:
        """`unmet`: the judge disagrees."""
        verdicts = [False] * len(self.verdicts) if unmet and self.verdicts else self.verdicts
        output: Json = {
            "messages": [as_openai(message) for message in messages],
            "ending": "",
            "final_answer": "",
            "verdicts": verdicts,
        }
        return KnownResult(name, Result(output=output), least=least, most=most)


def _is_fulfilled(criteria: Criteria, world: World | None) -> bool:
    """Is all that is asserted true after the expected actions? In tau2-bench's mock it is not."""
    try:
        return world is not None and all(
            world.run_function(assertion.env_type, assertion.func_name, assertion.arguments)
            == assertion.assert_value
            for assertion in criteria.env_assertions or ()
        )
    except Exception:  # noqa: BLE001 - assertions may raise anything
        return False


def _strange_write(domain: Domain, task: TauTask) -> Action | None:
    """Returns another task's write that changes the data after this task."""
    done = expected_world(domain, task, task.criteria)
    tried = 0
    for row in domain.tasks.values():
        other = read_task(row)
        if other.id == task.id:
            continue
        for action in other.criteria.actions or ():
            if action.requestor != "assistant" or not _is_write(done, action):
                continue
            tried += 1
            if tried > _MOST_STRANGE_WRITES:
                return None
            world = expected_world(domain, task, task.criteria)
            result = world.call("assistant", action.name, action.arguments)
            if not result.error and not world.same_as(done):
                return action
    return None


def _is_write(world: World, action: Action) -> bool:
    tool = world.tool(action.name)
    return action.requestor == "assistant" and tool is not None and tool.mutates


def _replaced(messages: Sequence[TauMessage], texts: Sequence[str], form: str) -> list[TauMessage]:
    def changed(content: str) -> str:
        for text in texts:
            content = content.replace(text, form.format(text))
        return content

    return _rewritten(messages, changed)


def _rewritten(
    messages: Sequence[TauMessage], change: Callable[[str], str], begun: int = 0
) -> list[TauMessage]:
    """The messages, with changed texts of the assistant from place `begun` on."""
    return [
        {**message, "content": change(message["content"])}
        if place >= begun and message["role"] == "assistant" and has_text(message)
        else message
        for place, message in enumerate(messages)
    ]


def _said(role: str, content: str) -> TauMessage:
    return {"role": role, "content": content}
