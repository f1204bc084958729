"""The environment `code`: its tasks and where they come from, its agent, its cheats."""

from __future__ import annotations

import asyncio
import json
import sys
import types
from collections import Counter
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.code.cheats import FAST, SLOW, cheats_for, written
from envserver_environments.code.data_sets import read_problem
from envserver_environments.code.demonstrations import fenced
from envserver_environments.code.env import Code
from envserver_environments.code.hoisting import hoisted
from envserver_environments.code.loading import HUBS, SAMPLE
from envserver_environments.code.running import SPEC
from envserver_environments.rows import Division
from support.code_house import code
from support.commands import envserver, read_jsonl
from support.extent import first_of

from envserver import (
    ConfigError,
    InputError,
    KnownResult,
    Reply,
    Result,
    Sandbox,
    Sandboxes,
    SandboxSpec,
    Task,
)
from envserver.workers.run import AttemptRun


def sample_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in SAMPLE.read_text(encoding="utf-8").splitlines()]


def test_the_sample_has_the_documented_tasks() -> None:
    rows = sample_rows()
    assert Counter(row["category"] for row in rows) == {
        "strings": 8, "lists": 8, "arithmetic": 6, "dicts": 5, "recursion": 4, "floats": 3,
        "booleans": 3, "sorting": 3,
    }  # fmt: skip
    assert sum(len(row["testcase"]) >= 10 for row in rows) >= 2
    halves = [len(row["testcase"]) for row in rows if row.get("visible") == 5]
    assert halves == [10, 10]
    text = SAMPLE.read_text(encoding="utf-8")
    for part in ("< 1e-9", "assert not", "== True", "== set()", "== (", "== {", "import "):
        assert part in text
    for row in rows:
        assert row["code"] in row["output"] and row["code"].isascii()


def test_tasks_follow_the_seed_and_half_of_their_tests_is_hidden() -> None:
    first, again, other = (list(Code(Code.Config(seed=s)).tasks("train")) for s in (1, 1, 2))
    assert first == again != other and len(first) == 40
    assert {task.id for task in first} == {row["id"] for row in sample_rows()}
    for task in first:
        seen, hidden = task.public["tests"], task.hidden["tests"]
        assert 0 <= len(hidden) - len(seen) <= 2 and not set(seen) & set(hidden)
        public = json.dumps(task.public)
        assert not any(json.dumps(test)[1:-1] in public for test in hidden)
        assert task.hidden["code"] not in task.public.values()


async def test_all_references_pass_and_agree_with_themselves(rooms: Sandboxes) -> None:
    env = code(rooms)

    async def check(task: Task) -> None:
        result = Result(output=task.hidden["output"])
        score = await env.score(task, result)
        assert (score.reward, score.metrics["fuzz_agreement"]) == (1.0, 1.0), task.id

    await asyncio.gather(*(check(task) for task in env.tasks("train")))


async def test_obvious_solutions_pass_all_tests_but_one(rooms: Sandboxes) -> None:
    obvious = {
        "initials": "def initials(n): return ''.join(w[0].upper() + '.' for w in n.split(' '))",
        "leap_years": "def leap_years(a, b): return [y for y in range(a, b + 1) if y % 4 == 0]",
    }
    env = code(rooms)
    for task in env.tasks("test"):
        program = obvious.get(task.public["entry_point"])
        if program is not None:
            score = await env.score(task, Result(output=fenced(program)))
            tests = len(task.public["tests"] + task.hidden["tests"])
            assert score.reward == 0.0
            assert score.components["fraction"] == pytest.approx(1 - 1 / tests)


def test_there_are_cheats_of_many_kinds() -> None:
    env = Code()
    tasks = list(env.tasks("test"))
    known = [[result.name for result in env.known_results(task)] for task in tasks]
    assert all(len(set(names)) == len(names) > 30 for names in known)
    assert set().union(*known) >= {*FAST, *SLOW}
    for task in tasks:
        paid = [result.name for result in env.known_results(task) if result.most > 0]
        assert paid == ["gold", "gold as an answer in full"]


async def check_all(env: Code, tasks: list[Task]) -> None:
    """Scores the known results; each reward must lie where it is said to."""
    places = asyncio.Semaphore(4)

    async def check(task: Task, known: KnownResult) -> None:
        async with places:
            reward = (await env.score(task, known.result)).reward
        assert reward is not None
        assert known.least <= reward <= known.most, (task.id, known.name, reward)

    async with asyncio.TaskGroup() as checks:
        for task in tasks:
            for known in env.known_results(task):
                checks.create_task(check(task, known))


