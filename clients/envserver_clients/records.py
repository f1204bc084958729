"""Batches for trainers: groups of rows, with token data as numpy arrays.

Groups of the server's environments and groups posted over the Atropos API have the same form here.
A group is decoded when its rows are first read.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
from envserver_records import Group, InputError, Message, Trajectory, unpack
from envserver_records.experts import Table, row_experts
from envserver_records.images import RowImage, images_of
from envserver_records.sampling import SamplingSpan, span_of
from envserver_records.tasks import Json
from envserver_records.wire import NATIVE, GroupSummary, WireGroup, WireLease
from numpy.typing import NDArray

T = TypeVar("T")

_NOT_TRAINED: Final = -100


@dataclass(frozen=True)
class Row:
    """One training sequence; arrays have length T and are read-only.

    Args:
        tokens: int32[T].
        mask: uint8[T], 1 where the token is trained on.
        logprobs: float32[T], the sampled token's logprob where mask is 1, else 0. None: unknown.
        reward: the agent's, of the whole trajectory: its outcome and the rewards of its turns.
        versions: int32[T], the policy version that sampled each token; -1: unknown, or context.
        messages: the agent's last conversation; empty if it was not sent.
        learn: False if the trajectory was cut off: count its reward, but take no gradient from it.
        trajectory: its number in the group; the rows of one agent of it share their reward.
        agent: name of the agent, None if there is only one. Compare rewards within one agent.
        calls: int32[T], the call that sampled each token; -1: context or unknown.
        turns: the agent's calls in this trajectory, in order; empty: unknown.
        turn_rewards: rewards of single calls, in `reward` too, by the number of the call.
        components: named parts of the trajectory's reward, a vector for trainers that weigh them.
        sampling: how the trained tokens were sampled.
        images: those among the tokens, in order, with their bytes and the range of their tokens.
        processor: digest of the engine's configuration that made tokens of them; "" if unknown.
        experts: uint8 or uint16 [N, layers, experts per token], those that the engine routed the
            first N tokens to: at least all before the last trained one. None: not recorded.
        share: part of the advantage that the row gets, less than 1 if the agent summarised its
            history and the server's `env.compaction_rewards` is length. Rows that `last` does not
            train are left out.
    """

    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32] | None
    reward: float
    group_id: str
    versions: NDArray[np.int32]
    messages: list[Message] = field(default_factory=list)
    learn: bool = True
    trajectory: int = 0
    agent: str | None = None
    calls: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    turns: list[int] = field(default_factory=list)
    turn_rewards: dict[int, float] = field(default_factory=dict)
    components: dict[str, float] = field(default_factory=dict)
    sampling: list[SamplingSpan] = field(default_factory=list)
    images: list[RowImage] = field(default_factory=list)
    processor: str = ""
    experts: Table | None = None
    share: float = 1.0


class ClientGroup(WireGroup, dict=True):
    """Rows of one task, whose rewards are compared with each other."""

    @cached_property
    def rows(self) -> list[Row]:
        """The rows. Raises InputError: the body cannot be read, or has a format unknown here."""
        try:
            if self.format in NATIVE:
                return _checked(_rows_of_group(self.group_id, unpack(self.body, Group)))
            if self.format == "atropos":
                return _checked(_rows_of_post(self.group_id, self.policy_version, self.body))
        except (msgspec.DecodeError, OverflowError, ValueError, LookupError, TypeError) as error:
            raise InputError(
                f"Group {self.group_id} cannot be read: {error}.", place=self.group_id
            ) from error
        raise InputError(
            f"Group {self.group_id} has the unknown format {self.format}.", place=self.group_id
        )


class Batch(WireLease):
    """Groups under one lease, to be acknowledged before `expires_at` (the server's clock)."""

    groups: list[ClientGroup]

    @property
    def rows(self) -> list[Row]:
        return [row for group in self.groups for row in group.rows]


def decoded(
    content: bytes, kind: type[T], what: str, decode: Callable[..., T] = msgspec.json.decode
) -> T:
    """Decodes the body of an answer. Raises InputError: it is not `what`."""
    try:
        return decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise InputError(f"The server's answer is not {what}: {error}.", place="body") from error


def decode_batch(answer: bytes) -> Batch:
    """The answer to a lease; bodies are views of `answer`. Raises InputError."""
    return decoded(answer, Batch, "a batch", msgspec.msgpack.decode)


def decode_group(answer: bytes) -> ClientGroup:
    """The answer to `GET /v1/groups/{group_id}`; its body is a view. Raises InputError."""
    return decoded(answer, ClientGroup, "a group", msgspec.msgpack.decode)


class _Page(msgspec.Struct):
    groups: list[GroupSummary]


def decode_page(answer: bytes) -> list[GroupSummary]:
    """The answer to `GET /v1/groups`. Raises InputError."""
    return decoded(answer, _Page, "a page of groups").groups


def _checked(rows: Iterator[Row]) -> list[Row]:
    found = list(rows)
    for row in found:
        lengths = {len(row.tokens), len(row.mask), len(row.versions)}
        if len(lengths) > 1 or (row.logprobs is not None and len(row.logprobs) not in lengths):
            raise ValueError("the arrays of a row have different lengths")
    return found


def _rows_of_group(group_id: str, group: Group) -> Iterator[Row]:
    for number, trajectory in enumerate(group.trajectories):
        if trajectory.score.reward is not None:
            for row in _rows_of_trajectory(group, group_id, number, trajectory):
                yield row if row.sampling else replace(row, sampling=_of_run(row, group))


def _of_run(row: Row, group: Group) -> list[SamplingSpan]:
    """Rows of older versions do not say how they were sampled; their group does."""
    return [span_of(group.generation_params, "unknown", 0, len(row.tokens))]


def _rows_of_trajectory(
    group: Group, group_id: str, number: int, trajectory: Trajectory
) -> Iterator[Row]:
    score = trajectory.score
    for sequence in (sequence for sequence in trajectory.sequences if sequence.share):
        agent = sequence.agent
        reward = score.of_agent(agent)
        assert reward is not None  # as score.reward
        yield Row(
            tokens=sequence.tokens,
            mask=sequence.mask,
            logprobs=sequence.logprobs,
            reward=reward,
            group_id=group_id,
            versions=sequence.versions,
            messages=trajectory.messages_of(agent),
            learn=not trajectory.truncated,
            trajectory=number,
            agent=agent,
            calls=sequence.calls,
            turns=trajectory.agent_calls.get(agent or "", []),
            turn_rewards=score.call_rewards(agent),
            components=score.components,
            sampling=sequence.sampling,
            images=images_of(sequence.images, group.images, len(sequence.tokens)),
            processor=str(group.rendering.get("processor", "")),
            experts=row_experts(sequence.experts, sequence.mask),
            share=sequence.share,
        )


class _Post(msgspec.Struct):
    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    inference_logprobs: list[list[float]] | None = None
    messages: list[list[Json]] | None = None
    overrides: list[Json] | None = None
    generation_params: Json | None = None


_post_decoder: Final = msgspec.json.Decoder(_Post)


def _rows_of_post(group_id: str, policy_version: int, body: memoryview) -> Iterator[Row]:
    post = _post_decoder.decode(body)
    overrides = post.overrides or []
    for index, (tokens, masks, score) in enumerate(
        zip(post.tokens, post.masks, post.scores, strict=True)
    ):
        mask = _mask(tokens, masks)
        override = overrides[index] if index < len(overrides) else {}
        yield Row(
            tokens=np.asarray(tokens, np.int32),
            mask=mask,
            logprobs=_logprobs(post.inference_logprobs, index, mask),
            reward=score,
            group_id=group_id,
            versions=np.where(mask, np.int32(policy_version), np.int32(-1)),
            messages=post.messages[index] if post.messages else [],
            learn=not override.get("set_advantage_to_zero", False),
            trajectory=index,
            sampling=_spans(post.generation_params or {}, index, len(tokens)),
        )


def _spans(params: Json, index: int, length: int) -> list[SamplingSpan]:
    if not (rows := params.get("sampling")):
        return [span_of(params, "unknown", 0, length)]
    return msgspec.convert(rows[index], list[SamplingSpan])


def _mask(tokens: list[int], labels: list[int]) -> NDArray[np.uint8]:
    """Labels are token ids and -100, or 0 and 1."""
    if labels != tokens and {0, 1}.issuperset(labels):
        return np.asarray(labels, np.uint8)
    trained: NDArray[np.bool_] = np.asarray(labels, np.int64) != _NOT_TRAINED
    return trained.astype(np.uint8)


def _logprobs(
    column: list[list[float]] | None, index: int, mask: NDArray[np.uint8]
) -> NDArray[np.float32] | None:
    """The API has 1.0 where nothing was sampled."""
    if not column:
        return None
    return np.where(mask, np.asarray(column[index], np.float32), np.float32(0.0))


def opened(image: RowImage) -> Any:
    """An image as Pillow's, in RGB, as vLLM makes it: turned as its EXIF data say, on white where
    it is transparent. Raises InputError."""
    from PIL import Image, ImageOps

    try:
        read = ImageOps.exif_transpose(Image.open(io.BytesIO(image.data)))
        if not read.has_transparency_data:
            return read.convert("RGB")
        read = read.convert("RGBA")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(
            f"Image {image.sha256[:12]} of a row cannot be read: {error}", place="images"
        ) from error
    white = Image.new("RGB", read.size, (255, 255, 255))
    white.paste(read, mask=read.getchannel("A"))
    return white


def pixels(processor: Any, rows: Sequence[Sequence[RowImage]]) -> dict[str, Any]:
    """What an image processor of transformers makes of the images of rows, as tensors.

    `pixel_values`, and `image_grid_thw` or `pixel_attention_mask` where the model has them. Raises
    InputError: an image cannot be read, or is not of a size that the processor takes.
    """
    shown = [[opened(image) for image in row] for row in rows]
    try:
        made = processor(images=shown, return_tensors="pt")
    except ValueError as error:
        raise InputError(f"Images of a row cannot be used: {error}", place="images") from error
    names = ("pixel_values", "image_grid_thw", "pixel_attention_mask")
    return {name: made[name] for name in names if name in made}
