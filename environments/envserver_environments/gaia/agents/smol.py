"""smolagents' CodeAgent and ToolCallingAgent, with this package's executor and memory.

Their loop, parsing and memory are smolagents' own. The differences: each turn of the model is sent
back as it was sampled, plans are turns of the same conversation, tool calls are native, and a
prompt is written once. So an ordinary run is one sequence of tokens. The prompts are this
package's, or those of smolagents' templates, of which a plan's become turns of the conversation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import smolagents
from smolagents.agents import EMPTY_PROMPT_TEMPLATES, ToolOutput, populate_template
from smolagents.local_python_executor import CodeOutput, PythonExecutor, fix_final_answer_code
from smolagents.memory import ActionStep, PlanningStep, Timing, ToolCall
from smolagents.models import ChatMessage, MessageRole
from smolagents.utils import AgentParsingError, parse_code_blobs

from ..interpreter.inside import ANSWER
from ..interpreter.process import Interpreter, Outcome, observation
from . import prompts
from .model import ProxyModel
from .tool_use import Tools


class StepFailed(Exception):
    """The code raised, was stopped or died; the message is for the model."""


class ProcessExecutor(PythonExecutor):  # type: ignore[misc]  # a class of a library without types
    """Executes code for smolagents' CodeAgent.

    Args:
        interpreter: opened and closed by its owner.
    """

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self._variables: dict[str, Any] = {}
        self.outcome: Outcome | None = None
        """Outcome of the last step."""

    def send_tools(self, tools: Mapping[str, Callable[..., Any]]) -> None:
        """Functions of the code, beside `final_answer`; to be sent before the first step."""
        for name, tool in tools.items():
            if name != ANSWER:  # those that the interpreter has raise errors; smolagents' do not
                self._interpreter.tools.setdefault(name, tool)

    def send_variables(self, variables: dict[str, Any]) -> None:
        """Variables of the code, of the kinds that have a literal."""
        self._variables.update(variables)

    def __call__(self, code: str) -> CodeOutput:
        """Raises StepFailed, which smolagents tells the model."""
        if self._variables:
            values, self._variables = self._variables, {}
            lines = (f"{name} = {value!r}" for name, value in values.items())
            self._interpreter.run("\n".join(lines))
        outcome = self.outcome = self._interpreter.run(code)
        if outcome.trouble is not None:
            raise StepFailed(outcome.error)
        is_final = outcome.answer is not None
        output = outcome.answer if is_final else outcome.value
        return CodeOutput(output=output, logs=outcome.printed, is_final_answer=is_final)


# Compiles the patterns of both here, once, not in every worker that is forked.
fix_final_answer_code(parse_code_blobs("<code>final_answer(0)</code>", ("<code>", "</code>")))


_final_answer = smolagents.FinalAnswerTool()  # once: smolagents takes its time to check a tool


class _AsSampled:
    """A memory that keeps the model's turns as they were sampled."""

    model: ProxyModel
    memory: Any
    tools: dict[str, Any]
    prompt_templates: Any
    _prompt: str | None
    """The system prompt; None: smolagents' templates are used."""

    def _setup_tools(self, tools: list[smolagents.Tool], add_base_tools: bool) -> None:
        self.tools = {tool.name: tool for tool in (*tools, _final_answer)}

    def initialize_system_prompt(self) -> str:
        if self._prompt is not None:
            return self._prompt
        prompt: str = super().initialize_system_prompt()  # type: ignore[misc]  # of smolagents
        return prompt

    def write_memory_to_messages(self, summary_mode: bool = False) -> list[ChatMessage]:
        """Returns the whole conversation so far."""
        messages: list[ChatMessage] = self.memory.system_prompt.to_messages()
        for step in self.memory.steps:
            if isinstance(step, PlanningStep):
                go_on = step.to_messages()[-1] if self._prompt is None else _user(prompts.GO_ON)
                messages += [step.model_input_messages[-1], step.model_output_message, go_on]
            elif not isinstance(step, ActionStep):
                messages += step.to_messages()
            elif step.model_output_message is not None:
                messages += [step.model_output_message, *self.observed(step)]
        return messages

    def observed(self, step: ActionStep) -> list[ChatMessage]:
        """Returns the text that the model sees of a step."""
        raise NotImplementedError

    def _generate_planning_step(
        self, task: str, is_first_step: bool, step: int
    ) -> Iterator[PlanningStep]:
        began = time.time()
        request = self._plan_request(task, is_first_step)
        messages = [*self.write_memory_to_messages(), _user(request)]
        answer = self.model.plan(messages)
        yield PlanningStep(
            model_input_messages=messages,
            model_output_message=answer,
            plan=answer.content or "",
            token_usage=answer.token_usage,
            timing=Timing(start_time=began, end_time=time.time()),
        )

    def _plan_request(self, task: str, is_first: bool) -> str:
        if self._prompt is not None:
            return prompts.PLAN
        name = "initial_plan" if is_first else "update_plan_post_messages"
        variables = {"task": task, "tools": self.tools, "managed_agents": {}}
        request: str = populate_template(self.prompt_templates["planning"][name], variables)
        return request


