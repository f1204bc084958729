"""`--to inspect`: rollouts as logs that Inspect View opens, written by inspect_ai's own recorder.

A sample is one rollout (or one that was lost, with its error); its store has what Inspect has no
field for, so that `envserver convert` reads the same rollout back.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from envserver_records.errors import ConfigError
from envserver_records.extras import install_command
from envserver_records.records import Json, Message, Result, text_of

from envserver.environment import answer_text
from envserver.export.stored import StoredGroup, StoredRollout
from envserver.export.unified import first_question

from .formats import Format, Options, Row, Written, kept_line

# `message_of(inspect_message(m, ...))` is `m`. Where Inspect's types cannot hold all of a message
# (other keys, the spelling of a call's arguments), the message itself is in its metadata.

WHOLE = "envserver"
"""Key of a message's metadata that holds the message itself."""

_ROLES = {"developer": "system", "function": "tool"}


def inspect_message(message: Message, message_id: str) -> Any:
    from inspect_ai import model

    role = str(message.get("role"))
    shared: Json = {"id": message_id, "content": _content(message)}
    match _ROLES.get(role, role):
        case "system":
            made: Any = model.ChatMessageSystem(**shared)
        case "assistant":
            calls = [_call(call, number) for number, call in enumerate(calls_of(message))]
            made = model.ChatMessageAssistant(**shared, tool_calls=calls or None)
        case "tool":
            made = model.ChatMessageTool(
                **shared,
                tool_call_id=_text(message.get("tool_call_id")),
                function=_text(message.get("name")),
            )
        case _:
            made = model.ChatMessageUser(**shared)
    if message_of(made) != message:
        made.metadata = {WHOLE: message}
    return made


def message_of(made: Any) -> Message:
    """Returns an Inspect message as a chat message; `made` may be another program's."""
    if made.metadata and isinstance(made.metadata.get(WHOLE), dict):
        return dict(made.metadata[WHOLE])
    message: Message = {"role": made.role}
    if made.role == "tool":
        message["tool_call_id"] = made.tool_call_id or ""
    if isinstance(made.content, str):
        message["content"] = made.content
    else:
        thoughts = [part.reasoning for part in made.content if part.type == "reasoning"]
        rest = [part for part in made.content if part.type != "reasoning"]
        only_text = len(rest) == 1 and rest[0].type == "text"
        message["content"] = rest[0].text if only_text else [_part_of(part) for part in rest]
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
    if made.role == "assistant" and made.tool_calls:
        message["tool_calls"] = [_call_of(call) for call in made.tool_calls]
    if made.role == "tool" and made.function:
        message["name"] = made.function
    return message


def calls_of(message: Message) -> list[Json]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def arguments_of(call: Json) -> tuple[str, Json, str | None]:
    """Returns a call's function, its arguments, and why they cannot be read."""
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments")
    problem = None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            problem = f"The arguments are not JSON: {error}"
    if not isinstance(arguments, dict):
        arguments = {} if arguments is None else {"arguments": arguments}
    return str(function.get("name") or "unnamed"), arguments, problem


def _content(message: Message) -> Any:
    from inspect_ai.model import ContentReasoning, ContentText

    content, thoughts = message.get("content"), message.get("reasoning_content")
    if isinstance(content, list):
        parts = [_part(part) for part in content]
    elif thoughts and isinstance(thoughts, str):
        parts = [ContentText(text=text_of(message))]
    else:
        return text_of(message)
    if thoughts and isinstance(thoughts, str):
        parts.insert(0, ContentReasoning(reasoning=thoughts))
    return parts


def _part(part: Any) -> Any:
    from inspect_ai.model import ContentData, ContentImage, ContentText

    if isinstance(part, dict):
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            return ContentText(text=part["text"])
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else None
        if isinstance(url, str) and url.startswith("data:"):  # Inspect View loads no other
            return ContentImage(image=url)
        return ContentData(data=part)
    return ContentText(text=str(part))


def _part_of(part: Any) -> Any:
    if part.type == "text":
        return {"type": "text", "text": part.text}
    if part.type == "image":
        return {"type": "image_url", "image_url": {"url": part.image}}
    if part.type == "data":
        return part.data
    return part.model_dump(exclude_none=True)


def _call(call: Json, number: int) -> Any:
    from inspect_ai.tool import ToolCall

    name, arguments, problem = arguments_of(call)
    return ToolCall(
        id=_text(call.get("id")) or f"call-{number}",
        function=name,
        arguments=arguments,
        parse_error=problem,
    )


def _call_of(call: Any) -> Json:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function, "arguments": arguments},
    }


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


