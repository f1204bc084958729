"""The model's tokenizer and chat template, and where an answer's text ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from envserver_records.errors import EngineRefused

from envserver.tokens.chat_format import ChatTemplate
from envserver.tokens.prepare import Refused, prepare, prepare_tools, template_kwargs, with_defaults

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .rows import Row

_TAIL_TOKENS = 16
"""Tokens at the end of an answer, besides the stop string's length, searched for a stop string."""
_BROKEN = "\ufffd"


class Text:
    """Tokenizer and chat template of a model.

    Args:
        stop_ids: ids that end the model's turn; the first is its regular end.
        defaults: template variables of every conversation.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.stop_ids = list(stop_ids)
        self._defaults = {"add_generation_prompt": True, **(defaults or {})}
        self.name = lru_cache(maxsize=1 << 16)(self._name)

    @property
    def enders(self) -> dict[int, int | None]:
        """Ids that end an answer -> the reported reason: None for the model's regular end."""
        return {index: index if place else None for place, index in enumerate(self.stop_ids)}

    def prompt_text(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        fields: Mapping[str, Any],
    ) -> str:
        """Renders a conversation with the model's template, prepared as in vLLM."""
        try:
            template = ChatTemplate(self._tokenizer.get_chat_template(tools=tools or None), {})
            text = self._tokenizer.apply_chat_template(
                prepare(messages, parts=template.parts, developer=template.developer),
                tools=prepare_tools(tools),
                tokenize=False,
                continue_final_message=bool(fields.get("continue_final_message")),
                **with_defaults(
                    self._defaults, template_kwargs({**fields, "continue_final_message": False})
                ),
            )
        except Refused as refused:
            raise EngineRefused(
                "The local engine takes only text, in the form of the chat API"
                f" ({refused.reason.replace('_', ' ')}).",
                status=400,
                param="messages",
            ) from None
        except Exception as error:  # a template can raise any Python exception
            raise EngineRefused(
                f"The model's chat template does not take this: {error}", status=400
            ) from error
        return str(text)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Returns the ids of a text; `special`: with the tokens that the tokenizer adds around
        texts."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
        return str(text)

    def answer(self, row: Row) -> str:
        """Returns the text of a row so far, without the token that ended it and up to a stop
        string."""
        asked = row.sampling
        ended = row.finish == "stop" and not isinstance(row.stop_reason, str)
        ids = row.ids[:-1] if ended and not asked.keep_stop else row.ids
        text = self.decode(ids, skip_special=asked.skip_special_tokens)
        if isinstance(row.stop_reason, str):
            start = text.find(row.stop_reason)
            text = text[: start + len(row.stop_reason) if asked.keep_stop else start]
        return text

    def ends(self, row: Row) -> bool:
        """Returns whether the row's last token ended it; then sets `finish` and `stop_reason`."""
        asked = row.sampling
        token = row.ids[-1]
        enough = len(row.ids) >= asked.min_tokens
        if token in asked.enders and enough:
            row.stop_reason = asked.enders[token]
            row.finish = "stop"
        elif asked.stops and enough and (stop := self._stop(row)) is not None:
            row.stop_reason = stop
            row.finish = "stop"
        elif len(row.ids) >= asked.max_tokens:
            row.finish = "length"
        return row.finish is not None

    def _stop(self, row: Row) -> str | None:
        """Returns the stop string that is complete now; of several, the one that ends first."""
        asked = row.sampling
        tail = _TAIL_TOKENS + max(map(len, asked.stops))
        text = self.decode(row.ids[-tail:], skip_special=asked.skip_special_tokens)
        if not any(stop in text for stop in asked.stops):
            return None
        whole = self.decode(row.ids, skip_special=asked.skip_special_tokens)
        ends = [(whole.find(stop) + len(stop), stop) for stop in asked.stops if stop in whole]
        return min(ends)[1] if ends else None

    def _name(self, index: int) -> str:
        return self.decode([index])


class Growing:
    """The text of a row as it grows; text that was returned is never revoked.

    An incomplete character is held back, and so is what may be the beginning of a stop string.
    """

    def __init__(self, text: Text, row: Row) -> None:
        self._text = text
        self._row = row
        self._given = 0
        self._whole = ""
        self._before = self._read = 0
        """Index of the first token decoded for context, and number of tokens read."""

    def more(self) -> str:
        """Returns the text that can be sent now and was not sent yet."""
        row = self._row
        if row.finish is not None:
            whole = self._text.answer(row)
        else:
            whole = self._read_on()
            whole = whole[: len(whole) - _held(whole, row.sampling.stops)]
        new = whole[self._given :]
        self._given = max(self._given, len(whole))
        return new

    def _read_on(self) -> str:
        """Reads all complete text.

        Tokens are decoded together with those before them; otherwise some tokenizers drop a space.
        """
        ids, skip = self._row.ids, self._row.sampling.skip_special_tokens
        count = len(ids)
        old = self._text.decode(ids[self._before : self._read], skip_special=skip)
        now = self._text.decode(ids[self._before : count], skip_special=skip)
        if len(now) > len(old) and not now.endswith(_BROKEN):
            self._whole += now[len(old) :]
            self._before, self._read = self._read, count
        return self._whole


def _held(text: str, stops: Sequence[str]) -> int:
    """Returns the number of characters at the end of `text` with which a stop string may begin."""
    most = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), most, -1):
            if text.endswith(stop[:size]):
                most = size
                break
    return most