async def test_no_cheat_is_rewarded(rooms: Sandboxes) -> None:
    env = code(rooms)
    quick = [t for t in env.tasks("test") if not set(SLOW) & set(dict(cheats_for(t)))]
    first, second = {next(cheats_for(t)): t for t in quick}.values()
    assert dict(cheats_for(first)).keys() | dict(cheats_for(second)).keys() == FAST.keys()
    await check_all(env, [first, second])


@pytest.mark.thorough
async def test_no_program_that_never_ends_is_rewarded_or_takes_the_scorer_with_it(
    rooms: Sandboxes,
) -> None:
    env = code(rooms)
    task = next(t for t in env.tasks("test") if t.public["entry_point"] == "is_balanced")

    async def check(program: str) -> None:
        text = fenced(written(program, "is_balanced"))
        assert (await env.score(task, Result(output=text))).reward == 0.0

    await asyncio.gather(*map(check, SLOW.values()))
    assert (await env.score(task, Result(output=task.hidden["output"]))).reward == 1.0


@pytest.mark.slow
async def test_no_cheat_is_rewarded_for_any_task(rooms: Sandboxes) -> None:
    env = code(rooms)
    await check_all(env, list(env.tasks("test")))


# Where rows come from.

OPC = {
    "seq_id": 1, "instruction": "Write a function that doubles a number.", "entry_point": "twice",
    "code": "def twice(x):\n    return 2 * x\n", "output": "So:\n```python\ndef twice(x):\n"
    "    return 2 * x\n```", "testcase": ["assert twice(1) == 2", "assert twice(2) == 4",
                                        "assert twice(-1) == -2"],
}  # fmt: skip
MBPP = {
    "task_id": 2, "text": "Write a function to double a number.", "test_setup_code": "",
    "code": "def helper(x):\n    return x\ndef twice(x):\n    return helper(x) * 2",
    "test_list": ["assert twice(1) == 2", "assert twice(3)==6"], "challenge_test_list": [],
}  # fmt: skip
HUMAN_EVAL = {
    "task_id": "HumanEval/0", "entry_point": "twice",
    "prompt": "from typing import List\n\n\ndef twice(xs: List[int]) -> List[int]:\n"
    '    """Doubles all.\n    >>> twice([1])\n    [2]\n    """\n',
    "canonical_solution": "    return [2 * x for x in xs]\n",
    "test": "METADATA = {}\n\n\ndef check(candidate):\n    long = [1, 2]\n"
    "    assert candidate([1]) == [2]\n    assert candidate(long) == [2, 4], 'two'\n"
    "    assert True, 'debug'\n    assert list(map(candidate, [[]])) == [[]]\n"
    "    for i in range(3):\n        assert candidate([i]) == [2 * i]\n"
    "    assert candidate([]) == []\n",
}  # fmt: skip
PLUS_TEST = (
    "import numpy as np\n\ndef is_floats(x):\n    return isinstance(x, float)\n\n"
    "def assertion(out, exp, atol):\n    assert out == exp\n\n"
)
HUMAN_EVAL_PLUS = {
    **HUMAN_EVAL,
    "test": PLUS_TEST + "def check(candidate):\n    inputs = [[[1]], [[0.1, 2]]]\n"
    "    results = [[2], [0.2, 4]]\n"
    "    for i, (inp, exp) in enumerate(zip(inputs, results)):\n"
    "        assertion(candidate(*inp), exp, 0)\n",
}
MBPP_PLUS = {
    "task_id": 2, "prompt": "Write a function to double a number.", "code": MBPP["code"],
    "test_imports": [], "test_list": MBPP["test_list"],
    "test": PLUS_TEST + "inputs = [[1], [float('inf')]]\nresults = [2, float('inf')]\n"
    "for i, (inp, exp) in enumerate(zip(inputs, results)):\n"
    "    assertion(twice(*inp), exp, 0)\n",
}  # fmt: skip
ROWS: dict[str, tuple[dict[str, Any], int]] = {
    "opc": (OPC, 3), "mbpp": (MBPP, 2), "humaneval": (HUMAN_EVAL, 3),
    "humaneval_plus": (HUMAN_EVAL_PLUS, 2), "mbpp_plus": (MBPP_PLUS, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
async def test_rows_of_each_shape_become_tasks_that_their_references_solve(
    rooms: Sandboxes, name: str, tmp_path: Path
) -> None:
    row, tests = ROWS[name]
    (tmp_path / "test.jsonl").write_text(json.dumps(row))
    env = code(rooms, data_set=name, data_path=tmp_path)
    (task,) = env.tasks("test")
    assert (task.id, task.public["entry_point"]) == (f"{name}-0", "twice")
    assert len(task.public["tests"] + task.hidden["tests"]) == tests
    assert env.tests_left_out == (2 if name == "humaneval" else 0)
    assert task.public["data_set"] in (name, name.removesuffix("_plus"))
    (message,) = env.demonstration(task) or []
    assert (await env.score(task, Result(output=message["content"]))).reward == 1.0
    assert (await env.score(task, Result(output=fenced("def twice(x): return x")))).reward == 0
    # A bare row is read by its fields; a solution may lean on what the prompt defines.
    assert read_problem(row).entry_point == "twice"


async def test_a_program_has_what_the_prompt_of_its_task_defines(rooms: Sandboxes) -> None:
    env = code(rooms)
    task = env.task_from_row(HUMAN_EVAL)
    program = "def twice(xs: List[int]) -> List[int]:\n    return [x + x for x in xs]"
    assert (await env.score(task, Result(output=fenced(program)))).reward == 1.0


BAD_ROWS: dict[str, dict[str, Any]] = {
    "no JSON object": {"rows": 1},
    "a test of a class": {"testcase": ["assert twice(1) == 2", "assert twice(Node(1)) == 2"]},
    "no assert": {"testcase": ["twice(1)", "assert twice(1) == 2"]},
    "one test": {"testcase": ["assert twice(1) == 2"]},
    "no tests": {"testcase": []},
    "tests that are not texts": {"testcase": [1, 2]},
    "no name": {"entry_point": "not a name"},
    "no instruction": {"instruction": ""},
    "a long instruction": {"instruction": "long " * 1000},
    "no reference": {"instruction": "Another one.", "code": ""},
    "a wrong reference": {"instruction": "A third one.", "code": "def twice(x): return x"},
    "a reference that hangs": {"instruction": "Loop.", "code": "while True: pass"},
    "a reference that ends it": {"instruction": "End.", "code": "import os; os._exit(0)"},
    "there before": {"instruction": "write a function that  doubles a number"},
}


async def test_rows_that_are_no_good_are_dropped_and_counted(
    rooms: Sandboxes, tmp_path: Path
) -> None:
    rows = [OPC, *({**OPC, **change} for change in BAD_ROWS.values())]
    rows[1] = ["no object"]  # type: ignore[call-overload]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    env = code(rooms, data_set="opc", data_path=tmp_path)
    (task,) = env.tasks("train")
    assert task.hidden["code"] == OPC["code"]
    assert env.dropped.total() == len(BAD_ROWS)
    assert env.dropped["the reference fails its own tests"] == 3
    assert env.dropped["no reference"] == 1
    unchecked = Code(Code.Config(data_set="opc", data_path=tmp_path, check_references=False))
    assert len(list(unchecked.tasks("train"))) == 5


def test_data_that_does_not_fit_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": 1}\n' * 3)
    settings = {"data_set": "opc", "data_path": tmp_path / "rows.jsonl"}
    with pytest.raises(ConfigError, match="no usable row"):
        next(Code(Code.Config(check_references=False, **settings)).tasks("train"))
    with pytest.raises(ConfigError, match="sandbox"):
        next(Code(Code.Config(**settings)).tasks("train"))
    with pytest.raises(InputError, match="no data set"):
        Code().task_from_row({"question": 1})
    with pytest.raises(InputError, match="set-up"):
        Code().task_from_row({**MBPP, "test_setup_code": "root = Node(1)"})
    assert Code().task_from_row({**MBPP, "test_setup_code": "import math"})


def test_one_file_is_divided_into_splits_that_never_meet(tmp_path: Path) -> None:
    rows = [{**OPC, "instruction": f"Write double number {n}."} for n in range(100)]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    ids = {}
    for split in ("train", "validation", "test"):
        for seed in (0, 1):
            config = Code.Config(data_set="opc", data_path=path, seed=seed, check_references=False)
            ids[split, seed] = {task.id for task in Code(config).tasks(split)}
    assert [len(ids[split, 0]) for split in ("train", "validation", "test")] == [85, 10, 5]
    assert all(ids[split, 0] == ids[split, 1] for split, _ in ids)
    assert len(set.union(*ids.values())) == 100
    assert [len(Division().numbers(8189, s)) for s in ("train", "validation", "test")] == [
        6962, 818, 409,
    ]  # fmt: skip


@pytest.mark.parametrize("name", HUBS)
async def test_the_hub_is_asked_for_the_right_data(
    rooms: Sandboxes, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(path: str, config: str | None, *, split: str, streaming: bool) -> Any:
        asked.append((path, config, split))
        return [{**ROWS[name][0], "n": n} for n in range(20)]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    env = code(rooms, data_set=name)
    (task,) = env.tasks("test")
    assert (await env.score(task, Result(output=fenced(task.hidden["code"])))).reward == 1.0
    assert (
        asked
        == {
            "opc": [("OpenCoder-LLM/opc-sft-stage2", "educational_instruct", "train")],
            "mbpp": [("google-research-datasets/mbpp", "full", "test")],
            "mbpp_plus": [("evalplus/mbppplus", None, "test")],
            "humaneval": [("openai/openai_humaneval", None, "test")],
            "humaneval_plus": [("evalplus/humanevalplus", None, "test")],
        }[name]
    )


# The agent.


class ScriptedRun:
    """A `run` whose model says what it is told to, with a real sandbox."""

    def __init__(
        self, env: Code, messages: list[dict[str, Any]], finish_reason: str = "stop"
    ) -> None:
        self._env = env
        self.left = list(messages)
        self.finish_reason = finish_reason
        self.max_turns = 50
        self.sent: list[dict[str, Any]] = []
        self.tools: list[dict[str, Any]] | None = None
        self.calls = 0
        self.metrics: dict[str, float] = {}

    loop = AttemptRun.loop

    async def chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> Reply:
        self.calls += 1
        self.sent = list(messages)
        self.tools = tools
        message = self.left.pop(0)
        return Reply(message["content"], message.get("tool_calls", []), self.finish_reason, message)

    def open_sandbox(self, spec: SandboxSpec | None = None) -> AbstractAsyncContextManager[Sandbox]:
        return self._env.sandboxes.open(spec or SPEC)

    def log_metric(self, name: str, value: float) -> None:
        self.metrics[name] = value


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    calls = [{"id": f"call_{name}", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


async def played(
    rooms: Sandboxes, messages: list[dict[str, Any]], finish_reason: str = "stop", **settings: Any
) -> tuple[ScriptedRun, Any]:
    """Returns the run and the output of an agent that doubles numbers."""
    env = code(rooms, **{"mode": "tools", **settings})
    run = ScriptedRun(env, messages, finish_reason)
    task = env.task_from_row(OPC)
    output = await env.rollout(task.without_hidden(), run)  # type: ignore[arg-type]
    return run, output


WRONG, RIGHT = "def twice(x):\n    return x * x", "def twice(x):\n    return x + x"


async def test_tools_run_visible_tests_and_programs_and_end_by_submit(rooms: Sandboxes) -> None:
    script = [
        call("run_tests", code=WRONG),
        call("run_tests", code="def twice(x): return {}[x]"),
        call("run_tests", code=RIGHT),
        call("python", code="print(6 * 7)"),
        call("python", code="import os; print(os.listdir('/work')); 1 / 0"),
        call("submit", code=RIGHT),
        call("submit", code=WRONG),
    ]
    run, output = await played(rooms, script)
    assert output == {"code": RIGHT, "text": ""} and run.calls == 6
    assert [t["function"]["name"] for t in run.tools or []] == ["run_tests", "python", "submit"]
    results = [m["content"] for m in run.sent if m["role"] == "tool"]
    assert results[0].startswith("0 of 1") and "it gave 1" in results[0]
    assert "KeyError: 1 (line 1)" in results[1]
    assert results[2] == "1 of 1 visible tests passed.\nassert twice(1) == 2\n  passed"
    assert results[3] == "[exit status 0]\n42\n"
    assert "ZeroDivisionError" in results[4] and results[4].startswith("[exit status 1]")
    assert "assert twice(2) == 4" not in json.dumps(run.sent)


async def test_a_text_with_a_block_ends_the_rollout_and_one_without_is_reminded(
    rooms: Sandboxes,
) -> None:
    script = [said("Let me think."), said(f"Here:\n{fenced(RIGHT)}"), said("never asked")]
    run, output = await played(rooms, script)
    assert output["code"] is None and RIGHT in output["text"] and run.calls == 2
    assert "submit" in run.sent[-1]["content"] and run.sent[-1]["role"] == "user"


@pytest.mark.parametrize(
    ("script", "calls"),
    [
        ([call("python", code="print(1)")] * 12, 10),
        ([call("shell", code="ls")] * 12, 10),
        ([call("submit", program=RIGHT)] * 12, 10),
        ([call("submit", code="x" * 60_000)] * 12, 10),
    ],
)
async def test_turns_and_errors_are_bounded(
    rooms: Sandboxes, script: list[dict[str, Any]], calls: int
) -> None:
    run, output = await played(rooms, script)
    assert output["code"] is None and run.calls == calls


async def test_a_cut_off_answer_is_not_acted_on(rooms: Sandboxes) -> None:
    _, output = await played(rooms, [call("submit", code=RIGHT)], finish_reason="length")
    assert output["code"] is None


@pytest.mark.thorough
async def test_endless_programs_end_and_say_so(rooms: Sandboxes) -> None:
    script = [call("python", code="while True: pass"), call("run_tests", code="while True: pass")]
    run, _ = await played(rooms, [*script, call("submit", code=RIGHT)])
    results = [m["content"] for m in run.sent if m["role"] == "tool"]
    assert "CPU time" in results[0] or "too long" in results[0]  # on a busy machine
    assert "too long" in results[1]


@pytest.mark.parametrize(("shown", "count"), [(0, 0), ("1", 1), ("all", 1)])
async def test_prompts_show_as_many_visible_tests_as_asked(
    rooms: Sandboxes, shown: object, count: int
) -> None:
    run, output = await played(rooms, [said("no")], mode="single", show_tests=shown)
    prompt = run.sent[-1]["content"]
    assert output == {"code": None, "text": "no"} and run.tools is None
    assert prompt.count("assert ") == count and "must be named `twice`" in prompt


@pytest.mark.parametrize("mode", ["single", "tools"])
async def test_demonstrations_solve_their_tasks_and_no_request_holds_what_is_hidden(
    rooms: Sandboxes, mode: str
) -> None:
    env = code(rooms, mode=mode, show_tests="all")
    for task in list(env.tasks("train"))[:12]:
        run = ScriptedRun(env, env.demonstration(task) or [])
        output = await env.rollout(task.without_hidden(), run)  # type: ignore[arg-type]
        assert (await env.score(task, Result(output=output))).reward == 1.0, task.id
        assert not run.left and run.metrics.get("tool_errors", 0) == 0
        asked = json.dumps([m for m in run.sent if m["role"] != "assistant"])
        for test in task.hidden["tests"]:
            assert json.dumps(test)[1:-1] not in asked
            for part in hoisted(test, task.public["entry_point"]).calls:
                assert json.dumps(part)[1:-1] not in asked or part in str(task.public)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", first_of("tools", "single"))
def test_the_command_makes_groups_with_the_simulated_engine(mode: str, tmp_path: Path) -> None:
    ran = envserver(
        "process", "--env", "code", "--model", "sim", "--sim.latency_seconds", 0,
        "--sim.solve_probability", 0.5, "--env.total_steps", 4, "--env.group_size", 4,
        "--env.mode", mode, "--env.data_path_to_save_groups", "out.jsonl", folder=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    groups = read_jsonl(tmp_path / "out.jsonl")
    assert len(groups) == 4
    scores = [score for group in groups for score in group["scores"]]
    assert set(scores) == {0.0, 1.0}
    hidden = {t.id: t.hidden["tests"] for t in Code().tasks("train")}
    for group in groups:
        asked = json.dumps(
            [m for row in group["messages"] for m in row if m["role"] != "assistant"]
        )
        for test in hidden[group["envserver"]["task_id"]]:
            assert json.dumps(test)[1:-1] not in asked
