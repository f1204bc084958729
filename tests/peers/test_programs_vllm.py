"""Coding programs and environments of verifiers on a real vLLM: each conversation is one row of the
tokens that the engine sampled, and the engine gives them the same logprobs again.

The random model calls tools because a relay between our proxy and the engine says what it is to
say; neither program nor proxy knows, and its logprobs stay its own. `make agents` and `make
verifiers-peer` install what plays.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import envserver, read_jsonl
from support.relay import Echo, Held, Relay, begins_a_row, relay, sampled, trained
from support.verifiers_peer import install
from support.vllm_server import CONTEXT, VllmServer

from envserver.harnesses.installing import version_in

pytestmark = pytest.mark.vllm

AGENTS = Path(__file__).parents[2] / ".agents"
WORDS = "~~~ ~~~~"
"""Of the model's own choice, see support/forced_text.py."""
_SHORT = 500
"""Tokens of prompts that no program sends."""
START_OF_TURN = 1
"""Id of <|im_start|> in the tiny model's tokenizer."""
WORST = 1e-4
"""Nats, as `verify` takes it; beyond some hundred tokens vLLM adds up in different orders."""


def calls(name: str, **arguments: str) -> str:
    """Returns some words and a call of a tool."""
    function = json.dumps({"name": name, "arguments": arguments})
    return f"{WORDS}\n<tool_call>{function}</tool_call>"


ECHO = "echo ~~~~"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
BASH = calls("bash", command=ECHO)
PROGRAMS = {"mini-swe-agent": [BASH, BASH, calls("bash", command=SUBMIT)]}
PROGRAMS |= {"claude-code": [*[calls("Bash", command=ECHO, description=WORDS)] * 2, WORDS]}
PROGRAMS |= {"codex": [*[calls("exec_command", cmd=ECHO)] * 2, WORDS]}
PROGRAMS |= {"opencode": [*[calls("bash", command=ECHO, description=WORDS)] * 2, WORDS]}
"""What the model says to each, turn by turn."""


def saying(texts: list[str]) -> Held:
    """Has the model say at each turn its text: the next after the turns that its prompt has."""

    def hold(asked: dict[str, Any]) -> None:
        if "messages" in asked:
            turn = sum(one["role"] == "assistant" for one in asked["messages"])
        else:
            turn = earlier_turns(asked.get("token_ids") or asked["prompt"])
        if "sampling_params" in asked:
            asked["sampling_params"]["extra_args"] = {"said": texts[turn]}
        else:
            asked["vllm_xargs"] = {"said": texts[turn]}

    return hold


def in_order(texts: list[str]) -> Held:
    """Has the model say each text once; what asks it for a word finds out what the engine can."""
    left = iter(texts)

    def hold(asked: dict[str, Any]) -> None:
        prompt = asked.get("token_ids") or asked.get("prompt") or ()
        said = {"said": next(left) if len(prompt) > _SHORT else WORDS}
        if "sampling_params" in asked:
            asked["sampling_params"]["extra_args"] = said
        else:
            asked["vllm_xargs"] = said

    return hold


def earlier_turns(ids: list[int]) -> int:
    """Counts how often the header with which a prompt ends stands before it."""
    starts = [at for at, token in enumerate(ids) if token == START_OF_TURN]
    header = ids[starts[-1] :]
    return sum(ids[at : at + len(header)] == header for at in starts[:-1])


def played(
    engine: VllmServer, folder: Path, held: Held, rollouts: int, *words: object
) -> tuple[list[dict[str, Any]], Relay]:
    """Returns the groups that `process` makes before the engine, and what the engine said."""
    with relay(engine.root_url, hold=held) as (url, echoes):
        ran = envserver(
            "process", "--openai.base_url", url, "--openai.model_name", engine.model,
            "--sampling.max_tokens", 200, "--env.group_size", rollouts, "--env.total_steps", 1,
            "--env.ensure_scores_are_not_same", "false", "--env.max_token_length", CONTEXT,
            "--workers.processes", 1, "--rollouts.max_attempts", 1,
            "--out", "out.jsonl", *words, folder=folder,
        )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return list(read_jsonl(folder / "out.jsonl")), echoes