Span = tuple[float, float]
"""Begin and end, seconds since 1970."""


class Turn(NamedTuple):
    """A turn of a model: times, and tokens seen and sampled, if known."""

    began: float
    ended: float
    seen: int | None = None
    sampled: int | None = None


_LATEST = 9.2e9
"""A moment of the year 2261, the last one of 64 bits of nanoseconds: files may say anything."""


def rollout_times(rollout: StoredRollout) -> Span:
    seconds = used(rollout, "seconds")
    began = moment(rollout.started_at or rollout.created_at - seconds)
    return began, moment(began + seconds)


def used(rollout: StoredRollout, name: str) -> float:
    """Returns a number of `rollout.usage`, at least 0; 0 where there is none."""
    value = rollout.usage.get(name)
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return 0.0
    return max(0.0, float(value))


def turn_times(
    rollout: StoredRollout, agent: str | None, messages: Sequence[Message]
) -> list[Turn] | None:
    """Returns the turns of the model's messages in the conversation of `agent`.

    None where they are not stored, or where the conversation does not have all of its calls.
    """
    turns = sum(message.get("role") == "assistant" for message in messages)
    calls = rollout.agent_calls.get(agent or "", [])
    began = rollout.started_at
    measured = {
        timing.call: Turn(
            moment(began + timing.started),
            moment(began + timing.started + timing.seconds),
            timing.start,
            None if timing.start is None or timing.end is None else timing.end - timing.start,
        )
        for timing in rollout.timings
        if timing.kind == "engine"
    }
    if not rollout.started_at or len(calls) != turns or not measured.keys() >= set(calls):
        return None
    return [measured[call] for call in calls]


def main_agent(rollout: StoredRollout) -> str | None:
    """Returns the agent of `rollout.messages`; None if it is the only one without a name."""
    others = {other.get("agent") for other in rollout.others}
    named = [row.agent for row in rollout.rows if row.agent and row.agent not in others]
    if named:
        return named[0]
    known = [agent for agent in rollout.agent_calls if agent and agent not in others]
    return known[0] if len(known) == 1 else None


def moment(seconds: float) -> float:
    """Returns a time in seconds since 1970 that every format can hold."""
    return min(max(seconds, 0.0), _LATEST) if math.isfinite(seconds) else 0.0


_STOPS = {"stop": "stop", "length": "max_tokens", "tool_calls": "tool_calls"}
_LIMITS = {"turns": "turn", "tokens": "token", "time": "time", "context": "context"}
REWARD = "reward"
"""Name of the score that is a rollout's reward."""
LOST = "lost"
"""Key of the metadata of a lost rollout: the kind of its failure."""


@dataclass(frozen=True)
class Sample:
    """An `EvalSample` and what a log's header needs; times in seconds since 1970."""

    sample: Any
    task: str
    model: str
    began: float
    ended: float


def sample_of(rollout: StoredRollout, store: Json) -> Sample:
    from inspect_ai.log import EvalSample

    began, ended = rollout_times(rollout)
    messages = [
        inspect_message(message, f"{rollout.rollout_id}-{number}")
        for number, message in enumerate(rollout.messages)
    ]
    scores = _scores(rollout)
    answered = [message for message in messages if message.role == "assistant"]
    sample = EvalSample(
        id=rollout.task_id,
        epoch=1,
        uuid=rollout.rollout_id,
        input=first_question(rollout.messages) or rollout.task_id,
        target="",
        messages=messages,
        output=_output(rollout.model, answered[-1], rollout) if answered else _no_output(rollout),
        scores=scores,
        metadata=_metadata(rollout),
        store=store,
        events=list(_events(rollout, messages, scores, (began, ended))),
        model_usage={rollout.model or "unknown": _usage(rollout)},
        started_at=_moment(began).isoformat(),
        completed_at=_moment(ended).isoformat(),
        total_time=ended - began,
        limit=_limit(rollout),
        turn_count=rollout.turns,
    )
    return Sample(sample, rollout.env, rollout.model or "unknown", began, ended)


def lost_sample(group: StoredGroup, sibling: StoredRollout, kind: str) -> Sample:
    from inspect_ai.log import EvalError, EvalSample

    said = [
        str(failure.get("message", "")) for failure in group.failures if failure.get("kind") == kind
    ]
    words = f"{kind}: {said[-1]}" if said else kind
    sample = EvalSample(
        id=sibling.task_id,
        epoch=1,
        input=first_question(sibling.messages) or sibling.task_id,
        target="",
        metadata={"group_id": sibling.group_id, LOST: kind},
        error=EvalError(message=words, traceback=words, traceback_ansi=words),
    )
    _, ended = rollout_times(sibling)
    return Sample(sample, sibling.env, sibling.model or "unknown", ended, ended)


