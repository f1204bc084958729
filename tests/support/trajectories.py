"""Finished rollouts of all shapes, for what maps them: a hypothesis strategy."""

from envserver_records.records import Score, Sequence, Trajectory
from hypothesis import strategies as st

from .records import sequence as sequence
from .records import trajectory as trajectory


@st.composite
def sequences(draw: st.DrawFn, *, trained: bool = False) -> Sequence:
    """One row; `trained`: with at least one sampled token."""
    mask = draw(st.lists(st.integers(0, 1), min_size=1, max_size=12))
    if trained:
        mask[draw(st.integers(0, len(mask) - 1))] = 1
    tokens = draw(st.lists(st.integers(0, 99), min_size=len(mask), max_size=len(mask)))
    return sequence(tokens, mask, draw(st.integers(0, 5)))


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """A rollout with a reward, one trained row at least, and any others."""
    rows = draw(st.lists(sequences(), max_size=2))
    rows.insert(draw(st.integers(0, len(rows))), draw(sequences(trained=True)))
    return trajectory(
        f"rollout-{draw(st.integers(0, 10**6))}",
        *rows,
        score=Score(reward=draw(st.floats(0, 1, width=32))),
        truncated=draw(st.booleans()),
    )
