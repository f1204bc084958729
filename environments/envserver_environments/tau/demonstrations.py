"""Conversations that solve a task: its expected actions, then a closing message. Pure.

They are played in a world, so that whatever follows from them (results, a scripted customer's
answers) is as it would be. The simulated engine plays them, `envserver check` scores them.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from envserver import Message

from .agent import AGENT
from .domains.world import Domain, World
from .episodes import STOP, Episode, EpisodeRules, is_user_stop
from .tasks import Action, TauMessage, TauTask
from .users import USER, Rule, ScriptedCustomer, matching_rule
from .wire import assistant_calls

_MOST_TURNS = 200
_MOST_CLOSINGS = 2
_OPTIONAL = re.compile(r"\([^()]*\)\?|\w\?| \?")


@dataclass
class Demonstration:
    """A played conversation.

    Args:
        agent, user: the messages of each side's model, one per turn; none for a scripted customer.
        messages: the whole conversation; `ending`: None if it did not end.
    """

    agent: list[Message] = field(default_factory=list)
    user: list[Message] = field(default_factory=list)
    messages: list[TauMessage] = field(default_factory=list)
    ending: str | None = None
    world: World | None = None

    def by_agent(self) -> dict[str, list[Message]]:
        """Returns the messages in the simulated engine's form."""
        return {AGENT: self.agent, USER: self.user} if self.user else {AGENT: self.agent}


def demonstrate(
    domain: Domain,
    task: TauTask,
    script: Sequence[Rule],
    rules: EpisodeRules,
    *,
    actions: Sequence[Action] | None = None,
) -> Demonstration:
    """Plays the conversation in which `actions` are done.

    Args:
        script: the customer's; empty: a model plays the customer.
        actions: unset: the expected ones, and a look at the records if there are none.
    """
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
    """Returns the expected actions of both sides; or, without any, a call that changes nothing."""
    criteria = task.evaluation_criteria
    expected = list((criteria.actions if criteria else None) or ())
    return expected or [Action(name=name, arguments={}) for name in _plain_reads(world)][:1]


def opening(task: TauTask) -> str:
    """The first words of a customer who has no script."""
    instructions = task.user_scenario.get("instructions")
    reason = instructions.get("reason_for_call") if isinstance(instructions, dict) else instructions
    return str(reason or task.ticket or "Hello, I need help.")


class _Play:
    """A conversation that is played turn by turn."""

    def __init__(self, episode: Episode, script: Sequence[Rule], actions: deque[Action]) -> None:
        self.done = Demonstration()
        self.closings = 0
        self._episode = episode
        self._script = script
        self._actions = actions
        self._customer = ScriptedCustomer(script, episode.messages) if script else None
        self._his_turns: deque[Message] = deque([_says(opening(episode.task))])

    def turn(self) -> None:
        """Plays one side's turn."""
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
        """Makes the customer do the next expected action."""
        asked = [self._actions.popleft()]
        if self._customer is None:
            while self._actions and self._actions[0].requestor == "user":
                asked.append(self._actions.popleft())
            self._his_turns += [assistant_calls((a.name, a.arguments)) for a in asked]
            self._his_turns.append(_says("Done."))
            names = ", ".join(action.name for action in asked)
            self._say(_says(f"Please do this at your side: {names}."), self.done.agent)
            return
        place = next((p for p, rule in enumerate(self._script) if _does(rule, asked[0])), None)
        if place is None:
            return
        while self._actions and _does(self._script[place], self._actions[0]):
            self._actions.popleft()
        self._tell(words_for(self._script, [place], "Please have a look at this: {words}."))

    def _close(self) -> None:
        criteria = self._episode.task.evaluation_criteria
        info = ", ".join((criteria.communicate_info if criteria else None) or ())
        ending = [
            place for place, rule in enumerate(self._script) if is_user_stop(_says(rule["say"]))
        ]
        self.closings += 1
        self._his_turns.append(_says(f"Thank you. {STOP}"))
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
        self._say(_says(text), self.done.agent if note else [])
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
    """Returns a text that makes the customer follow one of the rules at `places`.

    Args:
        form: of the text; {words} is replaced by text that the rule matches.
    """
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
    """Does the customer, following `rule`, do this?"""
    return action.requestor == "user" and any(
        call["name"] == action.name and call["arguments"] == action.arguments
        for call in rule.get("calls") or ()
    )


def _plain_reads(world: World) -> Iterator[str]:
    """The assistant's tools that only look, and need no arguments."""
    for tool in world.agent.tools().values():
        required = tool.schema["function"]["parameters"].get("required")
        if tool.kind == "read" and not required:
            yield tool.name


def _says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _calls(message: Message) -> Iterator[tuple[str, Any]]:
    for call in message.get("tool_calls") or ():
        yield call["function"]["name"], json.loads(call["function"]["arguments"])
