"""Reads delivered groups back (lines of `envserver process`, groups of a server) and checks each
row. Out: a `Delivery`: the rows whose arrays are consistent, and a `Finding` for each fault.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy as np
from envserver_records import Group, Sequence, Trajectory, unpack
from envserver_records.errors import NotFoundError
from envserver_records.experts import experts_of_row, row_experts
from envserver_records.images import RowImage, images_of, images_of_row
from envserver_records.packing import ready
from envserver_records.records import Tokens, digest_after, is_intact, link_of
from envserver_records.sampling import LEAST_LOGPROB, LOGPROB_ROUNDING
from envserver_records.wire import NATIVE
from numpy.typing import NDArray

from ..export.stored_sources import GroupsServer
from ..formats.atropos import NO_LOGPROB, NOT_TRAINED
from ..rollouts.audit import AuditedRow, audited, is_altered

_LARGEST_ID: Final = 2**31 - 1

Column = NDArray[Any]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A fault and its place.
    `kind`: changed or order (its digest, or its place in the file, is not that which was written);
    unreadable, rows, lengths, token_id, mask, logprob, versions, images or experts (faults of the
    data); logprobs_differ, refused or the kind of an EngineError (faults found by the engine)."""

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


Fault = tuple[str, str, int | None]
"""Kind, message and first position."""


