"""The invariants of a trajectory's tokens, checked before it may be delivered.

By number:
 1 every sampled token is trained once (none of a call that is masked), as it was sampled;
 2 its logprob with it, finite and not positive;
 3 the arrays of a row have one length, and say of each token which call of the row's path
   sampled it; what is trained was sampled; context has no logprob;
 4 a row begins with what the model saw and sampled, for each call of its path, and ends there;
 6 as many logprobs as ids;
 7 version spans are a partition of the completion, and rows repeat them; a row that trains several
   versions says so, and trains the newest alone where those are masked;
 8 each call of a path continues the one before it, which was committed earlier, by the same agent
   and model, and is the same in every row;
10 calls are numbered in the order in which they were committed;
11 images are in order and within the prompt that they belong to, and a row has the images of each
   call of its path at their places;
12 a row has the routed experts that its calls recorded: of the tokens that an earlier call computed
   those of that call.

(5, that the engine saw what it was sent, is checked where it is sent; 9, that independent calls may
come in any order, follows from no single trajectory.)
"""

from __future__ import annotations

import numpy as np
from envserver_records.errors import TokensError
from envserver_records.experts import row_experts
from envserver_records.records import Call, Sequence
from envserver_records.sampling import LOGPROB_ROUNDING
from numpy.typing import NDArray

from .flags import DEFAULT, Actions, flags_of, token_versions
from .images import images_before

Positions = NDArray[np.int64]


def check(calls: list[Call], sequences: list[Sequence], actions: Actions = DEFAULT) -> None:
    """Checks that `sequences` hold exactly what `calls` recorded, in linear time.

    The `detail` of a TokensError holds the invariant's number and the call or row.
    """
    check_calls(calls)
    recorded = _Recorded([call for call in calls if call.exact])
    masks_old = actions.of("mixed_versions") == "mask"
    times = np.zeros(len(recorded.tokens), np.int32)
    outdated = np.zeros(len(recorded.tokens), np.bool_)
    met = np.zeros(len(recorded.tokens), np.bool_)
    before: dict[int, int] = {}
    for row, sequence in enumerate(sequences):
        _check_shape(row, sequence)
        _check_path(row, sequence, recorded)
        sampled = np.flatnonzero(sequence.calls >= 0)
        places = recorded.places(sequence, sampled)
        trained = sequence.mask[sampled] == 1
        _check_columns(row, sequence, recorded, sampled[trained], places[trained])
        newest = _check_versions(row, sequence, recorded, places, trained, masks_old)
        times[places[trained]] += 1
        if masks_old:
            fresh = places[~met[places]]
            met[fresh] = True
            outdated[fresh] = recorded.versions[fresh] < newest
        _check_prefixes(row, sequence, recorded, before)
        _check_experts(row, sequence, recorded)
    _check_trained_once(recorded, times, outdated, actions)


def check_calls(calls: list[Call]) -> None:
    """Checks each exact call of `calls` by itself (2, 6, 7, 11), and their order (10)."""
    last = -1
    for call in calls:
        if call.index <= last:
            raise _broken(10, f"it was committed after call {last}", call=call.index)
        last = call.index
        if call.exact:
            _check_sizes(call)
    exact = [call for call in calls if call.exact]
    logprobs = np.concatenate([np.empty(0, np.float32), *(call.logprobs for call in exact)])
    # Also false for NaN.
    possible = (logprobs <= LOGPROB_ROUNDING) & (logprobs > -np.inf)
    if not possible.all():
        index = _call_at(exact, int(np.argmin(possible)))
        raise _broken(2, "a logprob is positive or not finite", call=index)


