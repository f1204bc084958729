"""Plans the prompt of each request: continue a recorded call, or let the engine render it.

A prompt that continues a call is that call's prompt and completion, token by token, followed by
what the chat template writes after them. A request that cannot be shown to continue a call is a
root, which the engine renders: that costs tokens and merges fewer calls, but is never wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from envserver_records.errors import TemplateRefused
from envserver_records.images import ImageSpan
from envserver_records.records import Call, Edge, Message, Tokens

from ..settings.config import Edit
from .chat_format import ChatFormat
from .comparison import (
    UNREADABLE,
    Change,
    Difference,
    Replay,
    Segment,
    answer_of,
    canonical,
    change_of,
    compare,
    content_key,
)
from .flags import FLAGS
from .images import digest_of, folded, urls_of
from .prepare import KeptMessages, Refused, prepare, prepare_tools, same_objects
from .suffix import Completion, Suffix, Turn, suffix
from .vocabulary import Vocabulary


class Parent(msgspec.Struct, kw_only=True, eq=False):
    """A recorded call, and what it added to its conversation.

    Args:
        ended: whether the model ended its turn itself, not the token limit or a stop string.
        head: the generation prompt, once computed.
    """

    call: Call
    segment: Segment
    ended: bool
    before: Parent | None
    kwargs: Mapping[str, Any]
    head: str | None = None

    def path(self) -> list[Parent]:
        path = [self]
        while path[-1].before is not None:
            path.append(path[-1].before)
        return path[::-1]

    def same_tokens(self, other: Parent) -> bool:
        return np.array_equal(
            self.call.completion_ids, other.call.completion_ids
        ) and np.array_equal(self.call.prompt_ids, other.call.prompt_ids)


class Match(NamedTuple):
    parent: Parent
    replay: Replay


class Parents:
    def __init__(self) -> None:
        self._by_request: dict[bytes, list[Parent]] = {}
        self._by_index: dict[int, Parent] = {}
        self._answers: set[Hashable] = set()

    def add(self, request: bytes, parent: Parent) -> None:
        """Adds a call; `request` is the last hash of its request's chain."""
        self._by_request.setdefault(request, []).append(parent)
        self._by_index[parent.call.index] = parent
        self._answers.add(content_key(parent.segment.answer))

    def by_index(self, index: int) -> Parent | None:
        return self._by_index.get(index)

    def matches(self, request: bytes, replayed: Message) -> list[Match]:
        """Returns the calls that answered `request` and may have produced `replayed`.

        The least changed come first (the shortest appended text first), then those that reached the
        agent, then the latest.
        """
        now = answer_of(replayed)
        found = [
            Match(p, change_of(p.segment.answer, now, ended=p.ended, tail=p.segment.tail))
            for p in reversed(self._by_request.get(request, []))
        ]
        return sorted(found, key=_rank)

    def was_answered(self, message: Message) -> bool:
        return content_key(answer_of(message)) in self._answers


_CHANGES: tuple[Change, ...] = ("exact", "whitespace", "appended", "calls", "edited")


def _rank(match: Match) -> tuple[int, int, bool]:
    change, extra = match.replay
    return _CHANGES.index(change), len(extra), match.parent.call.delivered == "none"


def is_ambiguous(chosen: Match, accepted: Collection[Match]) -> bool:
    """Whether another match is as good as the chosen one but has different tokens."""
    return any(
        _rank(match) == _rank(chosen) and not match.parent.same_tokens(chosen.parent)
        for match in accepted
        if match is not chosen
    )


def segment_of(call: Call, context: str, vocabulary: Vocabulary) -> tuple[Segment, bool]:
    """Returns what `call` added after `context`, and whether the model ended its turn itself."""
    ids = call.completion_ids.tolist()
    sampled = vocabulary.decode(ids)
    stopped_by = call.stop_reason if isinstance(call.stop_reason, str) else None
    ended = stopped_by is None and call.finish_reason in _ENDED
    specials = vocabulary.special_ids.intersection(ids[:-1] if ended else ids)
    answer = answer_of(call.engine_message)
    segment = Segment(
        context=context,
        sampled=sampled,
        answer=answer,
        reasoning=reasoning_of(call.engine_message),
        specials=tuple({vocabulary.decode([id]) for id in specials}),
        tail="" if stopped_by is None else _tail(call, vocabulary, stopped_by, answer.content),
    )
    return segment, ended