class CodeAgent(_AsSampled, smolagents.CodeAgent):  # type: ignore[misc]  # no types there
    """Acts by Python code.

    Args:
        system_prompt: None: smolagents' templates are used, with `tools` and `instructions`.
        characters: maximum length of an observation.
    """

    def __init__(
        self,
        tools: list[smolagents.Tool],
        model: ProxyModel,
        executor: ProcessExecutor,
        system_prompt: str | None,
        characters: int,
        **options: Any,
    ) -> None:
        self._prompt = system_prompt
        self._characters = characters
        super().__init__(
            tools,
            model,
            executor=executor,
            prompt_templates=_templates(system_prompt),
            additional_authorized_imports=["*"],
            **options,
        )

    def observed(self, step: ActionStep) -> list[ChatMessage]:
        if isinstance(step.error, AgentParsingError):
            return [_user(prompts.NO_CODE)]
        head = prompts.OBSERVED if step.error is None else prompts.FAILED
        return [_user(f"{head}{step.observations}")]

    def _step_stream(self, memory_step: ActionStep) -> Iterator[Any]:
        """The library's, with the observation as we write it."""
        executor = self.python_executor
        executor.outcome = None
        try:
            yield from super()._step_stream(memory_step)
        finally:
            if executor.outcome is not None:
                memory_step.observations = observation(executor.outcome, self._characters)


class ToolCallingAgent(_AsSampled, smolagents.ToolCallingAgent):  # type: ignore[misc]
    """Acts by native tool calls, whose results go back by their ids.

    Args:
        system_prompt: None: smolagents' templates are used, with `tools` and `instructions`.
        callable_tools: what the calls run.
    """

    def __init__(
        self,
        tools: list[smolagents.Tool],
        model: ProxyModel,
        callable_tools: Tools,
        system_prompt: str | None,
        **options: Any,
    ) -> None:
        self._prompt = system_prompt
        self._tools = callable_tools
        self.results: dict[int, list[tuple[str, str, bool]]] = {}
        """For each step: a call's id, its result, and whether it was valid."""
        super().__init__(tools, model, prompt_templates=_templates(system_prompt), **options)

    def observed(self, step: ActionStep) -> list[ChatMessage]:
        results = self.results.get(step.step_number)
        if not results:
            return [_user(prompts.NO_CALL)]
        return [
            ChatMessage(
                role=MessageRole.USER,
                content=text,
                raw={"role": "tool", "tool_call_id": call_id, "content": text},
            )
            for call_id, text, _ in results
        ]

    def process_tool_calls(
        self, chat_message: ChatMessage, memory_step: ActionStep
    ) -> Iterator[ToolOutput]:
        """Runs the calls one after the other; an invalid call gets an error result and does not end
        the run."""
        calls = (chat_message.raw or {}).get("tool_calls") or []
        results = self.results.setdefault(memory_step.step_number, [])
        for call in calls:
            is_answer = call["function"]["name"] == ANSWER
            if is_answer and len(calls) > 1:
                results.append((call["id"], "Error: call final_answer alone.", False))
                continue
            result = self._tools.run(call)
            results.append((call["id"], result.text, result.ok))
            if is_answer and result.ok:
                made = ToolCall(name=ANSWER, arguments=call["function"]["arguments"], id=call["id"])
                yield ToolOutput(
                    id=call["id"],
                    output=result.text,
                    is_final_answer=True,
                    observation=result.text,
                    tool_call=made,
                )
        memory_step.observations = "\n".join(text for _, text, _ in results)


def _templates(system_prompt: str | None) -> Any:
    return None if system_prompt is None else EMPTY_PROMPT_TEMPLATES  # None: smolagents' own


def _user(text: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.USER, content=text)