def _check_sizes(call: Call) -> None:
    size = len(call.completion_ids)
    if len(call.logprobs) != size:
        raise _broken(
            6, f"{len(call.logprobs)} logprobs for {size} sampled tokens", call=call.index
        )
    at = 0
    for image in call.images:
        if image.offset < at or image.length < 1 or image.end > len(call.prompt_ids):
            raise _broken(11, f"an image at token {image.offset} has no place", call=call.index)
        at = image.end
    at = 0
    for span in call.versions:
        if span.start != at or span.end < span.start:
            raise _broken(7, f"version spans have a gap at token {at}", call=call.index)
        at = span.end
    if at != size:
        raise _broken(7, f"version spans end at {at} of {size} tokens", call=call.index)


class _Recorded:
    """The completions of all exact `calls`, in order of commit, concatenated into columns."""

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls
        self.by_index = {call.index: call for call in calls}
        self.sizes = np.array([len(call.completion_ids) for call in calls], np.int64)
        none, no_logprobs = np.empty(0, np.int32), np.empty(0, np.float32)
        self.tokens = np.concatenate([none, *(call.completion_ids for call in calls)])
        self.logprobs = np.concatenate([no_logprobs, *(call.logprobs for call in calls)])
        self.versions = np.concatenate([none, *map(token_versions, calls)])
        begins = np.cumsum(self.sizes) - self.sizes
        self._shift = np.zeros(calls[-1].index + 1 if calls else 0, np.int64)
        for call, begin in zip(calls, begins, strict=True):
            self._shift[call.index] = begin - len(call.prompt_ids)

    def places(self, sequence: Sequence, sampled: Positions) -> Positions:
        return sampled + self._shift[sequence.calls[sampled]]


def _check_shape(row: int, sequence: Sequence) -> None:
    columns = (sequence.mask, sequence.logprobs, sequence.calls, sequence.versions)
    if any(len(column) != len(sequence.tokens) for column in columns):
        raise _broken(3, "the arrays of a row differ in length", row=row)
    if np.any(sequence.mask > 1):
        raise _broken(3, "a mask is neither 0 nor 1", row=row)
    if np.any(sequence.logprobs[sequence.mask == 0] != 0):
        raise _broken(3, "context carries a logprob", row=row)
    if np.any(sequence.calls[sequence.mask == 1] < 0):
        raise _broken(3, "a trained token was not sampled", row=row)


def _check_path(row: int, sequence: Sequence, recorded: _Recorded) -> None:
    calls = np.full(len(sequence.tokens), -1, np.int32)
    previous: Call | None = None
    for index in sequence.path:
        call = recorded.by_index.get(index)
        if call is None:
            raise _broken(3, f"its path holds call {index}, which is not exact", row=row)
        if previous is not None and not _may_follow(previous, call):
            raise _broken(8, f"call {index} does not continue call {previous.index}", row=row)
        calls[len(call.prompt_ids) : end_of(call)] = index
        previous = call
    if previous is None or end_of(previous) != len(sequence.tokens):
        raise _broken(4, "a row does not end with its last call", row=row)
    if previous.agent != sequence.agent:
        raise _broken(8, "a row names another agent than that of its calls", row=row)
    if not np.array_equal(calls, sequence.calls):
        raise _broken(3, "a token is attributed to the wrong call", row=row)


def _may_follow(previous: Call, call: Call) -> bool:
    return (
        previous.index < call.index
        and len(previous.completion_ids) > 0
        and end_of(previous) <= len(call.prompt_ids)
        and (previous.agent, previous.model) == (call.agent, call.model)
    )


def _check_columns(
    row: int, sequence: Sequence, recorded: _Recorded, trained: Positions, places: Positions
) -> None:
    """`trained`: positions in the row; `places`: the same tokens in the columns of `recorded`."""
    if not np.array_equal(sequence.tokens[trained], recorded.tokens[places]):
        raise _broken(1, "a trained token is not the one that was sampled", row=row)
    if not np.array_equal(sequence.logprobs[trained], recorded.logprobs[places]):
        raise _broken(2, "logprobs are not those recorded", row=row)