class Delivery(msgspec.Struct):
    """The content of one group.

    Args:
        size: number of rows, broken ones included.
        not_compared, tokens_not_compared: correct rows without anything to compare, and their
            trained tokens, by reason.
        end: bytes of the file up to the end of this group; `line`: of it, from 1.
        unsealed: it has no digest: an older version, or another program, wrote it.
    """

    rows: list[AuditedRow] = msgspec.field(default_factory=list)
    findings: list[Finding] = msgspec.field(default_factory=list)
    size: int = 0
    not_compared: Counter[str] = msgspec.field(default_factory=Counter)
    tokens_not_compared: Counter[str] = msgspec.field(default_factory=Counter)
    end: int = 0
    group_id: str = ""
    line: int | None = None
    unsealed: bool = False

    def find(self, kind: str, message: str, **place: Any) -> None:
        place = {"line": self.line, "group_id": self.group_id, **place}
        self.findings.append(Finding(kind=kind, message=message, **place))

    def add(
        self,
        make_row: Callable[[list[RowImage]], AuditedRow],
        faults: list[Fault],
        images: Callable[[], list[RowImage]],
        experts: Callable[[], object],
        **place: Any,
    ) -> None:
        """Adds a row that has no fault, with its images; `images` and `experts` raise ValueError
        for those that do not fit it."""
        for kind, message, position in faults:
            self.find(kind, message, position=position, **place)
        kind = "images"
        try:
            shown = images()
            kind = "experts"
            experts()
        except ValueError as error:
            self.find(kind, str(error), **place)
            return
        if not faults:
            self.rows.append(make_row(shown))


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
    """A group in the Atropos format, with envserver's additions if it has them."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    inference_logprobs: list[list[float | None]] | None = None
    generation_params: dict[str, Any] | None = None
    images: Any = None
    envserver: _Facts | None = None


ready(_Line)


def read_line(data: bytes, number: int) -> Delivery:
    delivery = Delivery(line=number)
    try:
        line = _decode(data)
    except ValueError as error:
        delivery.find("unreadable", str(error))
        return delivery
    return _Reader(line, line.envserver or _Facts("", []), delivery, -1).read()


class LineChain:
    def __init__(self) -> None:
        self._before = ""
        self._any = False

    def check(self, data: bytes, number: int, delivery: Delivery) -> None:
        """Adds to `delivery` how line `number` is not the one that was written there.
        Lines of older versions have no link; they come before all that have one."""
        link = link_of(data)
        expected, self._before = self._before, digest_after(data)
        if link is None and not (self._any or b'"chain"' in data[-512:]):
            delivery.unsealed = True
            return
        self._any = True
        if link is None or not link.intact:
            words = "its contents were changed: the digest differs"
            if link is None:
                words = "its digest was removed, or the line was rewritten"
            delivery.find("changed", words, line=number)
        if link is not None and link.previous not in ("", expected):
            words = (
                f"it does not follow line {number - 1}"
                if number > 1
                else "it is not the first line that was written"
            )
            words += ": a group before it was changed, removed or moved"
            delivery.find("order", words, line=number)


def read_body(group_id: str, kind: str, policy_version: int, body: bytes | memoryview) -> Delivery:
    delivery = Delivery(group_id=group_id)
    try:
        if kind in NATIVE:
            return _read_group(unpack(body, Group), body)
        if kind != "atropos":
            raise ValueError(f"its format {kind!r} is unknown")
        line, facts = _decode(bytes(body)), _Facts(group_id, [])
        return _Reader(line, facts, delivery, policy_version).read()
    except (ValueError, msgspec.DecodeError) as error:
        delivery.find("unreadable", str(error))
        return delivery


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
    def __init__(self, line: _Line, facts: _Facts, delivery: Delivery, policy_version: int) -> None:
        self._line = line
        self._facts = facts
        self._policy_version = policy_version
        self._delivery = delivery
        self._find = delivery.find
        delivery.size, delivery.group_id = len(line.tokens), facts.group_id

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
                    words = "also belongs to another rollout" if row in owners else "is missing"
                    self._find("rows", f"its row {row} {words}", rollout_id=rollout.rollout_id)
                owners[row] = (rollout, index)
        for row in set(range(len(self._line.tokens))) - set(owners):
            self._find("rows", "the row belongs to no rollout", row=row)
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
        said = np.array(
            [np.nan if logprob is None else logprob for logprob in logprobs], np.float64
        )
        versions = self._versions(rollout, index, trained)
        faults = [
            *_wrong_labels(ids, labels, trained),
            *_wrong_numbers(ids, trained, said, NO_LOGPROB if self._line.envserver else None),
        ]
        if versions is None:
            faults.append(("versions", "its spans do not partition the row", None))
        flags = _flags(rollout, index)

        def row(images: list[RowImage]) -> AuditedRow:
            assert versions is not None
            return AuditedRow(
                tokens=ids.astype(np.int32),
                mask=trained.astype(np.uint8),
                logprobs=said.astype(np.float32),
                versions=versions,
                flags=flags,
                altered=is_altered(flags, self._line.generation_params or {}),
                group_id=self._facts.group_id,
                rollout_id=rollout_id,
                number=number,
                line=self._delivery.line,
                images=images,
            )

        def experts() -> None:
            row_experts(experts_of_row(self._facts.experts, number), trained.astype(np.uint8))

        self._delivery.add(
            row, faults, partial(self._images, number), experts, rollout_id=rollout_id, row=number
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


def _flags(rollout: _Rollout | None, index: int) -> list[str]:
    if rollout is None:
        return []
    return rollout.row_flags[index] if index < len(rollout.row_flags) else rollout.flags


def _integers(numbers: list[int]) -> Column:
    """Returns int64[T]; a number that does not fit becomes -1, which is not a valid id."""
    return np.array([number if abs(number) < 2**62 else -1 for number in numbers], np.int64)


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
        words = "its contents were changed: the digest differs"
        delivery.find("changed", words)
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
    place: dict[str, Any] = {"rollout_id": trajectory.rollout_id, "row": delivery.size}
    columns = (sequence.mask, sequence.logprobs, sequence.calls, sequence.versions)
    if any(len(column) != len(sequence.tokens) for column in columns):
        sizes = ", ".join(str(len(column)) for column in (sequence.tokens, *columns))
        delivery.find("lengths", f"its arrays have {sizes} numbers", **place)
        return
    trained = sequence.mask != 0
    faults = [*_wrong_numbers(sequence.tokens, trained, sequence.logprobs, 0.0)]
    unsampled = np.flatnonzero(trained & (sequence.calls < 0))
    if len(unsampled):
        words = f"a token is trained that no call sampled{_more(unsampled)}"
        faults.append(("mask", words, int(unsampled[0])))
    delivery.add(
        lambda images: audited(
            sequence,
            images,
            altered=is_altered(sequence.flags, group.generation_params),
            group_id=group.group_id,
            rollout_id=trajectory.rollout_id,
            number=delivery.size,
        ),
        faults,
        lambda: images_of(sequence.images, group.images, len(sequence.tokens)),
        lambda: row_experts(sequence.experts, sequence.mask),
        **place,
    )


class Source(Protocol):
    """Groups to verify. All methods may block."""

    @property
    def size(self) -> int | None: ...

    def newest_version(self) -> int:
        """Returns the policy version that the engine most likely serves now; -1 if unknown."""

    def deliveries(self) -> Iterator[Delivery]: ...


class FileSource:
    def __init__(self, path: Path, *, digests: bool = True) -> None:
        if not path.is_file():
            raise NotFoundError(f"There is no file {str(path)!r}.")
        self.size = path.stat().st_size
        self._path = path
        self._digests = digests

    def newest_version(self) -> int:
        with self._path.open("rb") as lines:
            return max(map(newest_version, lines), default=-1)

    def deliveries(self) -> Iterator[Delivery]:
        end, chain = 0, LineChain()
        with self._path.open("rb") as lines:
            for number, data in enumerate(lines, 1):
                end += len(data)
                if data.strip():
                    delivery = read_line(data, number)
                    delivery.end = end
                    if self._digests:
                        chain.check(data, number, delivery)
                    yield delivery


class ServerSource(GroupsServer):
    size = None

    def newest_version(self) -> int:
        published = int(self.get("/v1/policy-version").json()["version"])
        if published >= 0:
            return published
        return max((int(group["policy_version"]) for group in self.listed()), default=-1)

    def deliveries(self) -> Iterator[Delivery]:
        for whole in map(self.whole, self.delivered()):
            yield read_body(whole.group_id, whole.format, whole.policy_version, whole.body)
