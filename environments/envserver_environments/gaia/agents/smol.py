"""smolagents' CodeAgent and ToolCallingAgent, with this package's executor and memory.

Each turn of the model is sent back as it was sampled, plans are turns of the same conversation,
tool calls are native, and a prompt is written once: so an ordinary run is one sequence of tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import smolagents
from envserver_records.tasks import Json
from envserver_tools.calling import visible_text
from envserver_tools.smolagents_adapter import as_smolagents
from smolagents.agents import EMPTY_PROMPT_TEMPLATES, ActionOutput, ToolOutput, populate_template
from smolagents.local_python_executor import CodeOutput, PythonExecutor, fix_final_answer_code
from smolagents.memory import ActionStep, PlanningStep, Timing, ToolCall
from smolagents.models import (
    ChatMessage,
    ChatMessageToolCall,
    ChatMessageToolCallFunction,
    MessageRole,
    Model,
    TokenUsage,
)
from smolagents.monitoring import AgentLogger, LogLevel
from smolagents.utils import AgentGenerationError, AgentParsingError, parse_code_blobs

from envserver import Message

from ..interpreter.inside import ANSWER
from ..interpreter.process import Interpreter, Outcome, observation
from . import prompts
from .endpoint import Endpoint
from .plain import PYTHON, AgentRun, Ending, Tools, call_data, step_data
from .prompts import instructions, system_prompt

# smolagents rewrites the model's messages before it sends them again. Here a message may carry its
# original wire form (`raw`), which is sent instead; so each prompt extends the last one and its
# answer, and the proxy records one sequence.

END_OF_PLAN = "<end_plan>"
_ROLES = {MessageRole.SYSTEM: "system", MessageRole.ASSISTANT: "assistant"}
_NOTHING = " "
"""smolagents takes an empty turn for code that does nothing; this is no code to it."""


class ProxyModel(Model):  # type: ignore[misc]  # a class of a library without types
    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(model_id=endpoint.model)
        self._endpoint = endpoint

    def generate(self, messages: list[ChatMessage], **options: Any) -> ChatMessage:
        return self._turn(messages)

    def plan(self, messages: list[ChatMessage]) -> ChatMessage:
        return self._turn(messages, stop=[END_OF_PLAN])

    def parse_tool_calls(self, message: ChatMessage) -> ChatMessage:
        raise ValueError("no tool was called")

    def _turn(self, messages: list[ChatMessage], **fields: Any) -> ChatMessage:
        turn = self._endpoint.turn(merged(messages), **fields)
        return ChatMessage(
            role=MessageRole.ASSISTANT,
            content=visible_text(turn.message.get("content") or "") or _NOTHING,
            tool_calls=[_call(call) for call in turn.calls] or None,
            raw=turn.message,
            token_usage=TokenUsage(*turn.tokens),
        )


def merged(messages: list[ChatMessage]) -> list[Message]:
    """Converts to OpenAI's form and merges consecutive user messages: templates need turns."""
    wire: list[Message] = []
    for message in messages:
        if isinstance(message.raw, dict):
            wire.append(message.raw)
            continue
        role = _ROLES.get(message.role, "user")
        text = _text(message.content)
        if role == "user" and wire and wire[-1]["role"] == "user":
            wire[-1] = {"role": "user", "content": f"{wire[-1]['content']}\n\n{text}"}
        else:
            wire.append({"role": role, "content": text})
    return wire


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content)
    return str(content or "")


def _call(call: Json) -> ChatMessageToolCall:
    function = call["function"]
    made = ChatMessageToolCallFunction(name=function["name"], arguments=function["arguments"])
    return ChatMessageToolCall(function=made, id=call["id"], type="function")


class StepFailed(Exception):
    """The code raised, was stopped or died; the message is for the model."""