def _check_versions(
    row: int,
    sequence: Sequence,
    recorded: _Recorded,
    places: Positions,
    trained: NDArray[np.bool_],
    masks_old: bool,
) -> int:
    """Returns the newest version that the row trains; `places` are of its sampled tokens."""
    versions = recorded.versions[places]
    if not np.array_equal(sequence.versions[sequence.calls >= 0], versions):
        raise _broken(7, "versions are not those recorded", row=row)
    if np.any(sequence.versions[sequence.calls < 0] != -1):
        raise _broken(7, "context carries a version", row=row)
    newest = int(versions[trained].max(initial=-1))
    if np.any(versions[trained] != newest):
        if "mixed_versions" not in sequence.flags:
            raise _broken(7, "several versions are trained, and no flag says so", row=row)
        if masks_old:
            raise _broken(7, "tokens of an older version are trained", row=row)
    return newest


def _check_prefixes(
    row: int, sequence: Sequence, recorded: _Recorded, before: dict[int, int]
) -> None:
    """Checks that the row begins with prompt and completion of each call of its path.

    A call that an earlier row holds was compared there, with all that precede it: of those, only
    the last one is compared again. `before` maps each call to the one before it, over all rows.
    """
    compared: list[int] = []
    shared, previous = None, -1
    for index in sequence.path:
        if index not in before:
            before[index] = previous
            compared.append(index)
        elif before[index] == previous:
            shared = index
        else:
            raise _broken(8, f"call {index} continues another call elsewhere", row=row)
        previous = index
    for index in compared if shared is None else [shared, *compared]:
        call = recorded.by_index[index]
        size = len(call.prompt_ids)
        if not (
            np.array_equal(sequence.tokens[:size], call.prompt_ids)
            and np.array_equal(sequence.tokens[size : end_of(call)], call.completion_ids)
        ):
            raise _broken(4, f"it is not what the model saw at call {index}", row=row)
        end = end_of(call)
        if images_before(sequence.images, end) != images_before(call.images, end):
            raise _broken(11, f"its images are not those of call {index}", row=row)


def _check_experts(row: int, sequence: Sequence, recorded: _Recorded) -> None:
    try:
        table = row_experts(sequence.experts, sequence.mask)
    except ValueError as error:
        raise _broken(12, str(error), row=row) from error
    begin = 0
    for index in sequence.path:
        call = recorded.by_index[index]
        if table is None or call.experts is None or call.experts.start > begin:
            continue
        end = end_of(call) - 1
        own = call.experts.table[begin - call.experts.start :]
        if not np.array_equal(table[begin:end], own):
            raise _broken(12, f"its routed experts are not those of call {index}", row=row)
        begin = end


def _check_trained_once(
    recorded: _Recorded, times: NDArray[np.int32], outdated: NDArray[np.bool_], actions: Actions
) -> None:
    """`times`: how often each sampled token is trained; `outdated`: it need not be."""
    wanted = [actions.worst(flags_of(call)) == "train" for call in recorded.calls]
    owed = np.repeat(np.array(wanted, np.int32), recorded.sizes)
    wrong = np.flatnonzero((times != owed) & ~(outdated & (times == 0)))
    if wrong.size:
        index = _call_at(recorded.calls, int(wrong[0]))
        raise _broken(1, "sampled tokens are missing, doubled or masked", call=index)


def _call_at(calls: list[Call], place: int) -> int:
    """Returns the index of the call that sampled token `place` of all completions."""
    ends = np.cumsum([len(call.completion_ids) for call in calls])
    return calls[int(np.searchsorted(ends, place, side="right"))].index


def end_of(call: Call) -> int:
    return len(call.prompt_ids) + len(call.completion_ids)


def _broken(invariant: int, message: str, **where: int) -> TokensError:
    return TokensError(
        f"Invariant {invariant} of the recorded tokens does not hold: {message}.",
        hint="The rollout is not delivered.",
        invariant=invariant,
        **where,
    )
