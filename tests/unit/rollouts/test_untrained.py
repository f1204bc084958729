"""Counting the tokens that flags keep from training, and the ceiling on their share."""

from __future__ import annotations

import numpy as np
from envserver_records.records import Call, VersionSpan
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import examples

from envserver.rollouts.untrained import Untrained, UntrainedCeiling, untrained_of
from envserver.tokens import build
from envserver.tokens.flags import Actions

FLAGS = ("structured_output_masked", "undelivered_completion", "truncated_length")


def call(index: int, sampled: int, flags: list[str], versions: list[int], *, exact: bool) -> Call:
    cut = sampled // 2 if len(versions) > 1 else sampled
    spans = [VersionSpan(versions[0], 0, cut), VersionSpan(versions[-1], cut, sampled)]
    return Call(
        index=index,
        model="m",
        prompt_ids=np.array([index, 1], np.int32),
        completion_ids=np.full(sampled, 7, np.int32),
        logprobs=np.full(sampled, -1.0, np.float32),
        versions=[span for span in spans if span.start < span.end],
        exact=exact,
        finish_reason="stop",
        message={},
        messages=[],
        flags=flags,
    )


@given(
    st.lists(
        st.tuples(
            st.integers(1, 9),
            st.lists(st.sampled_from(FLAGS), max_size=2, unique=True),
            st.sampled_from([[3], [3, 4]]),
            st.booleans(),
        ),
        max_size=4,
    )
)
@settings(max_examples=examples(80))
def test_trained_and_untrained_tokens_are_all_that_was_sampled(
    drawn: list[tuple[int, list[str], list[int], bool]],
) -> None:
    calls = [
        call(index, size, flags, versions, exact=exact)
        for index, (size, flags, versions, exact) in enumerate(drawn)
    ]
    for actions in (Actions(), Actions({"mixed_versions": "mask"})):
        rows = build(calls, actions)
        counted = untrained_of(calls, rows, [], actions, need_exact=True)
        trained = sum(int(row.mask.sum()) for row in rows)
        assert counted.sampled == sum(len(one.completion_ids) for one in calls if one.exact)
        assert counted.tokens + trained == counted.sampled
        assert all(actions.of(flag) != "train" for flag in counted.by_flag)


def test_a_dropped_rollout_counts_whole_where_exact_tokens_are_needed() -> None:
    calls = [call(0, 5, [], [3], exact=True), call(1, 4, ["missing_logprobs"], [3], exact=False)]
    flags = ["missing_logprobs", "truncated_length"]
    rows = build(calls)
    counted = untrained_of(calls, rows, flags, Actions(), need_exact=True)
    assert counted == Untrained(9, {"missing_logprobs": 9})
    assert untrained_of(calls, rows, flags, Actions(), need_exact=False) == Untrained(5, {})


def test_groups_over_the_share_are_not_offered_while_a_full_window_is_over_it() -> None:
    ceiling = UntrainedCeiling(0.1, 3)
    bad, good = Untrained(10, {"finish_abort": 5}), Untrained(10)
    judged = [ceiling.judge(one) is None for one in (bad, good, bad, good, good, good, bad, good)]
    assert judged == [True, True, False, True, True, True, False, True]
    assert ceiling.is_over
    assert ceiling.report()["tokens"] == {"finish_abort": 5}
    assert "--tokens.train finish_abort" in ceiling.hint()
    for _ in range(3):
        ceiling.judge(good)
    assert not ceiling.is_over and ceiling.report()["message"] == ""
    off = UntrainedCeiling(1.0, 1)
    assert off.judge(Untrained(10, {"finish_abort": 10})) is None