def _scores(rollout: StoredRollout) -> Json:
    from inspect_ai.scorer import Score

    scores: Json = {}
    if rollout.reward is not None and math.isfinite(rollout.reward):
        answer = answer_text(Result(output=rollout.output, messages=rollout.messages))
        scores[REWARD] = Score(
            value=rollout.reward, answer=answer or None, metadata=rollout.metrics or None
        )
    agents = {f"{REWARD}/{agent}": value for agent, value in rollout.rewards.items()}
    for name, value in {**rollout.components, **agents}.items():
        if math.isfinite(value):
            scores.setdefault(name, Score(value=value))
    return scores


def _metadata(rollout: StoredRollout) -> Json:
    names = (
        *("group_id", "rollout_id", "attempt", "policy_version", "split", "turns", "flags"),
        *("limit", "truncated", "finish_reason", "agent_metrics", "turn_rewards"),
    )
    found = {name: msgspec.to_builtins(getattr(rollout, name)) for name in names}
    found |= {"tokens": rollout.length, "sampled_tokens": rollout.sampled}
    versions = {span[0] for row in rollout.rows for span in row.versions if span[0] >= 0}
    return {**found, "versions": sorted(versions)} if versions else found


def _limit(rollout: StoredRollout) -> Any:
    from inspect_ai.log import EvalSampleLimit

    if rollout.limit is None:
        return None
    reached: dict[str, float] = {
        "turns": rollout.turns,
        "tokens": rollout.sampled,
        "time": used(rollout, "seconds"),
        "context": rollout.length,
    }
    return EvalSampleLimit(
        type=_LIMITS.get(rollout.limit, "custom"),
        limit=reached.get(rollout.limit, 0),
        reason=rollout.limit,
    )


def _events(
    rollout: StoredRollout, messages: list[Any], scores: Json, times: Span
) -> Iterator[Any]:
    from inspect_ai.event import ScoreEvent, SpanBeginEvent, SpanEndEvent

    agents = [(main_agent(rollout), rollout.model, rollout.messages, messages, rollout.tools)]
    for number, other in enumerate(rollout.others):
        said = other.get("messages") or []
        prefix = f"{rollout.rollout_id}-{number}"
        theirs = [
            inspect_message(message, f"{prefix}-{place}") for place, message in enumerate(said)
        ]
        model = other.get("model") or rollout.model
        agents.append((other.get("agent"), model, said, theirs, other.get("tools") or []))
    began, ended = times
    for place, (agent, model, said, theirs, tools) in enumerate(agents):
        span = f"{rollout.rollout_id}-agent-{place}" if rollout.others else None
        name = agent or "main"
        if span:
            begin = _at(began, times)
            yield SpanBeginEvent(id=span, span_id=span, type="agent", name=name, **begin)
        yield from _conversation(rollout, model, said, theirs, tools, span, agent, times)
        if span:
            yield SpanEndEvent(id=span, span_id=span, **_at(ended, times))
    for name, score in scores.items():
        yield ScoreEvent(score=score, scorer=name, **_at(ended, times))


def _conversation(
    rollout: StoredRollout,
    model: str,
    said: list[Message],
    messages: list[Any],
    tools: list[Json],
    span: str | None,
    agent: str | None,
    times: Span,
) -> Iterator[Any]:
    """Yields the events of a conversation; all at its begin if the times of turns are unknown."""
    from inspect_ai.event import ModelEvent, ToolEvent
    from inspect_ai.model import GenerateConfig

    offered = list(_tools(tools))
    results = {message.get("tool_call_id"): place for place, message in enumerate(said)}
    results.pop(None, None)
    measured = turn_times(rollout, agent, said)
    turns = iter([*measured, Turn(*times)] if measured else repeat(Turn(times[0], times[0])))
    turn = next(turns)
    for place, (message, made) in enumerate(zip(said, messages, strict=True)):
        if made.role != "assistant":
            continue
        is_last = place == len(said) - 1
        yield ModelEvent(
            model=model or "unknown",
            role=agent if span else None,
            input=messages[:place],
            tools=offered,
            tool_choice="auto",
            config=GenerateConfig(),
            output=_output(model, made, rollout if is_last else None, turn),
            span_id=span,
            **_at(turn.began, times, turn.ended if measured else None),
        )
        called, turn = turn.ended, next(turns)
        for call, theirs in zip(calls_of(message), made.tool_calls or (), strict=True):
            name, arguments, _ = arguments_of(call)
            found = results.get(call.get("id"))
            yield ToolEvent(
                id=theirs.id,
                function=name,
                arguments=arguments,
                result="" if found is None else text_of(said[found]),
                message_id=None if found is None else messages[found].id,
                span_id=span,
                **_at(called, times, turn.began if measured else None),
            )