_ENDED = ("stop", "tool_calls")


def reasoning_of(message: Message) -> str:
    for name in ("reasoning", "reasoning_content"):
        if isinstance(message.get(name), str) and message[name]:
            return str(message[name])
    return ""


def _tail(call: Call, vocabulary: Vocabulary, stop: str, content: str) -> str:
    """Returns the sampled text from the stop string on, or after it if the content includes it.

    The search starts near the last token, which ended the answer: the string may occur earlier too.
    """
    ids = call.completion_ids.tolist()
    before, sampled = vocabulary.decode(ids[:-1]), vocabulary.decode(ids)
    at = sampled.find(stop, max(0, len(before) - len(stop) + 1))
    if at < 0:  # several tokens came at once
        at = sampled.rfind(stop)
    if at < 0:
        return ""
    return sampled[at + len(stop) :] if content.endswith(stop) else sampled[at:]


_encode = msgspec.msgpack.Encoder().encode
_NOT_MSGPACK = b"\xc1"
"""A byte that no MessagePack begins with."""
_REASONING = ("reasoning", "reasoning_content")


class RequestHashes:
    """The hashes of one attempt's requests.

    Hash i of a request identifies its first i messages together with everything else that affects
    their rendering and answer, images by the SHA-256 of their bytes. So a request continues a
    recorded one exactly if one of its hashes equals that one's last. Reasoning is left out: agents
    drop it, and templates decide about it. What a request shares with the one before, the same
    objects, is not hashed again: a long conversation costs what is new in each turn.
    """

    def __init__(self) -> None:
        self._before: _Hashed | None = None

    def of(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        *,
        kwargs: Mapping[str, Any],
        model: str,
        agent: str | None,
    ) -> list[bytes]:
        """Returns the BLAKE2b-128 hash before the first message and after each message."""
        before, about = self._before, (model, agent)
        # Variables that are equal may be written differently: 1 and true.
        if before and before.about == about and before.tools is tools and not kwargs:
            chain = before.chain[: same_objects(before.messages, messages) + 1]
        else:
            start = [prepare_tools(list(tools)), sorted(kwargs.items()), model, agent]
            chain = [_digest(b"", start)]
        for message in prepare([*messages[len(chain) - 1 :]], parts=False, images="named"):
            said = {name: value for name, value in message.items() if name not in _REASONING}
            chain.append(_digest(chain[-1], said))
        self._before = None if kwargs else _Hashed(messages, tools, about, chain)
        return chain


class _Hashed(NamedTuple):
    """A request without variables, and its hashes; `about`: its model and agent."""

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]]
    about: tuple[str, str | None]
    chain: list[bytes]


def _digest(before: bytes, value: Any) -> bytes:
    try:
        encoded = _encode(value)
    except (ValueError, OverflowError):  # half a surrogate pair, a number of over 64 bits
        encoded = _NOT_MSGPACK + canonical(value).encode()
    return blake2b(before + encoded, digest_size=16).digest()


class PromptPlan(msgspec.Struct, kw_only=True):
    """How the prompt of a call is made.

    Args:
        ids: the whole prompt, with one token for each image; None: the engine renders it. They are
            never changed.
        text: the whole prompt as our template renders it; None if unknown.
        edge, refusal: see Call.
        added: the text after the completion of the continued call.
        key: hash of the whole request, see `RequestHashes`; empty: the call cannot be continued.
        images: SHA-256 of each image of the request, in order.
    """

    ids: Tokens | None = None
    text: str | None = None
    parent: int | None = None
    edge: Edge = "root"
    refusal: str | None = None
    flags: list[str] = []
    added: str | None = None
    key: bytes = b""
    kwargs: dict[str, Any] = {}
    images: list[str] = []

    def as_root(self, refusal: str) -> PromptPlan:
        """Returns the same prompt, rendered by the engine because of `refusal`."""
        return PromptPlan(
            text=self.text,
            refusal=refusal,
            flags=[flag for flag in self.flags if flag != "think_kept"] + ["suffix_refused"],
            key=self.key,
            kwargs=self.kwargs,
            images=self.images,
        )


