"""The model call that an environment's hooks look at, change or refuse.

Implementation: `proxy/hooks.py`. `Environment.on_request` and `on_answer` get a `ModelCall`:

    def on_request(self, call):
        if len(call.messages) > 40:
            call.change("compacted", messages=[call.messages[0], *call.messages[-20:]])

    async def on_answer(self, call):
        if call.caller.task.hidden["secret"] in str(call.answer.get("content")):
            call.refuse("The answer gives the secret away.")
"""

from __future__ import annotations

from typing import Any

from envserver_records.tasks import Message

from .service_interface import Caller

MOST_REASON = 500
"""Maximum characters of a reason."""


class HookBug(Exception):
    """A hook in another process raised.

    Args:
        what: class, message and place; kind: the class; text: the traceback.
    """

    def __init__(self, what: str, kind: str, text: str) -> None:
        super().__init__(what)
        self.kind = kind
        self.text = text


class ModelCall:
    """A model call on its way to the engine, or an answer on its way back.

    What it holds are copies: only `change` and `refuse` have an effect, the latest one of each.

    Args:
        caller: the rollout, with its task and its state.
        agent: name of the calling agent, None if there is only one.
        messages, tools: as the engine gets them, in OpenAI's chat format, whatever the dialect.
        prompt: of a text completion: a text, token ids, or a list of either; None in a chat.
        answer: the assistant message; None in `on_request`.
        choice: its index, if the agent asked for several.
    """

    def __init__(
        self,
        *,
        caller: Caller,
        agent: str | None,
        messages: list[Message],
        tools: list[dict[str, Any]],
        prompt: Any = None,
        answer: Message | None = None,
        choice: int = 0,
    ) -> None:
        self.caller = caller
        self.agent = agent
        self.messages = messages
        self.tools = tools
        self.prompt = prompt
        self.answer = answer
        self.choice = choice
        self.reason = ""
        """Why it was changed or refused; "" if it was not."""
        self.refused = False
        self.changes: dict[str, Any] = {}
        """The new values of what was changed, by name."""

    def change(
        self,
        reason: str,
        *,
        messages: list[Message] | None = None,
        tools: list[dict[str, Any]] | None = None,
        prompt: str | None = None,
        answer: Message | None = None,
    ) -> None:
        """Changes the request (`messages`, `tools`, `prompt`), or in `on_answer` the `answer`.

        Args:
            reason: recorded with the call; at most 500 characters count.

        Raises:
            TypeError: nothing is given, or what this hook cannot change.
        """
        given = {"messages": messages, "tools": tools, "prompt": prompt, "answer": answer}
        changes = {name: value for name, value in given.items() if value is not None}
        text = "messages" if self.prompt is None else "prompt"
        possible = {text, "tools"} if self.answer is None else {"answer"}
        if not changes or not changes.keys() <= possible:
            raise TypeError(f"change() takes one or more of {', '.join(sorted(possible))} here.")
        self.reason = _reason(reason)
        self.changes |= changes

    def refuse(self, reason: str) -> None:
        """Refuses the call: the agent gets an error with `reason` (LimitReached, "refused").

        An agent may catch it and go on; if it does not, the rollout is scored as it is.
        """
        self.reason = _reason(reason)
        self.refused = True


def _reason(reason: str) -> str:
    text = str(reason)[:MOST_REASON].strip()
    if not text:
        raise TypeError("A hook must say why it changes or refuses a call.")
    return text