def _at(begin: float, times: Span, end: float | None = None) -> Json:
    timing: Json = {"timestamp": _moment(begin), "working_start": max(0.0, begin - times[0])}
    if end is not None:
        timing |= {"completed": _moment(end), "working_time": max(0.0, end - begin)}
    return timing


def _tools(tools: list[Json]) -> Iterator[Any]:
    from inspect_ai.tool import ToolInfo
    from pydantic import ValidationError

    for tool in tools:
        function = tool.get("function")
        function = function if isinstance(function, dict) else tool
        name, description = str(function.get("name")), str(function.get("description") or "")
        try:
            yield ToolInfo.model_validate(
                {
                    "name": name,
                    "description": description,
                    "parameters": function.get("parameters") or {},
                }
            )
        except ValidationError:  # a schema that Inspect does not know: the store has it whole
            yield ToolInfo(name=name, description=description)


def _output(model: str, message: Any, last: StoredRollout | None, turn: Turn | None = None) -> Any:
    """Returns the output of one turn; `last`: the rollout, at its last turn."""
    from inspect_ai.model import ChatCompletionChoice, ModelOutput, ModelUsage

    stop = "tool_calls" if message.tool_calls else "stop"
    if last is not None:
        stop = _STOPS.get(last.finish_reason or "", "unknown")
    choice = ChatCompletionChoice(message=message, stop_reason=stop)
    usage = None
    if turn is not None and turn.seen is not None and turn.sampled is not None:
        total = turn.seen + turn.sampled
        usage = ModelUsage(input_tokens=turn.seen, output_tokens=turn.sampled, total_tokens=total)
    return ModelOutput(model=model or "unknown", choices=[choice], usage=usage)


def _no_output(rollout: StoredRollout) -> Any:
    from inspect_ai.model import ModelOutput

    return ModelOutput(model=rollout.model or "unknown")


def _usage(rollout: StoredRollout) -> Any:
    from inspect_ai.model import ModelUsage

    sampled = int(used(rollout, "completion_tokens")) or rollout.sampled
    seen = int(used(rollout, "prompt_tokens"))
    return ModelUsage(input_tokens=seen, output_tokens=sampled, total_tokens=seen + sampled)


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


STORE = "envserver"
"""Key of a sample's store that holds the rollout as a line of `process`, without messages."""

_TOKENS = ("tokens", "masks", "inference_logprobs")
_KEPT = (*_TOKENS, "scores", "generation_params", "env_id", "envserver")


class Inspect(Format):
    name, suffix = "inspect", ".eval"

    def __init__(self, options: Options) -> None:
        require_inspect()
        super().__init__(options)

    def rows(self, group: StoredGroup, kept: Sequence[StoredRollout]) -> Iterator[Row]:
        """Returns a row for each kept rollout and, if all are kept, for each that was lost."""
        for rollout in kept:
            facts = _facts(group, rollout, tokens=self.options.tokens)
            yield {"sample": sample_of(rollout, {STORE: facts})}
        if len(kept) == len(group.rollouts):
            for kind, number in group.lost.items():
                for _ in range(number):
                    yield {"sample": lost_sample(group, kept[0], kind)}

    def writer(self, folder: Path, shard_rows: int | None) -> InspectLogs:
        return InspectLogs(folder, shard_rows, self.options.title)


class InspectLogs:
    """Writes a log for each environment and model, and another after `shard_rows` samples."""

    def __init__(self, folder: Path, shard_rows: int | None, title: str) -> None:
        from inspect_ai.log._recorders.eval import EvalRecorder

        self._folder, self._shard_rows, self._title = folder, shard_rows, title
        self._recorder = EvalRecorder(str(folder))
        self._logs: dict[tuple[str, str], _Log] = {}
        self._written: list[Written] = []
        self._runner = asyncio.Runner()

    def put(self, row: Row) -> None:
        from inspect_ai.log import condense_sample

        assert isinstance(row, dict)
        sample: Sample = row["sample"]
        key = (sample.task, sample.model)
        if key not in self._logs:
            log = _Log(sample, len(self._written) + len(self._logs), self._title)
            place = str(log.path_in(self._folder))
            self._runner.run(self._recorder.log_init(log.key, place))
            self._logs[key] = log
        log = self._logs[key]
        made = condense_sample(log.add(sample))
        self._runner.run(self._recorder.log_sample(log.key, made, write_through=True))
        if log.samples == self._shard_rows:
            self._finish(self._logs.pop(key))

    def close(self) -> list[Written]:
        for log in self._logs.values():
            self._finish(log)
        self._runner.close()
        return self._written

    def _finish(self, log: _Log) -> None:
        from inspect_ai.log import EvalPlan

        spec = log.spec()
        self._runner.run(self._recorder.log_start(spec, EvalPlan()))
        finished = self._recorder.log_finish(
            spec, "success", log.stats(), log.results(), None, header_only=True
        )
        self._runner.run(finished)
        self._written.append(Written(log.path_in(self._folder).name, log.samples))