_MOST_TRIES = 3
"""Maximum number of calls tried for one request: each takes several renderings."""


class History:
    """The calls of one attempt, of all its agents and models.

    `edits`: changes to an answer after which its tokens are still continued; `think`: what happens
    where the template drops earlier reasoning, see `TokensConfig`.
    """

    def __init__(
        self, format: ChatFormat, *, edits: Collection[Edit], think: Literal["template", "keep"]
    ) -> None:
        self.format = format
        self.edits = frozenset(edits)
        self.think = think
        self.parents = Parents()
        self._hashes = RequestHashes()
        self._prepared = KeptMessages()
        self.differs_at = ""
        """The first message whose rendering differs from the engine's; "": none. From then on the
        engine renders all prompts of the attempt: what is appended to a call is never compared."""

    def plan(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]],
        *,
        kwargs: Mapping[str, Any],
        model: str,
        agent: str | None,
    ) -> PromptPlan:
        """Plans the prompt for `messages`, in OpenAI's chat shape, without changing the history.

        Calls of another model or agent are never continued.
        """
        if self.differs_at:
            return _left_to_the_engine("render_mismatch")
        try:
            chain = self._hashes.of(messages, tools, kwargs=kwargs, model=model, agent=agent)
            text = self.format.prompt_text(messages, tools, kwargs, self._prepared)
            if not text.isascii():
                text.encode()
        except Refused as refused:
            return _left_to_the_engine(refused.reason)
        except (TemplateRefused, UnicodeEncodeError, RecursionError):
            return _left_to_the_engine("template_refused")  # as the engine does, as a rule
        urls = urls_of(messages)
        request = _Request(messages, tools, dict(kwargs), chain, text, [*map(digest_of, urls)])
        return _Search(self, request).plan()

    def add(self, call: Call, plan: PromptPlan, *, same: bool | None = None) -> None:
        """Adds a committed call, so that later calls may continue it, and may add flags to it.

        A call whose prompt differs from the plan is flagged and never continued. If the engine
        rendered that prompt, no call of this attempt is continued any more. `same`: the result of
        `same_prompt`.
        """
        if not call.exact or not call.completion_ids.size or plan.text is None or not plan.key:
            return
        if plan.images and not call.images:  # where they are is unknown: it says so itself
            return
        if same is None:
            same = same_prompt(self.format, plan, call.prompt_ids, call.images)
        if not same:
            _flag(call, "render_mismatch" if plan.ids is None else "prompt_mismatch")
            if plan.ids is None:
                self.differs_at = self._first_difference(call, plan)
            return
        context = plan.text if plan.added is None else plan.added
        segment, ended = segment_of(call, context, self.format.vocabulary)
        _flag(call, *_oddities(segment))
        before = None if plan.parent is None else self.parents.by_index(plan.parent)
        parent = Parent(call=call, segment=segment, ended=ended, before=before, kwargs=plan.kwargs)
        self.parents.add(plan.key, parent)

    def _first_difference(self, call: Call, plan: PromptPlan) -> str:
        """Describes the first message of `call` that the engine renders otherwise than we do."""
        ours, engines = plan.text or "", self.format.decode(call.prompt_ids.tolist())
        pairs = enumerate(zip(ours, engines, strict=False))
        same = next((at for at, (mine, other) in pairs if mine != other), len(ours) - 1)
        for at, message in enumerate(call.messages[:-1]):
            try:
                text = self.format.render(
                    call.messages[: at + 1], call.tools, plan.kwargs, generation_prompt=False
                )
            except (Refused, TemplateRefused):  # no conversation ends there
                continue
            if len(text) > same:  # the first character that differs is in it
                return _described(at, message)
        return _described(len(call.messages) - 1, call.messages[-1])