def assert_exact(
    engine: VllmServer, folder: Path, groups: list[dict[str, Any]], echoes: list[Echo]
) -> str:
    """Checks every row against what the engine said, and against what it says when asked again.

    Returns what was measured.
    """
    assert trained(groups) == sampled(echoes)
    rows = [tokens for group in groups for tokens in group["tokens"]]
    # Each prompt is the row that it became, up to there.
    assert all(begins_a_row(echo, groups) for echo in echoes)
    ran = envserver(
        "verify", "out.jsonl", "--openai.base_url", engine.base_url,
        "--openai.model_name", engine.model, "--tolerance", WORST, "--json",
        folder=folder,
    )  # fmt: skip
    report = json.loads(ran.stdout)
    assert (ran.returncode, report["findings"]) == (0, []), ran.stdout + ran.stderr
    told = report["compared"]
    assert (told["rows"], told["tokens"]) == (len(rows), trained(groups).total())
    return (
        f"{told['rows']} rows of {max(map(len, rows)):,} tokens, {told['tokens']} sampled: "
        f"{told['tokens_exactly_equal']} logprobs equal, worst {told['largest_difference']:.2g}"
    )


def ends(groups: list[dict[str, Any]]) -> list[tuple[int, int, str | None]]:
    """Returns the rows, turns and limit of each rollout."""
    rollouts = [one for group in groups for one in group["envserver"]["rollouts"]]
    return [(len(one["rows"]), one["turns"], one["limit"]) for one in rollouts]


def program(name: str) -> tuple[object, ...]:
    """Returns the words with which a program plays; skips the test without it."""
    if not version_in(AGENTS / name):
        pytest.skip(f"{name} is missing: make agents")
    return ("--env", "math", "--agent", name, "--agent.folder", AGENTS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_plays_in_one_exact_row(
    vllm_server: VllmServer, tmp_path: Path, name: str, tell: Callable[[str], None]
) -> None:
    rollouts = 2 if name == "mini-swe-agent" else 1  # the others cost more
    groups, echoes = played(vllm_server, tmp_path, saying(PROGRAMS[name]), rollouts, *program(name))
    assert ends(groups) == [(1, len(PROGRAMS[name]), None)] * rollouts
    tell(f"{name}: {assert_exact(vllm_server, tmp_path, groups, echoes)}")


COUNT = "seq 1000 1700"
SUMMARY = f"Summary: {WORDS} {WORDS}"
CLAUDE, OPENCODE = (calls(name, command=COUNT, description=WORDS) for name in ("Bash", "bash"))
CODEX = calls("exec_command", cmd=COUNT)
COMPACTED: dict[str, tuple[list[str], list[int | None], bool]] = {
    # Its summary is a branch of what it sums up, and trained.
    "claude-code": (
        [*[CLAUDE] * 5, SUMMARY, CLAUDE, SUMMARY, WORDS],
        [None, None, 1, 2, 3],
        True,
    ),
    "codex": ([CODEX, CODEX, SUMMARY, CODEX, WORDS], [None, 0], False),
    "opencode": (
        [OPENCODE, OPENCODE, SUMMARY, OPENCODE, WORDS, SUMMARY, WORDS],
        [None, 0, 1],
        False,
    ),
}
"""What the model says, the row that each row follows, and whether summaries are trained."""


@pytest.mark.parametrize("name", COMPACTED)
def test_a_program_that_fills_its_context_goes_on_from_a_summary(
    vllm_server: VllmServer, tmp_path: Path, name: str, tell: Callable[[str], None]
) -> None:
    texts, follows, trains_summaries = COMPACTED[name]
    small = ("--env.max_token_length", 16_000, "--env.max_turns", 30)
    groups, echoes = played(vllm_server, tmp_path, in_order(texts), 1, *program(name), *small)
    (rollout,) = groups[0]["envserver"]["rollouts"]
    assert (rollout["follows"], rollout["limit"]) == (follows, None)
    assert max(map(len, groups[0]["tokens"])) <= 16_000
    said = [
        echo
        for echo, text in zip(echoes, texts, strict=True)
        if trains_summaries or text != SUMMARY
    ]
    tell(f"{name}: {assert_exact(vllm_server, tmp_path, groups, said)}")


@pytest.fixture(scope="module")
def home(
    verifiers_classic_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """The environments of verifiers are installed."""
    folder = tmp_path_factory.mktemp("home")
    install(verifiers_classic_python, "classic", list(VERIFIERS), folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_DATA_HOME", str(folder))
        yield


VERIFIERS = {"classic_guess": [WORDS] * 3, "classic_shop": [calls("price", item="pear"), "10"]}


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("name", VERIFIERS)
def test_an_environment_of_verifiers_is_one_exact_row(
    vllm_server: VllmServer, tmp_path: Path, name: str, tell: Callable[[str], None]
) -> None:
    texts = VERIFIERS[name]
    groups, echoes = played(vllm_server, tmp_path, saying(texts), 2, "--env", f"verifiers:{name}")
    assert ends(groups) == [(1, len(texts), None)] * 2
    tell(f"verifiers, {name}: {assert_exact(vllm_server, tmp_path, groups, echoes)}")