class _Log:
    def __init__(self, first: Sample, number: int, title: str) -> None:
        self._task, self._model, self._title = first.task, first.model, title
        self._created = self._ended = first.ended
        self._began = first.began
        self.samples = self._completed = 0
        self._epochs: Counter[str] = Counter()
        self._sums: dict[str, tuple[float, int]] = {}
        self._usage: Any = None
        digest = f"{first.task}\0{first.model}\0{first.sample.uuid}\0{number}".encode()
        self._id = hashlib.blake2b(digest, digest_size=11).hexdigest()
        self.key = self.spec()
        """Identifies the log; it does not know its samples."""

    def path_in(self, folder: Path) -> Path:
        """Returns the path, named as Inspect names logs: time, task, id."""
        task = re.sub(r"[^A-Za-z0-9.]+", "-", self._task).strip("-") or "task"
        moment = datetime.fromtimestamp(self._created, UTC).isoformat(timespec="seconds")
        return folder / f"{moment.replace(':', '-')}_{task}_{self._id}.eval"

    def add(self, sample: Sample) -> Any:
        """Counts a sample and returns it with its epoch; a task that comes again goes on."""
        made = sample.sample
        self._epochs[str(made.id)] += 1
        made.epoch = self._epochs[str(made.id)]
        self.samples += 1
        self._completed += made.error is None
        self._began = min(self._began, sample.began)
        self._ended = max(self._ended, sample.ended)
        for name, score in (made.scores or {}).items():
            total, number = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + float(score.value), number + 1)
        for usage in made.model_usage.values():
            self._usage = usage if self._usage is None else self._usage + usage
        return made

    def spec(self) -> Any:
        from inspect_ai.log import EvalConfig, EvalDataset, EvalSpec

        return EvalSpec(
            eval_id=self._id,
            run_id=self._id,
            task_id=self._id,
            created=_iso(self._created),
            task=self._task,
            task_display_name=self._title or None,
            dataset=EvalDataset(
                name=self._task, samples=len(self._epochs), sample_ids=list(self._epochs)
            ),
            model=self._model,
            config=EvalConfig(epochs=max(self._epochs.values(), default=1)),
            metadata={"exported_by": "envserver"},
        )

    def stats(self) -> Any:
        from inspect_ai.log import EvalStats

        usage = {} if self._usage is None else {self._model: self._usage}
        return EvalStats(
            started_at=_iso(self._began), completed_at=_iso(self._ended), model_usage=usage
        )

    def results(self) -> Any:
        from inspect_ai.log import EvalMetric, EvalResults, EvalScore

        return EvalResults(
            total_samples=self.samples,
            completed_samples=self._completed,
            scores=[
                EvalScore(
                    name=name,
                    scorer=name,
                    scored_samples=number,
                    metrics={"mean": EvalMetric(name="mean", value=total / number)},
                )
                for name, (total, number) in self._sums.items()
            ],
        )


def require_inspect() -> None:
    """Raises ConfigError: inspect_ai is not installed."""
    try:
        import inspect_ai.log  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"Logs of Inspect need inspect_ai, which is not installed: {error}.",
            hint=install_command("inspect"),
        ) from error


def _facts(group: StoredGroup, rollout: StoredRollout, *, tokens: bool) -> Json:
    """Returns the line of a group with this rollout alone, without conversations of rows."""
    line = kept_line(group, {rollout.rollout_id})
    line = {key: line[key] for key in _KEPT if line.get(key) is not None}
    (raw,) = line["envserver"]["rollouts"]
    dropped = ("messages", "calls", "service_calls")
    raw = {key: value for key, value in raw.items() if key not in dropped}
    if not tokens:
        line |= {key: [[] for _ in raw["rows"]] for key in _TOKENS}
    wanted = group.asked or len(group.rollouts)
    line["envserver"] = {**line["envserver"], "rollouts": [raw], "asked": wanted, "failures": []}
    return line


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
