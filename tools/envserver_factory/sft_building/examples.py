"""Turns a row of a data set into a training example, or a reason to drop it.

Two forms: `messages`, a conversation that gets the model's chat template at training time;
`prompt`, {"prompt", "completion"}, of which only the completion is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from envserver_records.errors import ConfigError
from envserver_records.extras import install_command

Json = dict[str, Any]
Message = dict[str, str]
Form = Literal["messages", "prompt"]


@dataclass(frozen=True)
class Example:
    """One training example.

    Args:
        prompt: text, or a conversation.
        completion: the model's part.
        row: the task row for the environment, when completions are verified.
        facts: names that the summary counts, by histogram.
    """

    prompt: str | list[Message]
    completion: str
    row: Json
    facts: dict[str, list[str]]

    def as_row(self, form: Form, template: Template | None = None) -> Json:
        """Returns the line of the file.

        Args:
            template: a conversation -> text before its completion, and with it.
        """
        if form == "messages":
            return {"messages": self._messages()}
        if isinstance(self.prompt, str):
            return {"prompt": self.prompt, "completion": self.completion}
        if template is None:
            said = [{"role": "assistant", "content": self.completion}]
            return {"prompt": self.prompt, "completion": said}
        before, whole = template(self.prompt, self.completion)
        return {"prompt": before, "completion": whole.removeprefix(before)}

    def _messages(self) -> list[Message]:
        asked = self.prompt
        if isinstance(asked, str):
            asked = [{"role": "user", "content": asked}]
        return [*asked, {"role": "assistant", "content": self.completion}]


Template = Callable[[list[Message], str], tuple[str, str]]


def template_of(tokenizer: str) -> Template:
    """Loads the chat template of a tokenizer: renders a conversation before and with its
    completion.

    Args:
        tokenizer: a folder, or a name on the hub.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            f"A tokenizer's chat template needs transformers, which cannot be imported: {error}.",
            hint=f"{install_command('local')}, or leave --tokenizer out: "
            "the template is then applied when the model is trained.",
        ) from error
    if "/" not in tokenizer and not Path(tokenizer).is_dir():
        raise ConfigError(
            f"There is no folder {tokenizer!r}.", hint="A name on the hub is OWNER/NAME."
        )
    try:
        loaded = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise ConfigError(f"There is no tokenizer {tokenizer!r}: {str(error)[:300]}") from error
    if not getattr(loaded, "chat_template", None):
        raise ConfigError(f"The tokenizer {tokenizer!r} has no chat template.")

    def render(asked: list[Message], said: str) -> tuple[str, str]:
        before = loaded.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        answered = [*asked, {"role": "assistant", "content": said}]
        whole = loaded.apply_chat_template(answered, tokenize=False)
        if not whole.startswith(before):
            raise ConfigError(
                f"The chat template of {tokenizer!r} shows a conversation otherwise once it is "
                "answered.",
                hint="Leave --tokenizer out: `envserver_clients.sft` templates turn by turn.",
            )
        return before, whole

    return render
