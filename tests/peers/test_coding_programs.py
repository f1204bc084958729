"""Claude Code, Codex and OpenCode with their default settings, against the proxy and the simulated
engine: exact tokens, one row for the conversation, and an end at a limit."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.coding_programs import PACKAGES, WRITES, play, program
from support.sdk_house import SdkHouse, Seat, sim_house
from support.sim import said

from envserver.tokens import build

pytestmark = pytest.mark.peer
WRITING = 5
SIDE_CALLS = {"claude": 1, "codex": 0, "opencode": 1}
"""Titles that each asks for."""


@pytest.fixture(scope="module")
def house() -> Iterator[SdkHouse]:
    with sim_house() as house:
        yield house


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    # Codex warns in /tmp.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as path:
        yield Path(path) / "rollout"


def opening(seat: Seat) -> list[int]:
    """Returns the prompt of the first call of the conversation."""
    ids: list[int] = next(call for call in seat.calls if call.trained).prompt_ids.tolist()
    return ids


@pytest.mark.parametrize("name", PACKAGES)
def test_a_program_writes_a_file_in_one_row(house: SdkHouse, name: str, folder: Path) -> None:
    program(name)
    openings = []
    for _ in range(2 if name == "claude" else 1):
        turns = [*[said("Writing.", WRITES[name])] * WRITING, said("It is done.")]
        with house.seat(*turns, max_tokens=4000, seconds=600) as seat:
            ran = play(name, seat, folder)
            assert "It is done." in ran.stdout, ran
            assert (folder / "work/done.txt").read_text() == "hello\n" * WRITING
            side = [call for call in seat.calls if call.agent == "side"]
            main = [call for call in seat.calls if call.agent is None]
            assert (len(side), len(main)) == (SIDE_CALLS[name], WRITING + 1)
            assert not any(call.trained for call in side)
            assert all(call.exact and call.trained and not call.flags for call in main)
            (row,) = build(main)
            assert int(row.mask.sum()) == sum(len(call.completion_ids) for call in main)
            assert all(one.status == 200 for one in seat.exchanges), [
                (one.path, one.status, one.content) for one in seat.exchanges
            ]
            openings.append(opening(seat))
    assert openings[0] == openings[-1]  # rollouts of a group have the same prompt


@pytest.mark.parametrize("name", PACKAGES)
def test_a_limit_ends_a_program_at_its_first_refusal(
    house: SdkHouse, name: str, folder: Path
) -> None:
    program(name)
    with house.seat(*[said("Writing.", WRITES[name])] * 4, max_turns=2, seconds=600) as seat:
        ran = play(name, seat, folder)
        assert "All 2 turns of this rollout are used up." in ran.stdout + ran.stderr
        statuses = [one.status for one in seat.exchanges if "/v1/" in one.path]
        assert statuses.count(400) == 1 and statuses[-1] == 400
        assert len([call for call in seat.calls if call.trained]) == 2
        assert seat.attempt.limit == "turns"
