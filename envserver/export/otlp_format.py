"""`--to otlp`: stored rollouts as traces, with the spans that a running server sends.

In: rollouts as they are read back. Out: spans to a receiver of OTLP over HTTP; nothing is written.
What holds: a rollout is one trace, whose ids come from its own, so that sending it twice shows it
once. Where the times of turns are not stored, they are spread evenly over the rollout
(`envserver.times` is "spread").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from envserver_records.errors import ConfigError
from envserver_records.extras import install_command
from envserver_records.records import Message, text_of

from ..telemetry.genai import (
    agent_span,
    chat_span,
    evaluation,
    inputs,
    name_of,
    outputs,
    tool_of,
    tool_span,
    tool_texts,
    used_tokens,
)
from .formats import Options, Row, Written
from .stored import StoredGroup, StoredRollout
from .turn_times import Turn, main_agent, moment, rollout_times, turn_times, used

Json = dict[str, Any]
_SCORING = 0.001
"""Seconds of a score where its time is not stored."""


class Otlp:
    """The format "otlp"."""

    name, suffix = "otlp", ".otlp"

    def __init__(self, options: Options) -> None:
        if not options.otlp_endpoint:
            raise ConfigError(
                "`--to otlp` needs the receiver's address.",
                hint="Use --otlp_endpoint http://localhost:4318 (Phoenix: http://localhost:6006).",
            )
        self._options = options

    def rows(self, group: StoredGroup, kept: Sequence[StoredRollout]) -> Iterator[Row]:
        """Returns a row for each rollout."""
        rendering = group.line["envserver"].get("rendering")
        engine = (group.line["envserver"].get("provenance") or {}).get("engine") or rendering or {}
        parameters = group.line.get("generation_params") or {}
        for rollout in kept:
            yield {
                "rollout": rollout,
                "provider": str(engine.get("server") or "unknown"),
                "sampling": parameters,
            }

    def writer(self) -> OtlpSender:
        """Returns the writer."""
        return OtlpSender(self._options.otlp_endpoint, texts=self._options.otlp_texts)


class OtlpSender:
    """Sends rollouts. Raises StoreError where the receiver does not take them.

    Args:
        texts: spans have prompts and answers, too.
    """

    def __init__(self, endpoint: str, *, texts: bool) -> None:
        try:
            from ..telemetry.otel import FinishedTraces
        except ImportError as error:
            raise ConfigError(
                f"`--to otlp` needs OpenTelemetry: {error}.", hint=install_command("otel")
            ) from error
        self._traces = FinishedTraces(endpoint, service_name="envserver")
        self._texts = texts

    def open(self, folder: Path, shard_rows: int | None) -> None:
        """Does nothing: no file is written."""

    def put(self, row: Row) -> None:
        """Sends a rollout, or keeps it for the next batch."""
        assert isinstance(row, dict)
        rollout: StoredRollout = row["rollout"]
        self._traces.begin(f"{rollout.rollout_id}/{rollout.attempt}")
        began, played = rollout_times(rollout)
        ended = moment(played + (used(rollout, "scoring_seconds") or _SCORING))
        measured = turn_times(rollout, main_agent(rollout), rollout.messages) is not None
        about = {
            "envserver.rollout_id": rollout.rollout_id,
            "envserver.group_id": rollout.group_id,
            "envserver.task_id": rollout.task_id,
            "envserver.environment": rollout.env,
            "envserver.times": "measured" if measured else "spread",
        }
        root = self._traces.add("task", about, began, ended)
        agent = self._traces.add(
            f"invoke_agent {rollout.env}",
            {
                **agent_span(rollout.env, rollout.rollout_id),
                "envserver.attempt": rollout.attempt,
                **({"envserver.limit": rollout.limit} if rollout.limit else {}),
            },
            began,
            played,
            parent=root,
        )
        self._conversations(row, agent, began, played)
        reward = {} if rollout.reward is None else evaluation("reward", rollout.reward)
        told = {"envserver.environment": rollout.env, **reward}
        self._traces.add("score", told, played, ended, parent=root)

    def close(self) -> list[Written]:
        """Sends the rest; there are no files."""
        self._traces.flush()
        return []

    def _conversations(self, row: Json, parent: Any, began: float, ended: float) -> None:
        rollout: StoredRollout = row["rollout"]
        told = [(main_agent(rollout), rollout.model, rollout.messages, rollout.tools)]
        told += [
            (
                other.get("agent"),
                other.get("model") or rollout.model,
                other.get("messages") or [],
                other.get("tools") or [],
            )
            for other in rollout.others
        ]
        for agent, model, messages, tools in told:
            turns = [n for n, one in enumerate(messages) if one.get("role") == "assistant"]
            times = turn_times(rollout, agent, messages) or _spread(began, ended, len(turns))
            starts = [turn.began for turn in times] + [ended]
            for place, turn, following in zip(turns, times, starts[1:], strict=True):
                about = chat_span(
                    model, rollout.rollout_id, agent, row["provider"], row["sampling"]
                )
                if turn.seen is not None and turn.sampled is not None:
                    about |= used_tokens(turn.seen, turn.sampled)
                if self._texts:
                    about |= inputs(messages[:place], tools)
                    reason = rollout.finish_reason if place == len(messages) - 1 else "tool_calls"
                    about |= outputs([(messages[place], reason)])
                name = f"chat {model}"
                self._traces.add(name, about, turn.began, turn.ended, parent=parent, client=True)
                self._tools(rollout, messages, place, parent, (turn.ended, following))

    def _tools(
        self,
        rollout: StoredRollout,
        messages: list[Message],
        place: int,
        parent: Any,
        times: tuple[float, float],
    ) -> None:
        """Adds a span for each tool that the turn at `place` called."""
        results = {
            name_of(one.get("tool_call_id")): one
            for one in messages[place + 1 :]
            if one.get("role") == "tool"
        }
        calls = messages[place].get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            name, call_id, arguments = tool_of(call)
            if (result := results.get(call_id)) is None:
                continue
            about = tool_span(name, call_id, rollout.rollout_id)
            if self._texts:
                about |= tool_texts(arguments, text_of(result))
            self._traces.add(f"execute_tool {name}", about, *times, parent=parent)


def _spread(began: float, ended: float, turns: int) -> list[Turn]:
    """Returns times of turns, each as long as what comes after it."""
    each = (ended - began) / max(1, turns)
    return [Turn(began + turn * each, began + (turn + 0.5) * each) for turn in range(turns)]