def _behind(segments: Iterable[Segment], text: str) -> str | None:
    """Returns what follows `segments` in `text`; None: it does not begin with them."""
    at = 0
    for part in (part for segment in segments for part in (segment.context, segment.sampled)):
        if not text.startswith(part, at):
            return None
        at += len(part)
    return text[at:]


def _left_to_the_engine(reason: str) -> PromptPlan:
    flag = {"multimodal": "multimodal_unstitched"}.get(reason, reason)
    return PromptPlan(refusal=reason, flags=[flag if flag in FLAGS else "suffix_refused"])


def _described(index: int, message: Message) -> str:
    """Returns the place and the form of a message, without its texts."""
    content = message.get("content")
    form = type(content).__name__
    if isinstance(content, list):
        form = f"parts {', '.join(str(part.get('type')) for part in content)}"
    calls = " with tool calls" if message.get("tool_calls") else ""
    return f"messages[{index}], role {message['role']}, content: {form}{calls}"


def _oddities(segment: Segment) -> Iterator[str]:
    if segment.specials:
        yield "special_token_in_completion"
    if UNREADABLE in segment.sampled:
        yield "lossy_detokenization"


def _flag(call: Call, *flags: str) -> None:
    call.flags = list(dict.fromkeys([*call.flags, *flags]))


def same_prompt(
    format: ChatFormat, plan: PromptPlan, prompt_ids: Tokens, images: Sequence[ImageSpan] = ()
) -> bool:
    """Returns whether the engine's prompt equals the plan, up to its `images`. Pure.

    Encodes the whole text of a new root, at about 2 ms per 1000 tokens: use a thread for long
    texts.
    """
    if plan.ids is prompt_ids:
        return True
    planned = plan.ids
    if planned is None:
        if plan.text is None:
            return True
        planned = format.tokens(plan.text)
    seen = prompt_ids
    if images and format.image_token is not None:
        ranges = [(image.offset, image.length) for image in images]
        seen = np.asarray(folded(prompt_ids.tolist(), ranges, format.image_token), np.int32)
    return np.array_equal(planned, seen)


