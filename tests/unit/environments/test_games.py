"""kuhn, twenty_questions, proposer_solver: known results, and the right behaviour is paid."""

import itertools
import json
import math
from pathlib import Path

import pytest
from envserver_environments.kuhn.env import Kuhn
from envserver_environments.kuhn.game import (
    SPOTS,
    VALUE,
    equilibrium,
    exploitability,
    outputs_in,
    strategy_of,
    value,
)
from envserver_environments.proposer_solver.env import result_of
from envserver_environments.twenty_questions.env import Game, TwentyQuestions, read_things
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import envserver
from support.extent import examples

COIN = dict.fromkeys(SPOTS, 0.5)


def test_kuhns_known_values() -> None:
    for a in (0.0, 0.1, 0.2, 1 / 3):
        play = equilibrium(a)
        assert value(play, play) == pytest.approx(VALUE)
        assert exploitability(play) == pytest.approx(0.0, abs=1e-12)
    assert value(COIN, COIN) == pytest.approx(1 / 8)
    assert exploitability(COIN) == pytest.approx(11 / 24)
    # Nobody can do better against equilibrium, and folding everything is punished at once.
    assert value(COIN, equilibrium()) < VALUE < value(equilibrium(), COIN)
    assert exploitability(dict.fromkeys(SPOTS, 0.0)) > 0.9


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.floats(0, 1), min_size=len(SPOTS), max_size=len(SPOTS)))
def test_only_equilibria_cannot_be_exploited(bets: list[float]) -> None:
    strategy = dict(zip(SPOTS, bets, strict=True))
    found = exploitability(strategy)
    assert -1e-12 <= found <= 2
    assert value(strategy, equilibrium()) <= VALUE + 1e-12
    if max(abs(strategy["K", "b"] - 1), strategy["J", "b"]) > 0.1:  # dominated play
        assert found > 1e-3


@pytest.mark.thorough
def test_games_of_kuhn_are_played_on_the_server(tmp_path: Path) -> None:
    """Each agent has its rewards, no public part names a card, and the measure reads the file."""
    for task in itertools.islice(Kuhn().tasks("train"), 12):
        assert not set(json.dumps(task.public)) & set("JQK")
    out = tmp_path / "kuhn.jsonl"
    ran = envserver(
        *("process", "--env", "kuhn", "--model", "sim"),
        *("--env.total_steps", 60, "--env.group_size", 2, "--sim.solve_probability", 1),
        *("--env.data_path_to_save_groups", out),
        folder=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
    outputs = list(outputs_in(out))
    assert len(outputs) == 120 and not any(output["forfeited"] for output in outputs)
    for output in outputs:
        for (card, *_), (other, *_) in itertools.pairwise(output["moves"]):
            assert card != other
    assert 0.3 < exploitability(strategy_of(outputs)) < 0.65  # coin tossers: 0.458


def test_twenty_questions_pays_what_a_question_finds_out() -> None:
    known = read_things(None)
    assert len(set(known.values())) == len(known) == 42
    env = TwentyQuestions()
    for task in env.tasks("test"):
        assert task.public["things"] == sorted(known)
        game = Game(task, known)
        answer, first = game.ask("alive")
        assert game.ask("alive") == (answer, 0.0)  # asking again is paid nothing
        total = first + sum(game.ask(word)[1] for word in task.public["words"])
        assert total == pytest.approx(0.5) and game.left == [task.hidden["thing"]]
        alive = sum(("alive" in words) == (answer == "yes") for words in known.values())
        assert first == pytest.approx(0.5 * math.log2(42 / alive) / math.log2(42))


@pytest.mark.parametrize(
    "problem", ["17 ** 4", "17 + 4)", "17 / 4", "17 + 5", "solve 17*4", "", "17 4", "١٧ + 4"]
)
def test_only_arithmetic_with_its_numbers_is_a_problem(problem: str) -> None:
    public = {"use": [17, 4], "max_characters": 24}
    assert result_of("(17 + 4) * 3", public) == 63
    assert result_of(problem, public) is None
