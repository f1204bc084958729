"""smolagents' executor on top of the interpreter: plain Python in a separate process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from smolagents.local_python_executor import CodeOutput, PythonExecutor

from ..interpreter.inside import ANSWER
from ..interpreter.process import Interpreter, Outcome


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
