"""What prime-rl's packer gets of a group: its published `TrainingSample`."""

from __future__ import annotations

import msgspec
import pytest
from envserver_clients.adapters.prime_rl import TrainingSample, centred, samples_of_group
from envserver_records.records import Score, Trajectory
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import examples
from support.trajectories import sequence, trajectories, trajectory

from envserver import InputError


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(trajectories(), min_size=1, max_size=4))
def test_all_lists_are_as_long_as_the_tokens(group: list[Trajectory]) -> None:
    rewards = [one.score.reward or 0.0 for one in group]
    rows = [
        (one, row, advantage)
        for one, advantage in zip(group, centred(rewards), strict=True)
        for row in one.sequences
        if row.mask.any()
    ]
    samples = samples_of_group(group, temperature=0.7)
    for sample, (made, row, advantage) in zip(samples, rows, strict=True):
        assert sample.token_ids == row.tokens.tolist()
        assert sample.mask == [bool(one) and not made.truncated for one in row.mask]
        assert sample.logprobs == row.logprobs.tolist()
        assert sample.temperatures == [0.7] * len(row.tokens)
        assert sample.advantages == [advantage] * len(row.tokens)
    assert abs(sum(centred(rewards))) < 1e-6


def test_what_was_lost_is_in_no_mean() -> None:
    row = sequence([1, 2], [0, 1])
    lost = trajectory("a", row, score=Score(reward=None))
    good, bad = (trajectory(name, row, score=Score(reward=float(name == "b"))) for name in "bc")
    samples = samples_of_group([lost, good, bad], temperature=1.0)
    assert [sample.advantages for sample in samples] == [[0.5, 0.5], [-0.5, -0.5]]
    with pytest.raises(InputError, match="1 advantages for 2"):
        samples_of_group([good, bad], temperature=1.0, advantages=lambda rewards: rewards[:1])


def test_it_travels_as_its_published_layout() -> None:
    """Arrays by position: the first five fields, and the advantages at place 12."""
    (sample,) = samples_of_group([trajectory("r", sequence([1, 2], [0, 1]))], temperature=1.0)
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(sample))
    assert told[:5] == [[1, 2], [False, True], [0.0, -0.25], [1.0, 1.0], "math"]
    assert told[5:] == [None] * 7 + [[0.0, 0.0]]
    assert [one.name for one in msgspec.structs.fields(TrainingSample)][:5] == [
        "token_ids",
        "mask",
        "logprobs",
        "temperatures",
        "env_name",
    ]
