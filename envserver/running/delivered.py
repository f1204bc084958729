"""Reads delivered groups back (lines of `envserver process`, groups of a server) and checks each
row. Out: a `Delivery`: the rows whose arrays are consistent, and a `Finding` for each fault.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import quote

import httpx
import msgspec
import numpy as np
from envserver_records import Group, Sequence, Trajectory, unpack
from envserver_records.errors import ConflictError, InputError, NotFoundError
from envserver_records.experts import experts_of_row, row_experts
from envserver_records.http_errors import authorization
from envserver_records.images import RowImage, images_of, images_of_row
from envserver_records.packing import ready
from envserver_records.records import Tokens, digest_after, is_intact, link_of
from envserver_records.sampling import LEAST_LOGPROB, LOGPROB_ROUNDING
from envserver_records.servers import AsyncServersClient
from envserver_records.wire import GROUP_MSGPACK, WireGroup
from numpy.typing import NDArray

from ..formats.atropos import NO_LOGPROB, NOT_TRAINED
from ..rollouts.audit import AuditedRow, is_altered

_LARGEST_ID: Final = 2**31 - 1

Column = NDArray[Any]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A fault and its place.
    `kind`: changed or order (its digest, or its place in the file, is not that which was written);
    unreadable, rows, lengths, token_id, mask, logprob, versions, images or experts (faults of the
    data); logprobs_differ, refused or the kind of an EngineError (faults found by the engine).
    """

    kind: str
    message: str
    line: int | None = None
    group_id: str = ""
    rollout_id: str = ""
    row: int | None = None
    position: int | None = None

    @property
    def place(self) -> str:
        parts = [
            None if self.line is None else f"line {self.line}",
            self.rollout_id or self.group_id,
            None if self.row is None else f"row {self.row}",
            None if self.position is None else f"position {self.position}",
        ]
        return ", ".join(part for part in parts if part)


class Delivery(msgspec.Struct):
    """The content of one group.

    Args:
        size: number of rows, broken ones included.
        not_compared, tokens_not_compared: correct rows without anything to compare, and their
            trained tokens, by reason.
        end: bytes of the file up to the end of this group.
        unsealed: it has no digest: an older version, or another program, wrote it.
    """

    rows: list[AuditedRow] = msgspec.field(default_factory=list)
    findings: list[Finding] = msgspec.field(default_factory=list)
    size: int = 0
    not_compared: Counter[str] = msgspec.field(default_factory=Counter)
    tokens_not_compared: Counter[str] = msgspec.field(default_factory=Counter)
    end: int = 0
    group_id: str = ""
    unsealed: bool = False


class _Rollout(msgspec.Struct):
    rollout_id: str
    rows: list[int]
    flags: list[str] = msgspec.field(default_factory=list)
    row_flags: list[list[str]] = msgspec.field(default_factory=list)
    versions: list[list[tuple[int, int, int]]] = msgspec.field(default_factory=list)


class _Facts(msgspec.Struct):
    group_id: str
    rollouts: list[_Rollout]
    images: dict[str, bytes] = {}
    experts: Any = None