class ProcessExecutor(PythonExecutor):  # type: ignore[misc]  # a class of a library without types
    """Executes code for smolagents' CodeAgent; the interpreter belongs to its owner."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self._variables: dict[str, Any] = {}
        self.outcome: Outcome | None = None

    def send_tools(self, tools: Mapping[str, Callable[..., Any]]) -> None:
        """Functions of the code, beside `final_answer`; to be sent before the first step."""
        for name, tool in tools.items():
            if name != ANSWER:  # those that the interpreter has raise errors; smolagents' do not
                self._interpreter.tools.setdefault(name, tool)

    def send_variables(self, variables: dict[str, Any]) -> None:
        """Variables of the code, of the kinds that have a literal."""
        self._variables.update(variables)

    def __call__(self, code: str) -> CodeOutput:
        """Raises StepFailed, which smolagents reports to the model."""
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
    """Acts by Python code; without `system_prompt` smolagents' templates are used, with `tools` and
    `instructions`."""

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
    """Acts by native tool calls, whose results go back by their ids; `system_prompt` as above."""

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
        """One after the other; an invalid call gets an error and does not end the run."""
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


class SmolRun(AgentRun):
    _agent: CodeAgent | ToolCallingAgent

    def _made(self) -> CodeAgent | ToolCallingAgent:
        rules, tools = self._rules, self._added
        options: dict[str, Any] = {
            "planning_interval": rules.planning_interval,
            "logger": _QUIET if rules.verbosity < 0 else AgentLogger(LogLevel(rules.verbosity)),
        }
        model = ProxyModel(self._endpoint)
        prompt: str | None = None
        named: list[Any] = []
        if rules.prompts == "own":
            prompt = system_prompt(rules.agent, tools, rules.extra_imports)
        else:
            is_code = rules.agent == "code"
            shown = tools if is_code else self._tools.tools.values()
            named = [as_smolagents(tool, self._loop) for tool in shown if tool.name != ANSWER]
            options["instructions"] = instructions(tools, rules.extra_imports)
        if rules.agent == "tools":
            return ToolCallingAgent(named, model, self._tools, prompt, **options)
        executor = ProcessExecutor(self._interpreter)
        return CodeAgent(named, model, executor, prompt, rules.observation_characters, **options)

    def _drive(self, question: str) -> tuple[str | None, Ending]:
        self._agent = self._made()
        events = self._agent.run(question, stream=True, max_steps=self._rules.max_steps)
        answer = ""
        try:
            for event in events:
                if isinstance(event, ActionOutput) and event.is_final_answer:
                    answer = str(event.output)
                if isinstance(event, PlanningStep):
                    self._trace.add(_plan_data(event))
                if not isinstance(event, ActionStep) or event.model_output_message is None:
                    continue
                self._trace.add(self._data(event))
                if event.is_final_answer:
                    return answer, "answered"
                if event.step_number >= self._rules.max_steps:
                    break
        except AgentGenerationError as error:
            raise (error.__cause__ or error) from error
        finally:
            events.close()
        return None, "max_steps"

    def _data(self, step: ActionStep) -> Json:
        message = step.model_output_message
        agent = self._agent
        if isinstance(agent, CodeAgent):
            action: Any = step.code_action
            thought = (message.content or "").partition("<code>")[0]
        else:
            calls = (message.raw or {}).get("tool_calls") or []
            action = [call_data(call) for call in calls] or None
            thought = message.content or ""
        return step_data(
            step.step_number,
            thought=thought,
            action=action,
            observation=step.observations or "",
            error=self._error(step),
            final=step.is_final_answer,
            **_spent(step),
        )

    def _error(self, step: ActionStep) -> tuple[str, str] | None:
        if isinstance(step.error, AgentParsingError):
            return "parsing", str(step.error)
        agent = self._agent
        if isinstance(agent, CodeAgent):
            outcome = agent.python_executor.outcome
            if step.error is None or outcome is None or outcome.trouble is None:
                return None if step.error is None else (type(step.error).__name__, str(step.error))
            return outcome.trouble, outcome.error
        failed = [text for _, text, ok in agent.results.get(step.step_number, ()) if not ok]
        if not failed:
            return None if step.error is None else (type(step.error).__name__, str(step.error))
        outcome = self._tools.outcome
        names = [c["function"]["name"] for c in step.model_output_message.raw["tool_calls"]]
        of_python = names == [PYTHON] and outcome is not None and outcome.trouble is not None
        return (outcome.trouble if of_python and outcome else "tool") or "tool", failed[-1]


class _Silent(AgentLogger):  # type: ignore[misc]  # a class of a library without types
    def log(self, *args: Any, **options: Any) -> None:
        """Logs nothing."""

    def log_error(self, error_message: str) -> None:
        """Logs nothing."""

    log_code = log_markdown = log_rule = log_task = log_messages = log


_QUIET = _Silent(LogLevel.OFF)


def _plan_data(step: PlanningStep) -> Json:
    return step_data(0, thought=step.plan, action=None, observation="", error=None, **_spent(step))


def _spent(step: ActionStep | PlanningStep) -> Json:
    usage = step.token_usage
    return {
        "tokens": (usage.input_tokens, usage.output_tokens) if usage else (0, 0),
        "seconds": (step.timing.end_time or time.time()) - step.timing.start_time,
    }