class _Request(msgspec.Struct, frozen=True):
    """`text`: the whole prompt as the template renders it now; `images`: the SHA-256 of each."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    kwargs: dict[str, Any]
    chain: list[bytes]
    text: str
    images: list[str]


class _Search:
    """Finds the recorded call that produced the last assistant message, to continue its tokens."""

    def __init__(self, known: History, request: _Request) -> None:
        self._known = known
        self._format = known.format
        self._request = request
        self._flags: list[str] = []
        self._refusal: str | None = None

    def plan(self) -> PromptPlan:
        roles = [message.get("role") for message in self._request.messages]
        answers = [at for at, role in enumerate(roles) if role == "assistant"]
        if not answers:
            return self._root()
        last = answers.pop()
        accepted = self._accepted(last)
        for match in accepted[:_MOST_TRIES]:
            try:
                plan = self._continue(last, match)
            except Refused as refused:
                self._refuse(refused.reason)
                continue
            if is_ambiguous(match, accepted):
                self._flag("ambiguous_parent")
            plan.flags = self._flags + plan.flags
            return plan
        for at in answers:
            self._accepted(at)
        return self._root()

    def _root(self) -> PromptPlan:
        request = self._request
        return PromptPlan(
            text=request.text,
            refusal=self._refusal,
            flags=self._flags,
            key=request.chain[-1],
            kwargs=request.kwargs,
            images=request.images,
        )

    def _accepted(self, at: int) -> list[Match]:
        """Returns the calls that produced the answer at `at`, up to allowed edits; may flag."""
        message = self._request.messages[at]
        matches = self._known.parents.matches(self._request.chain[at], message)
        accepted = [match for match in matches if match.replay.change in self._known.edits]
        if matches and not accepted:
            self._refuse("assistant_edited")
        elif not matches and not self._known.parents.was_answered(message):
            self._flag("unsampled_assistant_in_history")
        return accepted

    def _continue(self, at: int, match: Match) -> PromptPlan:
        request, path = self._request, match.parent.path()
        if _lost_its_answer(match.parent.call.engine_message, request.messages[at]):
            self._flag("reasoning_dropped_answer_lost")
        if at + 1 == len(request.messages):
            raise Refused("ends_with_assistant")
        segments = [before.segment for before in path]
        shown = _behind(segments, request.text)
        new = self._suffix(at, match, shown)
        if new.text == shown:
            differences: list[set[Difference]] = [set()]
        else:
            head = partial(self._head, path[0])
            differences = compare(segments, new.text, request.text, head)
        self._check(differences)
        call = match.parent.call
        edge = _edge(match, differences)
        added = np.asarray(new.ids, np.int32)
        ids = np.concatenate([self._folded(call), call.completion_ids, added])
        if request.images:
            placeholders = np.count_nonzero(ids == self._format.image_token)
            if placeholders != len(request.images):
                raise Refused("image_count")
        return msgspec.structs.replace(
            self._root(),
            ids=ids,
            parent=call.index,
            edge=edge,
            refusal=None,
            flags=["think_kept"] if edge == "think_kept" else [],
            added=new.text,
        )

    def _folded(self, call: Call) -> Tokens:
        """Returns the prompt of `call` as it is sent again: with one token for each image."""
        if not urls_of(call.messages):
            return call.prompt_ids
        if not call.images or self._format.image_token is None:
            raise Refused("image_places")
        ranges = [(image.offset, image.length) for image in call.images]
        ids = folded(call.prompt_ids.tolist(), ranges, self._format.image_token)
        return np.asarray(ids, np.int32)

    def _suffix(self, at: int, match: Match, shown: str | None) -> Suffix:
        request, call, messages = self._request, match.parent.call, self._request.messages
        turn = Turn(messages[:at], messages[at], messages[at + 1 :], request.tools, request.kwargs)
        sampled = Completion(call.completion_ids.tolist(), call.finish_reason, call.stop_reason)
        return suffix(self._format, turn, sampled, match.replay.extra, shown)

    def _check(self, differences: list[set[Difference]]) -> None:
        found = set().union(*differences)
        if "other" in found:
            raise Refused("template_rewrites_history")
        if "think" in found and self._known.think == "template":
            raise Refused("think_stripped")

    def _head(self, root: Parent) -> str:
        """Returns the generation prompt at the end of a root's prompt; "" if unknown."""
        if root.head is None:
            call, text = root.call, root.segment.context
            try:
                before = self._format.render(
                    call.messages, call.tools, root.kwargs, generation_prompt=False
                )
            except (Refused, TemplateRefused):
                before = text
            root.head = text.removeprefix(before) if text.startswith(before) else ""
        return root.head

    def _refuse(self, reason: str) -> None:
        self._refusal = self._refusal or reason
        if reason not in _WITHOUT_FLAG:
            self._flag(reason if reason in FLAGS else "suffix_refused")

    def _flag(self, flag: str) -> None:
        if flag not in self._flags:
            self._flags.append(flag)


_WITHOUT_FLAG = ("ends_with_assistant", "no_generation_prompt")
"""Refusals that the request itself causes."""
_EDGES: tuple[Edge, ...] = ("think_kept", "lossy_detok", "appended", "calls", "whitespace")
"""The most significant first."""


def _edge(match: Match, differences: list[set[Difference]]) -> Edge:
    """Returns how the last turn is continued: the agent's edits, the template's differences."""
    found: set[str] = {match.replay.change, *differences[-1]}
    if any("think" in some for some in differences):
        found.add("think_kept")
    return next((edge for edge in _EDGES if edge in found), "exact")


def _lost_its_answer(recorded: Message, replayed: Message) -> bool:
    """Whether the engine parsed the answer as reasoning only and the agent dropped it."""
    return bool(
        reasoning_of(recorded)
        and not (recorded.get("content") or recorded.get("tool_calls"))
        and not reasoning_of(replayed)
    )