class _Line(msgspec.Struct):
    """A group in the Atropos wire format, with envserver's additions if it has them."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    inference_logprobs: list[list[float | None]] | None = None
    generation_params: dict[str, Any] | None = None
    images: Any = None
    envserver: _Facts | None = None


ready(_Line)


def read_line(data: bytes, number: int) -> Delivery:
    try:
        line = _decode(data)
    except ValueError as error:
        return Delivery(findings=[Finding(kind="unreadable", message=str(error), line=number)])
    facts = line.envserver or _Facts("", [])
    return _Reader(line, facts, number, -1).read()


class LineChain:
    def __init__(self) -> None:
        self._before = ""
        self._any = False

    def check(self, data: bytes, number: int, delivery: Delivery) -> None:
        """Adds to `delivery` how line `number` is not the one that was written there.
        Lines of older versions have no link; they come before all that have one.
        """
        link = link_of(data)
        expected, self._before = self._before, digest_after(data)
        if link is None and not (self._any or b'"chain"' in data[-512:]):
            delivery.unsealed = True
            return
        self._any = True
        place: dict[str, Any] = {"line": number, "group_id": delivery.group_id}
        if link is None or not link.intact:
            words = "its contents are not those that were written: the digest is another"
            if link is None:
                words = "its digest was removed, or the line was written anew"
            delivery.findings.append(Finding(kind="changed", message=words, **place))
        if link is not None and link.previous not in ("", expected):
            words = (
                f"it does not follow line {number - 1}"
                if number > 1
                else "it is not the first line that was written"
            )
            words += ": a group before it was changed, removed or moved"
            delivery.findings.append(Finding(kind="order", message=words, **place))


def read_body(group_id: str, kind: str, policy_version: int, body: bytes | memoryview) -> Delivery:
    try:
        if kind == "group":
            return _read_group(unpack(body, Group), body)
        if kind != "atropos":
            raise ValueError(f"its format {kind!r} is unknown")
        return _Reader(_decode(bytes(body)), _Facts(group_id, []), None, policy_version).read()
    except (ValueError, msgspec.DecodeError) as error:
        found = Finding(kind="unreadable", message=str(error), group_id=group_id)
        return Delivery(findings=[found])


def newest_version(data: bytes) -> int:
    try:
        facts = _decode(data).envserver
    except ValueError:
        return -1
    spans = [
        span
        for rollout in (facts.rollouts if facts else [])
        for row in rollout.versions
        for span in row
    ]
    return max((version for version, _, _ in spans), default=-1)


def _decode(data: bytes) -> _Line:
    try:
        return msgspec.json.decode(data, type=_Line)
    except msgspec.ValidationError as error:
        raise ValueError(f"it is not a group: {error}") from None
    except msgspec.DecodeError:
        # Python writes a logprob that is not a number as NaN, which is not JSON: name the fault.
        try:
            return msgspec.convert(json.loads(data), _Line)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        except msgspec.ValidationError as error:
            raise ValueError(f"it is not a group: {error}") from None


class _Reader:
    def __init__(
        self, line: _Line, facts: _Facts, line_number: int | None, policy_version: int
    ) -> None:
        self._line = line
        self._facts = facts
        self._number = line_number
        self._policy_version = policy_version
        self._delivery = Delivery(size=len(line.tokens), group_id=facts.group_id)

    def read(self) -> Delivery:
        if not self._columns_agree():
            return self._delivery
        owners = self._owners()
        logprobs = self._line.inference_logprobs
        for number in range(len(self._line.tokens)):
            if logprobs is None:
                self._delivery.not_compared["no_logprobs"] += 1
                trained = sum(label != NOT_TRAINED for label in self._line.masks[number])
                self._delivery.tokens_not_compared["no_logprobs"] += trained
            else:
                self._read_row(number, logprobs[number], *owners.get(number, (None, 0)))
        return self._delivery

    def _columns_agree(self) -> bool:
        line = self._line
        sizes = {"tokens": len(line.tokens), "masks": len(line.masks), "scores": len(line.scores)}
        if line.inference_logprobs is not None:
            sizes["inference_logprobs"] = len(line.inference_logprobs)
        if len(set(sizes.values())) == 1:
            return True
        words = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        self._find("rows", f"the lists differ in their rows: {words}")
        return False

    def _owners(self) -> dict[int, tuple[_Rollout, int]]:
        owners: dict[int, tuple[_Rollout, int]] = {}
        if not self._line.envserver:
            return owners
        for rollout in self._facts.rollouts:
            for index, row in enumerate(rollout.rows):
                if row in owners or not 0 <= row < len(self._line.tokens):
                    words = "belongs to another rollout, too" if row in owners else "is missing"
                    self._find("rows", f"its row {row} {words}", rollout_id=rollout.rollout_id)
                owners[row] = (rollout, index)
        for row in set(range(len(self._line.tokens))) - set(owners):
            self._find("rows", "the row is of no rollout", row=row)
        return owners

    def _read_row(
        self, number: int, logprobs: list[float | None], rollout: _Rollout | None, index: int
    ) -> None:
        rollout_id = rollout.rollout_id if rollout else ""
        tokens, masks = self._line.tokens[number], self._line.masks[number]
        if not len(tokens) == len(masks) == len(logprobs):
            words = f"{len(tokens)} tokens, {len(masks)} masks, {len(logprobs)} logprobs"
            self._find("lengths", words, rollout_id=rollout_id, row=number)
            return
        ids, labels = _integers(tokens), _integers(masks)
        trained = labels != NOT_TRAINED
        said = np.array([np.nan if one is None else one for one in logprobs], np.float64)
        versions = self._versions(rollout, index, trained)
        faults = [
            *_wrong_labels(ids, labels, trained),
            *_wrong_numbers(ids, trained, said, NO_LOGPROB if self._line.envserver else None),
        ]
        if versions is None:
            faults.append(("versions", "its spans do not partition the row", None))
        for kind, words, position in faults:
            self._find(kind, words, rollout_id=rollout_id, row=number, position=position)
        if faults or versions is None:
            return
        kind = "images"
        try:
            images = self._images(number)
            kind = "experts"
            row_experts(experts_of_row(self._facts.experts, number), trained.astype(np.uint8))
        except ValueError as error:
            self._find(kind, str(error), rollout_id=rollout_id, row=number)
            return
        flags = _flags(rollout, index)
        self._delivery.rows.append(
            AuditedRow(
                tokens=ids.astype(np.int32),
                mask=trained.astype(np.uint8),
                logprobs=said.astype(np.float32),
                versions=versions,
                flags=flags,
                altered=is_altered(flags, self._line.generation_params or {}),
                group_id=self._facts.group_id,
                rollout_id=rollout_id,
                number=number,
                line=self._number,
                images=images,
            )
        )

    def _images(self, number: int) -> list[RowImage]:
        if not self._line.images or self._line.envserver is None:
            return []
        size = len(self._line.tokens[number])
        return images_of_row(self._line.images, number, self._facts.images, size)

    def _versions(self, rollout: _Rollout | None, index: int, trained: Column) -> Tokens | None:
        """Returns int32[T]; None if the spans do not fit the row."""
        if rollout is None or not rollout.versions:
            return np.where(trained, np.int32(self._policy_version), np.int32(-1))
        if index >= len(rollout.versions):
            return None
        versions = np.full(len(trained), -1, np.int32)
        at = 0
        for version, start, end in rollout.versions[index]:
            if start != at or end < start or not -1 <= version <= _LARGEST_ID:
                return None
            versions[start:end] = version
            at = end
        return versions if at == len(trained) else None

    def _find(self, kind: str, message: str, **place: Any) -> None:
        facts = {"line": self._number, "group_id": self._facts.group_id, **place}
        self._delivery.findings.append(Finding(kind=kind, message=message, **facts))


def _flags(rollout: _Rollout | None, index: int) -> list[str]:
    if rollout is None:
        return []
    return rollout.row_flags[index] if index < len(rollout.row_flags) else rollout.flags


def _integers(numbers: list[int]) -> Column:
    """Returns int64[T]; a number that does not fit becomes -1, which is not a valid id."""
    return np.array([number if abs(number) < 2**62 else -1 for number in numbers], np.int64)


Fault = tuple[str, str, int | None]
"""Kind, message and first position."""


def _wrong_labels(ids: Column, labels: Column, trained: Column) -> Iterator[Fault]:
    wrong = np.flatnonzero(trained & (labels != ids))
    if len(wrong):
        at = int(wrong[0])
        words = f"the mask says {labels[at]} where the token is {ids[at]}{_more(wrong)}"
        yield "mask", words, at


def _wrong_numbers(
    ids: Column, trained: Column, logprobs: Column, context_logprob: float | None
) -> Iterator[Fault]:
    """`context_logprob`: expected where nothing was sampled; None: any value."""
    wrong = np.flatnonzero((ids < 0) | (ids > _LARGEST_ID))
    if len(wrong):
        yield "token_id", f"{ids[wrong[0]]} is not a token id{_more(wrong)}", int(wrong[0])
    fine = (logprobs >= LEAST_LOGPROB) & (logprobs <= LOGPROB_ROUNDING)
    wrong = np.flatnonzero(trained & ~fine)
    if len(wrong):
        words = f"a trained token has the logprob {logprobs[wrong[0]]}{_more(wrong)}"
        yield "logprob", words, int(wrong[0])
    if context_logprob is None:
        return
    wrong = np.flatnonzero(~trained & (logprobs != context_logprob))
    if len(wrong):
        words = f"a token that is not trained has the logprob {logprobs[wrong[0]]}{_more(wrong)}"
        yield "mask", words, int(wrong[0])


def _more(wrong: Column) -> str:
    return f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""


def _read_group(group: Group, body: bytes | memoryview) -> Delivery:
    delivery = Delivery(group_id=group.group_id, unsealed=not group.digest)
    if group.digest and not is_intact(body):
        words = "its contents are not those that were sealed: the digest is another"
        found = Finding(kind="changed", message=words, group_id=group.group_id)
        delivery.findings.append(found)
    for trajectory in group.trajectories:
        for sequence in trajectory.sequences:
            _read_sequence(delivery, group, trajectory, sequence)
            delivery.size += 1
        if not trajectory.sequences:
            delivery.not_compared["no_tokens"] += 1
            delivery.size += 1
    return delivery


def _read_sequence(
    delivery: Delivery, group: Group, trajectory: Trajectory, sequence: Sequence
) -> None:
    place: dict[str, Any] = {
        "group_id": group.group_id,
        "rollout_id": trajectory.rollout_id,
        "row": delivery.size,
    }
    columns = (sequence.mask, sequence.logprobs, sequence.calls, sequence.versions)
    if any(len(column) != len(sequence.tokens) for column in columns):
        sizes = ", ".join(str(len(column)) for column in (sequence.tokens, *columns))
        found = Finding(kind="lengths", message=f"its arrays have {sizes} numbers", **place)
        delivery.findings.append(found)
        return
    trained = sequence.mask != 0
    faults = [*_wrong_numbers(sequence.tokens, trained, sequence.logprobs, 0.0)]
    unsampled = np.flatnonzero(trained & (sequence.calls < 0))
    if len(unsampled):
        words = f"a token is trained that no call sampled{_more(unsampled)}"
        faults.append(("mask", words, int(unsampled[0])))
    for kind, words, position in faults:
        delivery.findings.append(Finding(kind=kind, message=words, position=position, **place))
    images: list[RowImage] = []
    kind = "images"
    try:
        images = images_of(sequence.images, group.images, len(sequence.tokens))
        kind = "experts"
        row_experts(sequence.experts, sequence.mask)
    except ValueError as error:
        delivery.findings.append(Finding(kind=kind, message=str(error), **place))
        return
    if not faults:
        delivery.rows.append(
            AuditedRow(
                tokens=sequence.tokens,
                mask=sequence.mask,
                logprobs=sequence.logprobs,
                versions=sequence.versions,
                flags=sequence.flags,
                altered=is_altered(sequence.flags, group.generation_params),
                group_id=group.group_id,
                rollout_id=trajectory.rollout_id,
                number=delivery.size,
                images=images,
            )
        )


_PAGE: Final = 256
_SECONDS: Final = 60.0
_NOT_DELIVERED: Final = ("buffered", "dropped")


class Source(Protocol):
    @property
    def size(self) -> int | None: ...

    async def newest_version(self) -> int:
        """Returns the policy version that the engine most likely serves now; -1 if unknown."""

    def deliveries(self) -> AsyncIterator[Delivery]: ...


class FileSource:
    def __init__(self, path: Path, *, digests: bool = True) -> None:
        if not path.is_file():
            raise NotFoundError(f"There is no file {str(path)!r}.")
        self.size = path.stat().st_size
        self._path = path
        self._digests = digests

    async def newest_version(self) -> int:
        return await asyncio.to_thread(self._newest_version)

    def _newest_version(self) -> int:
        with self._path.open("rb") as lines:
            return max(map(newest_version, lines), default=-1)

    async def deliveries(self) -> AsyncIterator[Delivery]:
        with self._path.open("rb") as lines:
            number = end = 0
            chain = LineChain()
            while data := await asyncio.to_thread(lines.readline):
                number += 1
                end += len(data)
                if data.strip():
                    delivery = await asyncio.to_thread(read_line, data, number)
                    delivery.end = end
                    if self._digests:
                        await asyncio.to_thread(chain.check, data, number, delivery)
                    yield delivery


class ServerSource:
    """A running server, whose groups are only read."""

    size = None

    def __init__(self, url: str) -> None:
        self._url = url
        # httpx fails on zstd in several frames
        headers = {"accept-encoding": "identity", **authorization()}
        self._http = AsyncServersClient(url, timeout=_SECONDS, headers=headers)

    async def __aenter__(self) -> ServerSource:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    async def newest_version(self) -> int:
        published = int((await self._get("/v1/policy-version")).json()["version"])
        if published >= 0:
            return published
        return max([int(group["policy_version"]) async for group in self._groups()], default=-1)

    async def deliveries(self) -> AsyncIterator[Delivery]:
        """Leaves out groups that wait for others and groups that were dropped."""
        async for group in self._groups():
            if group["state"] in _NOT_DELIVERED:
                continue
            path = f"/v1/groups/{quote(group['group_id'], safe='')}"
            answer = await self._get(path, accept=GROUP_MSGPACK)
            try:
                whole = msgspec.msgpack.decode(answer.content, type=WireGroup)
            except msgspec.DecodeError as error:
                raise InputError(f"{self._url} sent no group: {error}.", place=path) from error
            yield await asyncio.to_thread(
                read_body, whole.group_id, whole.format, whole.policy_version, whole.body
            )

    async def _groups(self) -> AsyncIterator[dict[str, Any]]:
        after: int | None = 0
        while after is not None:
            page = (await self._get(f"/v1/groups?after={after}&limit={_PAGE}")).json()
            for group in page["groups"]:
                yield group
            after = page["next"]

    async def _get(self, path: str, accept: str = "application/json") -> httpx.Response:
        try:
            answer = await self._http.get(path, headers={"accept": accept})
        except httpx.TransportError as error:
            raise NotFoundError(
                f"No server answers at {self._url}: {error or type(error).__name__}."
            ) from error
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise NotFoundError(
                f"{self._url} has no {path}.", hint="Is it an envserver of this version?"
            )
        if not answer.is_success:
            raise ConflictError(
                f"{self._url} answered {path} with HTTP {answer.status_code}: {answer.text[:300]}",
                hint="ENVSERVER_TOKEN holds the token." if answer.status_code in (401, 403) else "",
            )
        return answer
