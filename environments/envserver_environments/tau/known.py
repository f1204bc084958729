"""Conversations about a task whose reward is known: the right one, nothing, cheats. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from envserver import KnownResult, Result

from .demonstrations import Demonstration, demonstrate, expected_actions, opening
from .domains.world import Domain, World
from .episodes import GREETING, STOP, TRANSFER, Episode, EpisodeRules
from .evaluation.proof import HAND_OVER, MAX_SAID_CHARACTERS
from .evaluation.rewards import expected_world, pays_for_nothing
from .tasks import Action, Criteria, TauMessage, TauTask, has_text, read_task
from .users import Rule
from .wire import as_openai

_MOST_STRANGE_WRITES = 40


def known_conversations(
    domain: Domain,
    task: TauTask,
    script: Sequence[Rule],
    rules: EpisodeRules,
    *,
    strict: bool,
    judged: bool,
) -> Iterator[KnownResult]:
    """Returns the known results of any task here.

    Args:
        strict: use the strict reward.
        judged: the reward needs a judge's verdicts.
    """
    criteria = task.evaluation_criteria or Criteria()
    verdicts = [True] * len(criteria.nl_assertions or ()) if judged else None
    played = demonstrate(domain, task, script, rules)
    gold = played.messages
    if played.ending == "user_stop" and _is_fulfilled(criteria, played.world):
        yield _known("gold", gold, verdicts, least=1.0, most=1.0)
        yield _known("gold, without its end", gold[:-1], verdicts)
        if verdicts:
            yield _known("gold, the judge disagrees", gold, [False] * len(verdicts))
        if strict:
            yield _known("gold, and a flood of words", _flooded(gold, len(task.history)), verdicts)
        if criteria.communicate_info and (strict or "COMMUNICATE" in criteria.reward_basis):
            yield from _hidden_words(gold, criteria.communicate_info, verdicts, strict)
        if "DB" in criteria.reward_basis and criteria.actions is not None:
            yield from _other_writes(domain, task, script, rules, played, verdicts)
    if not task.history:
        yield from _short_ones(domain, task, strict, verdicts)


def _is_fulfilled(criteria: Criteria, world: World | None) -> bool:
    """Is all that is asserted true after the expected actions? In tau2-bench's mock it is not."""
    try:
        return world is not None and all(
            world.run_function(one.env_type, one.func_name, one.arguments) == one.assert_value
            for one in criteria.env_assertions or ()
        )
    except Exception:  # noqa: BLE001 - assertions may raise anything
        return False


def _short_ones(
    domain: Domain, task: TauTask, strict: bool, verdicts: list[bool] | None
) -> Iterator[KnownResult]:
    """Conversations in which nothing is done for the customer."""
    free = pays_for_nothing(domain, task)
    unmet = None if verdicts is None else [False] * len(verdicts)
    asked = [_says("assistant", GREETING), _says("user", opening(task))]
    lazy = float(free and not strict)
    for name, words in (("nothing done", "I am sorry."), ("promises", "All of it is done.")):
        ended = [*asked, _says("assistant", words), _says("user", STOP)]
        yield _known(name, ended, unmet, most=lazy)
    yield _known("the assistant ends it", [*asked, _says("assistant", STOP)], unmet)
    criteria = task.evaluation_criteria or Criteria()
    handed = [action.name == HAND_OVER for action in criteria.actions or ()]
    # Strictly, too, it is right where nothing else is expected.
    right = all(handed) if handed else free
    right = right or (free and any(handed) and "ACTION" not in criteria.reward_basis)
    world = domain.world()
    if world.tool(HAND_OVER) is not None:
        arguments = {"summary": "A customer."}
        call = {"id": "h", "name": HAND_OVER, "arguments": arguments}
        result = Episode(domain, task).world.call("assistant", HAND_OVER, arguments)
        made = {"role": "assistant", "content": None, "tool_calls": [call]}
        told: dict[str, Any] = {
            "role": "tool",
            "id": "h",
            "requestor": "assistant",
            "content": result.content,
        }
        over: list[dict[str, Any]] = [
            made,
            {**told, "error": result.error},
            _says("assistant", "A colleague comes."),
        ]
        yield _known(
            "handed over at once",
            [*asked, *over, _says("user", TRANSFER)],
            unmet,
            most=float(right or (free and not strict)),
        )


