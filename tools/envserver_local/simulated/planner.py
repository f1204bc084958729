"""Computes the answer to a request body: everything the simulated engine does except waiting.

What always holds: the same seed and the same requests in the same order give the same answers;
`/v1/chat/completions`, `/v1/completions` and `/generate` give the same tokens for the same prompt
and the same `seed`; a token's logprob is the same wherever it is reported.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, Literal

import msgspec

from envserver.settings.config import SimConfig

from .answers import MODEL, ChatAnswer, CompletionAnswer, Ending, GenerateAnswer, Sampled, completed
from .conversation import (
    Body,
    ChatBody,
    CompletionBody,
    Conversation,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
    check_chat,
    check_sampling,
    checked_tools,
    conversation_of_text,
    plain_messages,
    read,
    refusal,
)
from .policy import Speaker, Wish, generator
from .tokenizer import Prompt, SimTokenizer

Json = dict[str, Any]
Fault = Literal["error", "disconnect"]

_REMEMBERED_PROMPTS = 16_384


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that is ready, and how to deliver it.

    Args:
        answer: returns itself whole; streaming endpoints also in chunks.
        fault: the simulated fault during delivery.
        tokens: length of the longest choice: the steps a model would have needed.
        stream: whether the request asked for chunks.
    """

    answer: ChatAnswer | CompletionAnswer | GenerateAnswer | Fixed
    fault: Fault | None = None
    tokens: int = 0
    stream: bool = False

    def chunks(self) -> Iterator[Json | None]:
        """Yields the chunks of the answer; a last None means that the connection breaks.
        Raises EngineRefused: this endpoint does not stream.
        """
        if not isinstance(self.answer, ChatAnswer | CompletionAnswer):
            raise refusal("This endpoint does not stream.", param="stream")
        if self.fault != "disconnect":
            return self.answer.chunks()
        return chain(islice(self.answer.chunks(), 1 + self.tokens // 2), [None])


class Fixed(msgspec.Struct, frozen=True):
    """An answer that needs no sampling."""

    body: Json

    def whole(self) -> Json:
        """Returns the answer."""
        return self.body


class Planner:
    """Answers requests with `plan`; its only state is how often each prompt was requested.

    Args:
        config: seed and probabilities; times are not used here.
        speaker: says the answers.
    """

    def __init__(self, config: SimConfig, speaker: Speaker, tokenizer: SimTokenizer) -> None:
        self._config = config
        self._speaker = speaker
        self._tokenizer = tokenizer
        self._asked: OrderedDict[tuple[str, int, int], int] = OrderedDict()

    def plan(self, path: str, body: Any, rollout_id: str = "") -> Plan:
        """Returns the answer to a POST at once, without waiting.
        Raises EngineRefused: the request is wrong; `detail` holds `status` and `param`.
        """
        if not isinstance(body, dict):
            raise refusal("The body must be a JSON object.")
        match path:
            case "/v1/chat/completions":
                return self._chat(read(body, ChatBody), rollout_id)
            case "/v1/completions":
                return self._complete(read(body, CompletionBody), rollout_id)
            case "/generate":
                return self._generate(read(body, GenerateBody), rollout_id)
            case "/tokenize":
                return Plan(answer=Fixed(self._tokenize(read(body, TokenizeBody))))
            case "/detokenize":
                return Plan(answer=Fixed(self._detokenize(read(body, DetokenizeBody))))
        raise refusal(f"There is no {path}.", status=404)

    def _chat(self, body: ChatBody, rollout_id: str) -> Plan:
        tools = checked_tools(body.tools)
        choice = check_chat(body, {tool["function"]["name"] for tool in tools})
        conversation = Conversation(plain_messages(body.messages), tools)
        prompt = self._prompt(self._tokenizer.render(conversation.messages, tools))
        limit = body.max_completion_tokens or body.max_tokens
        wish = Wish(
            rollout_id=rollout_id,
            choice=choice,
            parallel=body.parallel_tool_calls is not False,
            response_format=body.response_format,
        )
        sampled, fault = self._sample(prompt, conversation, body, wish, limit)
        answer = ChatAnswer(
            tokenizer=self._tokenizer,
            body=body,
            choice=choice,
            sampled=sampled,
            created=int(time.time()),
        )
        return _plan(answer, body, [sampled], fault)

    def _complete(self, body: CompletionBody, rollout_id: str) -> Plan:
        check_sampling(body)
        pairs = [self._continued(prompt, body, rollout_id) for prompt in self._prompts(body.prompt)]
        sampled = [pair[0] for pair in pairs]
        answer = CompletionAnswer(
            tokenizer=self._tokenizer, body=body, sampled=sampled, created=int(time.time())
        )
        return _plan(answer, body, sampled, next((fault for _, fault in pairs if fault), None))

    def _generate(self, body: GenerateBody, rollout_id: str) -> Plan:
        check_sampling(body)
        if body.stream:
            raise refusal("This endpoint does not stream.", param="stream")
        wanted = body.prompt
        if isinstance(wanted, dict):
            wanted = wanted.get("prompt_token_ids", wanted.get("prompt"))
        prompts = self._prompts(wanted)
        if len(prompts) != 1:
            raise refusal("There must be one prompt.", param="prompt")
        sampled, fault = self._continued(prompts[0], body, rollout_id)
        answer = GenerateAnswer(tokenizer=self._tokenizer, body=body, sampled=sampled)
        return _plan(answer, body, [sampled], fault)

    def _continued(
        self, prompt: Prompt, body: CompletionBody, rollout_id: str
    ) -> tuple[Sampled, Fault | None]:
        conversation = conversation_of_text(prompt.text)
        choice = "auto" if conversation.tools else "none"
        wish = Wish(rollout_id=rollout_id, choice=choice)
        limit = 16 if body.max_tokens is None else body.max_tokens
        return self._sample(prompt, conversation, body, wish, limit)

    def _sample(
        self,
        prompt: Prompt,
        conversation: Conversation,
        body: Body,
        wish: Wish,
        limit: int | None,
    ) -> tuple[Sampled, Fault | None]:
        if body.model not in (None, MODEL):
            raise refusal(f"The model {body.model!r} does not exist.", param="model", status=404)
        context = self._config.context_tokens
        asked = self._count(wish.rollout_id, prompt)
        place = f"{wish.rollout_id}|{len(prompt.ids)}|{prompt.fold}"
        chance = generator(self._config.seed, "faults", f"{place}|{asked}")
        fault = self._fault(chance)
        ending = Ending(
            max_tokens=min(limit or context, context - len(prompt.ids)),
            stops=body.stops(),
            stop_token_ids=frozenset(body.stop_token_ids or ()),
            keep_stop=bool(body.include_stop_str_in_output),
        )
        completions = []
        for number in range(body.n or 1):
            key = f"{place}|{_nonce(body, asked)}|{number}"
            fate = f"{wish.rollout_id}|{number}" if wish.rollout_id else key
            said = self._speaker.say(conversation, wish, fate=fate, key=key)
            ids = self._tokenizer.encode(said.text)
            if said.endless:
                ids = ids * (1 + ending.max_tokens // len(ids))
            ids.append(self._tokenizer.im_end)
            if chance.random() < self._config.truncate_rate:
                ids = ids[: chance.randint(1, max(1, len(ids) - 1))]
            name = hashlib.blake2b(f"{key}|{asked}".encode(), digest_size=12).hexdigest()
            completions.append(completed(self._tokenizer, prompt, ids, ending, name))
        return Sampled(prompt, completions), fault

    def _fault(self, chance: random.Random) -> Fault | None:
        failed = chance.random() < self._config.error_rate
        broken = chance.random() < self._config.disconnect_rate
        return "error" if failed else "disconnect" if broken else None

    def _count(self, rollout_id: str, prompt: Prompt) -> int:
        """Returns how often this was requested before, so that repeated requests differ."""
        asked = (rollout_id, len(prompt.ids), prompt.fold)
        count = self._asked.pop(asked, 0)
        self._asked[asked] = count + 1
        if len(self._asked) > _REMEMBERED_PROMPTS:
            self._asked.popitem(last=False)
        return count

    def _prompts(self, prompt: Any) -> list[Prompt]:
        """Returns the prompts of a request: a text, ids, or a list of either."""
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        return [self._one_prompt(one) for one in (prompt if several else [prompt])]

    def _one_prompt(self, prompt: Any) -> Prompt:
        if isinstance(prompt, str) and prompt:
            return self._prompt(prompt)
        if not isinstance(prompt, list) or not prompt:
            raise refusal("The prompt must be a text or token ids, and not empty.", param="prompt")
        self._check_ids(prompt, "prompt")
        return self._checked(self._tokenizer.prompt_of_ids(prompt))

    def _check_ids(self, ids: list[Any], param: str) -> None:
        size = self._tokenizer.size
        if not all(type(index) is int and 0 <= index < size for index in ids):
            raise refusal(f"A token id is not in [0, {size}).", param=param)

    def _prompt(self, text: str) -> Prompt:
        try:
            return self._checked(self._tokenizer.prompt(text))
        except UnicodeEncodeError as error:
            raise refusal(f"The text is not Unicode: {error.reason}.", param="messages") from error

    def _checked(self, prompt: Prompt) -> Prompt:
        context = self._config.context_tokens
        if len(prompt.ids) >= context:
            raise refusal(
                f"This model's maximum context length is {context} tokens. However, your "
                f"request has {len(prompt.ids)} input tokens.",
                param="prompt",
            )
        return prompt

    def _tokenize(self, body: TokenizeBody) -> Json:
        if (body.prompt is None) == (body.messages is None):
            raise refusal("Give either `prompt` or `messages`.", param="prompt")
        text = body.prompt or ""
        if body.messages is not None:
            text = self._tokenizer.render(
                plain_messages(body.messages),
                checked_tools(body.tools),
                add_generation_prompt=body.add_generation_prompt,
            )
        try:
            ids = self._tokenizer.encode(text)
        except UnicodeEncodeError as error:
            raise refusal(f"The text is not Unicode: {error.reason}.", param="prompt") from error
        strings = [self._tokenizer.strings[index] for index in ids]
        return {
            "count": len(ids),
            "max_model_len": self._config.context_tokens,
            "tokens": ids,
            "token_strs": strings if body.return_token_strs else None,
        }

    def _detokenize(self, body: DetokenizeBody) -> Json:
        self._check_ids(body.tokens, "tokens")
        return {"prompt": self._tokenizer.decode(body.tokens, special=True)}


def _plan(
    answer: ChatAnswer | CompletionAnswer | GenerateAnswer,
    body: Body,
    sampled: list[Sampled],
    fault: Fault | None,
) -> Plan:
    tokens = max(len(completion.ids) for one in sampled for completion in one.completions)
    return Plan(answer=answer, fault=fault, tokens=tokens, stream=bool(body.stream))


def _nonce(body: Body, asked: int) -> str:
    """Returns a key that distinguishes the samples of one prompt."""
    if body.seed is not None:
        return f"seed {body.seed}"
    return "greedy" if body.temperature == 0 else f"sample {asked}"
