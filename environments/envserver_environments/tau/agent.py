"""A live conversation: an assistant model serves a customer in a world of this episode.

The scorer replays the whole conversation in a fresh world. The assistant's model sees the policy,
its tools, their results and the customer's messages; never the scenario, the task's set-up or the
customer's own calls.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from envserver_records.tasks import Json

from envserver import LimitReached, PublicTask, Rollout

from .domains.toolkit import Requestor
from .domains.world import Domain
from .episodes import Episode, EpisodeRules
from .prompts import agent_prompt
from .speaking import (
    ModelSpeaker,
    Speaker,
    TextSpeaker,
    UserKind,
    Utterance,
    as_openai,
    customer_of,
    seen_by,
)
from .tasks import TauMessage, has_text, read_task

AGENT = "agent"
CUT_OFF, LIMIT = "cut_off", "limit"
"""Endings beside those of an episode: a message without its end, and a limit of the rollout."""
_SHOWN_CHARACTERS = 300

Protocol = Literal["tools", "text"]


@dataclass(frozen=True)
class Manner:
    """Options of conversations."""

    rules: EpisodeRules  # when they end early
    user: UserKind  # the simulated customer
    protocol: Protocol  # how the assistant calls tools


async def solve(task: PublicTask, run: Rollout, domain: Domain, manner: Manner) -> Json:
    known = read_task(task.public["task"])
    episode = Episode(domain, known, manner.rules)
    begun = len(episode.messages)
    prompt = agent_prompt(domain.policy, task.public.get("context", ""))
    loaded = {"path": f"{domain.name}/{known.id}"}
    run.log_action("load_context", loaded, prompt[:_SHOWN_CHARACTERS])
    sides: dict[Requestor, Speaker] = {
        "assistant": _assistant(run, prompt, episode, manner.protocol),
        "user": customer_of(manner.user, task.public["user_script"], known, episode, run),
    }
    ending = await converse(episode, sides, run)
    messages = [as_openai(message) for message in episode.messages]
    answer = _last_words(episode.messages[begun:])
    run.log_action("finalize", {"ending": ending}, answer)
    return {"messages": messages, "ending": ending, "final_answer": answer}


async def converse(episode: Episode, sides: dict[Requestor, Speaker], run: Rollout) -> str:
    """Lets both sides speak in turn until the end; returns how it ended."""
    dropped: Counter[str] = Counter()
    while (speaker := episode.speaker) is not None:
        side = sides[speaker]
        try:
            utterance = await side.speak()
        except LimitReached:  # the conversation so far is kept for readers; its reward is 0
            return LIMIT
        if utterance.cut_off:
            return CUT_OFF
        if utterance.dropped_words:
            dropped[speaker] += 1
            run.log_metric(f"dropped_words_{speaker}", float(dropped[speaker]))
        results = episode.say(utterance.content, utterance.calls)
        _log(run, speaker, utterance, results)
        if utterance.calls:
            side.receive(results)
        elif utterance.content:
            sides["user" if speaker == "assistant" else "assistant"].hear(utterance.content)
    return str(episode.ending)


def _assistant(run: Rollout, prompt: str, episode: Episode, protocol: Protocol) -> ModelSpeaker:
    tools = [tool.schema for tool in episode.world.agent.tools().values()]
    # The greeting is in its prompt: many chat templates demand that the user speaks first.
    begun = episode.messages if episode.task.history else []
    kind = TextSpeaker if protocol == "text" else ModelSpeaker
    return kind(run, AGENT, prompt, tools, seen_by("assistant", begun))


def _log(run: Rollout, speaker: Requestor, utterance: Utterance, results: list[TauMessage]) -> None:
    if not utterance.calls:
        run.log_action("say" if speaker == "assistant" else "user", {}, utterance.content or "")
        return
    prefix = "tool" if speaker == "assistant" else "user_tool"
    for call, result in zip(utterance.calls, results, strict=True):
        failed = result["content"] or "failed" if result.get("error") else ""
        output = None if failed else result["content"]
        run.log_action(f"{prefix}:{call['name']}", call["arguments"], output, error=failed)


def _last_words(messages: list[TauMessage]) -> str:
    said = (m["content"] for m in reversed(messages) if m["role"] == "assistant" and has_text(m))
    return str(next(said, ""))
