"""Games of the real TextArena and worlds of the real Gymnasium, each in their own interpreter."""

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.backends import install
from support.cases import cases_of
from support.commands import envserver, read_jsonl, rollouts_of

from envserver import ConfigError

CASES = cases_of(__file__)

Json = dict[str, Any]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder; what is installed lies in it."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def played(
    python: Path, reference: str, settings: Mapping[str, Any], folder: Path, groups: int = 2
) -> list[Json]:
    """Groups of two rollouts, in which the simulated engine says what `moves` has."""
    install(python, "games", reference)
    made = process(reference, settings, folder, groups)
    assert made.returncode == 0, made.stderr
    return sorted(
        read_jsonl(folder / "out.jsonl"), key=lambda one: str(one["envserver"]["task_id"])
    )


def process(
    reference: str, settings: Mapping[str, Any], folder: Path, groups: int
) -> subprocess.CompletedProcess[str]:
    words = [word for name, value in settings.items() for word in (f"--env.{name}", _word(value))]
    return envserver(
        *("process", "--env", reference, "--model", "sim", "--sim.solve_probability", 1),
        *("--env.group_size", 2, "--limit", groups, "--out", "out.jsonl", "--overwrite", *words),
        folder=folder,
    )


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def conversations(group: Json, agent: str) -> list[list[Json]]:
    """What an agent was told and said, in each of its training rows."""
    agents = [
        (row, name)
        for one in group["envserver"]["rollouts"]
        for row, name in zip(one["rows"], one["agents"], strict=True)
    ]
    return [group["messages"][row] for row, name in agents if name == agent]


def test_two_players_get_own_rewards_and_see_own_cards(games_python: Path, place: Path) -> None:
    moves = {"player0": ["[check]"], "player1": ["[check]"]}
    groups = played(games_python, "textarena:KuhnPoker-v0", {"moves": moves}, place)
    for one in rollouts_of(groups):
        assert sorted(one["rewards"].values()) == [-1.0, 1.0]  # three rounds have a winner
        assert one["metrics"]["moves"] == 6
    for group in groups:
        assert len({json.dumps(one["rewards"]) for one in group["envserver"]["rollouts"]}) == 1
        dealt = {}
        for agent in moves:
            first, second = conversations(group, agent)  # one row in each rollout
            assert first == second
            assert f"You are Player {agent[-1]}" in first[0]["content"]
            (dealt[agent],) = set(re.findall(r"Your card is: '(\w)'", first[0]["content"]))
        assert dealt["player0"] != dealt["player1"]


def test_a_game_of_one_player_is_one_conversation(games_python: Path, place: Path) -> None:
    settings = {"options": {"min_number": 1, "max_number": 5, "max_turns": 9}}
    settings |= {"moves": {"player0": [f"[{number}]" for number in range(1, 6)]}}
    groups = played(games_python, "textarena:GuessTheNumber-v0", settings, place, groups=4)
    assert {one["reward"] for one in rollouts_of(groups)} == {1.0}
    for group in groups:
        assert len(group["tokens"]) == 2  # a row for each rollout
        guesses = {one["metrics"]["moves"] for one in group["envserver"]["rollouts"]}
        assert len(guesses) == 1  # the seed is the task's
    assert len({one["metrics"]["moves"] for one in rollouts_of(groups)}) > 1


@pytest.mark.slow
def test_a_word_game_needs_its_words_and_fetches_none(games_python: Path, place: Path) -> None:
    install(games_python, "games", "textarena:Wordle-v0")
    refused = process("textarena:Wordle-v0", {}, place, 1)
    assert refused.returncode == 2
    assert "python -m nltk.downloader averaged_perceptron_tagger_eng words" in refused.stderr
    words = ["apple", "bread", "chair", "table", "water"]
    corpus = place / "nltk" / "corpora" / "words"
    corpus.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (corpus / name).write_text("\n".join(words) + "\n")
    (corpus / "README").write_text("Five words.")
    tagger = "averaged_perceptron_tagger_eng"
    (place / "nltk" / "taggers" / tagger).mkdir(parents=True)
    parts = {"weights": {}, "tagdict": dict.fromkeys(words, "NN"), "classes": ["NN"]}
    for part, content in parts.items():
        path = place / "nltk" / "taggers" / tagger / f"{tagger}.{part}.json"
        path.write_text(json.dumps(content))
    guesses = {"player0": [f"My guess is [{word}]." for word in words]}
    for one in rollouts_of(played(games_python, "textarena:Wordle-v0", {"moves": guesses}, place)):
        assert one["reward"] == 1.0 and one["metrics"]["moves"] <= len(words)
    with pytest.raises(ConfigError, match=r"Did you mean .*Wordle-v0"):
        install(games_python, "games", "textarena:Wordl-v0")


def test_a_world_of_gymnasium_rewards_each_step(games_python: Path, place: Path) -> None:
    way = ["[down]", "[down]", "[right]", "[down]", "[right]", "[right]"]
    settings = {"options": {"is_slippery": False}, "moves": way}
    (group,) = played(games_python, "gymnasium:FrozenLake-v1", settings, place, groups=1)
    for one in rollouts_of([group]):
        assert one["reward"] == 1.0 and one["turns"] == 6
        assert [turn["value"] for turn in one["turn_rewards"]] == [0, 0, 0, 0, 0, 1]
    told = group["messages"][0]
    assert "<on-red>S</on-red>FFF" in told[1]["content"]
    assert "F<on-red>H</on-red>FH" not in told[-2]["content"]

    settings = {"moves": ["[north]", "I fly away."], "returns": [-10, 10], "invalid_reward": -3}
    settings |= {"max_turns": 4, "discount": 0.5}
    (group,) = played(games_python, "gymnasium:Taxi-v4", settings, place, groups=1)
    for one in rollouts_of([group]):
        values = [turn["value"] * 20 for turn in one["turn_rewards"]]
        assert values == pytest.approx([-1, -1.5, -0.25, -0.375])
        assert one["reward"] == pytest.approx((10 + sum(values)) / 20)
        assert one["agent_metrics"]["return"] == -8


def test_a_text_world_of_the_users_own_file(games_python: Path, place: Path) -> None:
    (place / "echo_world.py").write_text(CASES["world"])
    settings = {"moves": ["left"], "prompt": "{observation}!"}
    groups = played(games_python, f"gymnasium:{place}/echo_world.py:Echo-v0", settings, place, 3)
    # The same file, named as Gymnasium names a module.
    assert process("gymnasium:echo_world:Echo-v0", settings, place, 3).returncode == 0
    assert [one["scores"] for one in read_jsonl(place / "out.jsonl")]
    for group in groups:
        for one in group["envserver"]["rollouts"]:
            shown = [m["content"] for m in group["messages"][one["rows"][0]] if m["role"] == "user"]
            assert shown[0].endswith("!") and len(shown) == 3
            assert one["reward"] == pytest.approx(sum("left" in text for text in shown) / 3)