def _hidden_words(
    gold: Sequence[TauMessage],
    expected: Sequence[str],
    verdicts: list[bool] | None,
    strict: bool,
) -> Iterator[KnownResult]:
    """Omits the expected texts, or hides them in longer words."""
    yield _known("gold, without what is to be said", _replaced(gold, expected, "..."), verdicts)
    if strict and all(info[:1].isalnum() and info[-1:].isalnum() for info in expected):
        inside = _replaced(gold, expected, "9{}9")
        yield _known("gold, what is to be said within longer words", inside, verdicts)


def _other_writes(
    domain: Domain,
    task: TauTask,
    script: Sequence[Rule],
    rules: EpisodeRules,
    played: Demonstration,
    verdicts: list[bool] | None,
) -> Iterator[KnownResult]:
    """Omits one write, or adds one, if the final data differ by it."""
    actions = expected_actions(domain.world(), task)
    writes = [place for place, action in enumerate(actions) if _is_write(domain.world(), action)]
    cases = {}
    if writes:
        cases["the last write left out"] = [
            action for place, action in enumerate(actions) if place != writes[-1]
        ]
    strange = _strange_write(domain, task)
    if strange is not None:
        cases["a write that nobody asked for"] = [*actions, strange]
    for name, changed in cases.items():
        other = demonstrate(domain, task, script, rules, actions=changed)
        worlds = other.world, played.world
        if other.ending != "user_stop" or worlds[0] is None or worlds[1] is None:
            continue
        if not worlds[0].same_as(worlds[1]):
            yield _known(name, other.messages, verdicts)


def _strange_write(domain: Domain, task: TauTask) -> Action | None:
    """Returns another task's write that changes the data after this task."""
    criteria = task.evaluation_criteria or Criteria()
    done = expected_world(domain, task, criteria)
    tried = 0
    for row in domain.tasks.values():
        other = read_task(row)
        if other.id == task.id or other.evaluation_criteria is None:
            continue
        for action in other.evaluation_criteria.actions or ():
            if action.requestor != "assistant" or not _is_write(done, action):
                continue
            tried += 1
            if tried > _MOST_STRANGE_WRITES:
                return None
            world = expected_world(domain, task, criteria)
            result = world.call("assistant", action.name, action.arguments)
            if not result.error and not world.same_as(done):
                return action
    return None


def _is_write(world: World, action: Action) -> bool:
    tool = world.tool(action.name)
    return action.requestor == "assistant" and tool is not None and tool.mutates


def _flooded(messages: Sequence[TauMessage], begun: int) -> list[TauMessage]:
    """Makes the assistant's messages long from message `begun` on."""
    flood = " word" * (MAX_SAID_CHARACTERS // 5 + 1)
    return [
        {**message, "content": message["content"] + flood}
        if place >= begun and message["role"] == "assistant" and has_text(message)
        else message
        for place, message in enumerate(messages)
    ]


def _replaced(messages: Sequence[TauMessage], texts: Sequence[str], form: str) -> list[TauMessage]:
    """Returns the conversation with the assistant's `texts` wrapped in `form`."""

    def changed(content: str) -> str:
        for text in texts:
            content = content.replace(text, form.format(text))
        return content

    return [
        {**message, "content": changed(message["content"])}
        if message["role"] == "assistant" and has_text(message)
        else message
        for message in messages
    ]


def _says(role: str, content: str) -> TauMessage:
    return {"role": role, "content": content}


def _known(
    name: str,
    messages: Sequence[TauMessage],
    verdicts: list[bool] | None,
    *,
    least: float = 0.0,
    most: float = 0.0,
) -> KnownResult:
    output: dict[str, Any] = {
        "messages": [as_openai(message) for message in messages],
        "ending": "",
        "final_answer": "",
        "verdicts": verdicts,
    }
    return KnownResult(name, Result(output=output), least=least, most=most)
