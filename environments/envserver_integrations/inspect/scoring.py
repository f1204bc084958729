"""Inspect's scorers, in the rollout or in envserver's scorer process. `State` is what a solver
leaves, as JSON: a worker sends it, a scorer makes Inspect's TaskState of it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from envserver_records.tasks import Json
from inspect_ai import Task, score_async
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalConfig, EvalDataset, EvalLog, EvalSample, EvalSpec
from inspect_ai.model import (
    ChatMessage,
    GenerateConfig,
    ModelAPI,
    ModelOutput,
    get_model,
    messages_from_openai,
    messages_to_openai,
    modelapi,
)
from inspect_ai.scorer import Score, Scorer, Target, scorer
from inspect_ai.scorer._scorer import unique_scorer_name
from inspect_ai.solver import TaskState
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from envserver import ConfigError, Judge, Message, Result

NAME = "envserver-judge/judge"


class State(BaseModel):
    """What a solver left of a sample."""

    messages: list[ChatMessage]
    output: ModelOutput
    store: dict[str, Any] = {}  # the sample's
    marked: list[tuple[bool | None, int]] = []  # of the choices: [correct, original position]
    metadata: dict[str, Any] = {}  # entries that the solver added or changed


def state_of(state: TaskState, before: Mapping[str, Any]) -> State:
    changed = {name: value for name, value in state.metadata.items() if before.get(name) != value}
    return State(
        messages=list(state.messages),
        output=state.output,
        store=to_jsonable_python(dict(state.store.items()), fallback=str),
        marked=[(choice.correct, choice.original_position) for choice in state.choices],
        metadata=to_jsonable_python(changed, fallback=str),
    )


async def state_of_result(result: Result) -> State | None:
    """The state of a rollout whose solver left none: a limit cut it off, or it is a bare text.
    None: there is nothing to score."""
    messages: list[Message] = list(result.messages)
    if isinstance(result.output, str) and not messages:
        messages = [{"role": "assistant", "content": result.output}]
    if not messages or messages[-1].get("role") != "assistant":
        return None
    made = await messages_from_openai(messages)
    return State(messages=made, output=ModelOutput.from_message(made[-1]))


def named_scorers(task: Task) -> dict[str, Scorer]:
    """Returns the task's scorers by name; of two with the same name the second is NAME1."""
    named: dict[str, Scorer] = {}
    for score in task.scorer or []:
        named[unique_scorer_name(score, list(named))] = score
    return named


async def score_state(
    task: Task, sample: Sample, hidden: Mapping[str, Any], state: State, judge: Judge
) -> Json:
    """Runs the task's scorers outside of the rollout, with the judge as their model; returns their
    values."""
    values: Json = {}

    @scorer(metrics=[])  # type: ignore[untyped-decorator, unused-ignore]
    def all_scorers() -> Scorer:
        async def score(rebuilt: TaskState, target: Target) -> Score:
            _mark(rebuilt, state)
            for name, score_by in named_scorers(task).items():
                made: Score | None = await score_by(rebuilt, target)
                values[name] = None if made is None else made.value
            return Score(value=0)

        return score

    model = get_model(NAME, memoize=False, config=GenerateConfig(max_retries=0), judge=judge)
    log = EvalLog(
        eval=EvalSpec(
            created=datetime.now(UTC).isoformat(),
            task=task.name,
            dataset=EvalDataset(),
            model=NAME,
            config=EvalConfig(),
        ),
        samples=[
            EvalSample(
                id=sample.id,
                epoch=1,
                input=sample.input,
                choices=sample.choices,
                target=hidden["target"],
                messages=state.messages,
                output=state.output,
                metadata={**hidden["metadata"], **state.metadata},
                store=state.store,
            )
        ],
    )
    roles = dict.fromkeys([*(task.model_roles or {}), "grader"], model)
    await score_async(
        log, [all_scorers()], model=model, model_roles=roles, action="overwrite", display="none"
    )
    return values


def _mark(rebuilt: TaskState, state: State) -> None:
    choices = rebuilt.choices
    if len(state.marked) != len(choices):
        return
    choices._choices = [choices[position] for _, position in state.marked]
    for choice, (correct, position) in zip(choices, state.marked, strict=True):
        choice.correct, choice.original_position = correct, position


class JudgeAPI(ModelAPI):  # type: ignore[misc] # Inspect is not installed here
    """The model of `--judge.*`, for scorers that ask one."""

    def __init__(self, model_name: str, judge: Judge, **options: Any) -> None:
        super().__init__(model_name, **options)
        self.judge = judge

    async def generate(
        self, input: list[ChatMessage], tools: list[Any], tool_choice: Any, config: GenerateConfig
    ) -> ModelOutput:
        """Asks the judge."""
        if tools:
            raise ConfigError(
                "A scorer of this task gives tools to its model, which a judge cannot use.",
                hint="--env.scoring rollout",
            )
        sampling = {"temperature": config.temperature, "max_tokens": config.max_tokens}
        sampling = {name: value for name, value in sampling.items() if value is not None}
        reply = await self.judge.chat(await messages_to_openai(input), **sampling)
        return ModelOutput.from_content(reply.model, reply.content)


@modelapi(name="envserver-judge")  # type: ignore[untyped-decorator]
def judge_api() -> type[ModelAPI]:
    return JudgeAPI
