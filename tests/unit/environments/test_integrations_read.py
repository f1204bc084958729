"""What the integrations of other frameworks read without these: answers of games, pictures of
terminals, which generation of verifiers a package needs. The games themselves are played in
tests/peers/test_games_peer.py."""

from pathlib import Path

import pytest
from envserver_integrations.answers import Answer, action_of
from envserver_integrations.gymnasium import INTEGRATION
from envserver_integrations.gymnasium.env import BadAction, action, plain
from envserver_integrations.verifiers.backends import CLASSIC, V1, backend_of, is_classic
from support.env_packages import wheel

THOUGHT = (
    "<think>[left] or [right]?</think>\nI take the [left] door.\nNo: [right] <answer> up </answer>"
)


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ("brackets", "[right]"),
        ("last_line", "No: [right] <answer> up </answer>"),
        ("tag", "up"),
        ("whole", "I take the [left] door.\nNo: [right] <answer> up </answer>"),
    ],
)
def test_the_action_is_read_from_what_follows_the_thoughts(answer: Answer, action: str) -> None:
    assert action_of(THOUGHT, answer) == action
    if answer in ("brackets", "tag"):
        assert action_of("I do not know.", answer) == ""


def test_colours_of_a_terminal_become_tags() -> None:
    assert plain("\x1b[41mS\x1b[0mF\n\x1b[34;1mR\x1b[0m| \n") == (
        "<on-red>S</on-red>F\n<blue>R</blue>| "
    )


@pytest.mark.parametrize("said", ["[" * 100_000, "9" * 5000, "left"])
def test_an_answer_that_is_not_json_is_no_action(said: str) -> None:
    with pytest.raises(BadAction, match="not an action in JSON"):
        action(object(), said, ())


def test_a_module_beside_the_user_is_named_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert INTEGRATION.absolute("my_world:My-v0") == "my_world:My-v0"
    Path("my_world.py").touch()
    assert INTEGRATION.absolute("my_world:My-v0") == f"{tmp_path}/my_world.py:My-v0"
    assert INTEGRATION.absolute("FrozenLake-v1") == "FrozenLake-v1"


CODE = {"classic": "def load_environment(n=1):\n    return n\n", "v1": "__all__ = ['Sums']\n"}


@pytest.mark.parametrize(("generation", "expected"), [("classic", CLASSIC), ("v1", V1)])
def test_a_folder_or_a_wheel_says_it(tmp_path: Path, generation: str, expected: object) -> None:
    folder = tmp_path / "project"
    (folder / "build").mkdir(parents=True)
    (folder / "sums.py").write_text(CODE[generation])
    (folder / "build" / "old.py").write_text(CODE["classic"])  # what was built before says nothing
    assert backend_of("sums", [str(folder)]) is expected
    built = wheel(tmp_path, "sums", {"sums.py": CODE[generation]})
    assert backend_of("sums", [str(built)]) is expected


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        ([], V1),
        (["gsm8k", "verifiers<0.4"], CLASSIC),
        (["gsm8k", "verifiers>=0.4"], V1),
        (["gsm8k"], V1),
        (["git+https://example.com/sums.git", "verifiers==0.3.1"], CLASSIC),
    ],
)
def test_a_requirement_decides(packages: list[str], expected: object) -> None:
    assert backend_of("sums", packages) is expected


def test_the_version_that_is_installed_says_which_class_plays() -> None:
    assert [is_classic(one) for one in ("0.1.9", "0.3.1")] == [True, True]
    assert [is_classic(one) for one in ("0.4.0", "1.0.0")] == [False, False]
