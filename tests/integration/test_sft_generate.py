"""`envserver sft router|math|code generate`: a teacher over HTTP writes what becomes rows."""

import contextlib
import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import check_plans
from support.commands import lines_of, read_jsonl, running, typed
from support.engine_stand_in import FakeVllm, in_thread

# `kinds_of(10_000)` is what it does with 10,000 queries, of which 8,189 get a usable row. What it
# answers depends on the query and on how often it was corrected, on nothing else.

Json = dict[str, Any]

USELESS = {"broken": 500, "cyclic": 300, "wrong tool": 300, "unknown step": 200, "same": 112}
"""Queries of 10,000 whose plans are of no use, but for one of those that get the same plan."""
REPEATED = 400
"""Lines of 10,000 that are a query of another line, in other letters."""
_CORRECTED = ("good", "good", "good", "good", "broken first", "cyclic first", "broken twice")
_QUERY = re.compile(r"query (\d+)", re.IGNORECASE)


def kinds_of(lines: int) -> list[str]:
    """Returns what happens to each query of a file of `lines` lines, without the repeated ones."""
    kinds = [kind for kind, count in USELESS.items() for _ in range(count * lines // 10_000)]
    wanted = lines - REPEATED * lines // 10_000
    kinds += [_CORRECTED[n % len(_CORRECTED)] for n in range(wanted - len(kinds))]
    random.Random(26).shuffle(kinds)
    return kinds


def query_lines(kinds: list[str], lines: int) -> list[str]:
    """Returns the lines of a file of queries."""
    texts = [f"What does query {number} ask?" for number in range(len(kinds))]
    texts += [f"  {texts[7 * n].upper()} " for n in range(lines - len(texts))]
    return [json.dumps({"query": text}) for text in texts]


def plan(number: int, *, is_graph: bool) -> Json:
    """Returns a valid plan for a query."""
    agents = [("math",), ("search", "math"), ("search", "code", "math"), ("code",)][number % 4]
    if not is_graph:
        calls = {"math": "/math(do {})", "code": "/code(write {})"}
        search = '/general-search(query="find {}", mode=web)'
        route = [calls.get(agent, search).format(number) for agent in agents]
        texts = ("expected_artifacts", "thinking_outline", "todo_list", "tags")
        return {
            "route_plan": route,
            "route_rationale": f"Query {number} needs it.",
            **{key: [f"- {key} of {number}"] for key in (*texts, "acceptance_criteria")},
            "handoff_plan": " -> ".join(route),
            "difficulty": ("introductory", "intermediate", "advanced")[number % 3],
            "metrics": {"primary": ["right"]},
        }
    tools = {"math": ("solve", "problem"), "code": ("write", "task"), "search": ("query", "q")}
    steps: list[Json] = []
    for place, agent in enumerate(agents):
        tool, argument = tools[agent]
        # Of three steps the last needs both others, which stand side by side.
        before = [step["id"] for step in steps] if place == len(agents) - 1 else []
        args = {argument: f"part {place} of {number}"}
        steps.append({"id": f"s{place}", "agent": agent, "tool": tool, "args": args,
                      "depends_on": before})  # fmt: skip
    return _graph(steps, f"Query {number} needs it.")


def _graph(steps: list[Json], rationale: str) -> Json:
    handoffs = [{"from": name, "to": step["id"], "payload": "the result"}
                for step in steps for name in step["depends_on"]]  # fmt: skip
    return {"rationale": rationale, "steps": steps, "handoffs": handoffs,
            "final_step": steps[-1]["id"]}  # fmt: skip


def _spoiled(kind: str, whole: Json) -> Json:
    """Returns a plan with the fault of its kind."""
    if "route_plan" in whole:
        calls = {"wrong tool": ["/browser(open it)"], "unknown step": []}
        return {**whole, "route_plan": calls.get(kind, ["/math(a)", "/math(b)"])}
    first = {**whole["steps"][0]}
    if kind == "wrong tool":
        first["tool"] = "browse"
    else:
        first["depends_on"] = ["s9" if kind == "unknown step" else whole["final_step"]]
    return _graph([first, *whole["steps"][1:]], whole["rationale"])


def answer(kind: str, number: int, corrected: int, *, is_graph: bool) -> str:
    """Returns the text of an answer, after `corrected` corrections."""
    whole = plan(1 if kind == "same" else number, is_graph=is_graph)
    if kind == "same":
        whole["rationale" if is_graph else "route_rationale"] = "It is always so."
    fault, _, how_often = (
        kind.partition(" ") if kind.endswith(("first", "twice")) else (kind, "", "")
    )
    if corrected < {"first": 1, "twice": 2, "": 9}[how_often] and kind not in ("good", "same"):
        if fault == "broken":
            return f"Here it is:\n{json.dumps(whole)[:-1]}"
        whole = _spoiled(fault, whole)
    thoughts = f"<think>{number} is a number.</think>\n" if number % 5 == 0 else ""
    return thoughts + json.dumps(whole)


class Teacher(FakeVllm):
    """The engine. `asked` counts the queries that were sent to it the first time round.

    Args:
        busy_every: each so many requests is refused with 429, and a Retry-After of 0 seconds.
    """

    def __init__(self, kinds: list[str], *, busy_every: int = 0) -> None:
        can = frozenset({"top", "tools"})
        super().__init__(self._says, can=can, cards=[{"id": "teacher"}], retry_after="0")
        self.kinds = kinds
        self.asked: Counter[int] = Counter()
        self.models: Counter[str] = Counter()
        self.refused = 0
        self._busy_every = busy_every

    def fault(self) -> int | None:
        if self._busy_every and len(self.requests) % self._busy_every == 0:
            self.refused += 1
            return 429
        return None

    def _says(self, body: Json) -> str:
        messages = body["messages"]
        asked = next((m["content"] for m in messages if m["role"] == "user"), "")
        found = _QUERY.search(asked)
        if found is None:  # a probe of the engine
            return "yes"
        number = int(found[1])
        corrected = sum(m["role"] == "assistant" for m in messages)
        self.asked[number] += not corrected
        self.models[body["model"]] += 1
        is_graph = "depends_on" in messages[0]["content"]
        return answer(self.kinds[number], number, corrected, is_graph=is_graph)

    def usage(self, prompt: list[int], choices: list[Json]) -> Json:
        return {"prompt_tokens": 700, "completion_tokens": 100, "total_tokens": 800}


@contextlib.contextmanager
def serving(teacher: Teacher) -> Iterator[Teacher]:
    """Serves it on a port of this machine, in a thread; its `url` is set."""
    with in_thread(teacher):
        teacher.url += "/v1"
        yield teacher


IN_FLIGHT = 16


def command(folder: Path, teacher: Teacher, name: str = "teacher") -> str:
    """The line that has `teacher` write plans for queries.jsonl, which is made."""
    lines = query_lines(teacher.kinds, len(teacher.kinds) * 25 // 24)
    (folder / "queries.jsonl").write_text("\n".join(lines) + "\n")
    return (
        f"sft router generate --queries queries.jsonl --teacher {name} --out made"
        f" --openai.base_url {teacher.url} --openai.server_type openai"
        f" --rollouts.max_concurrent {IN_FLIGHT} --log_level warning"
    )


def rows_in(folder: Path) -> list[dict[str, Any]]:
    """The rows, which a program that knows nothing of envserver finds right."""
    rows = folder / "made" / "rows.jsonl"
    words = [sys.executable, "-I", str(check_plans.__file__), str(rows)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    read = read_jsonl(rows)
    assert int(done.stdout) == len(read)
    return read


def plans_of(teacher: Teacher, *, is_graph: bool) -> list[Any]:
    """The usable plans of a teacher, in the order of the queries."""
    useless = ("broken", "cyclic", "wrong tool", "unknown step", "same")
    first = teacher.kinds.index("same")
    usable = [n for n, kind in enumerate(teacher.kinds) if kind not in useless or n == first]
    plans = {n: plan(n, is_graph=is_graph) for n in usable}
    plans[first] = plan(1, is_graph=is_graph)
    plans[first]["rationale" if is_graph else "route_rationale"] = "It is always so."
    return list(plans.values())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("lines", "kills"),
    [(200, 2), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((400, 20), (10_000, 3)))],
)
def test_a_killed_and_resumed_run_has_plans_once(tmp_path: Path, lines: int, kills: int) -> None:
    groups = tmp_path / "made" / "groups.jsonl"
    teacher = Teacher(kinds_of(lines), busy_every=97)
    with serving(teacher):
        line = command(tmp_path, teacher) + " --profile graph --resume"
        for wanted in sorted(
            random.Random(kills).sample(range(lines // 3, lines * 9 // 10), kills)
        ):
            with running(*line.split(), folder=tmp_path) as run:
                run.until(lambda n=wanted: teacher.asked.total() > n)
                run.kill()
        before = lines_of(groups)
        said = typed(line, tmp_path).stdout
    assert len(teacher.asked) == len(teacher.kinds) and teacher.refused
    assert teacher.asked.total() - len(teacher.asked) <= kills * IN_FLIGHT
    assert 0 < before < len(teacher.kinds)

    rows = rows_in(tmp_path)
    assert [row["plan"] for row in rows] == plans_of(teacher, is_graph=True)
    summary = json.loads((tmp_path / "made" / "summary.json").read_text())
    assert summary["rows"] + sum(summary["dropped"].values()) == summary["groups"]
    kinds = Counter(teacher.kinds)
    assert summary["dropped"] == {
        "invalid plan: json": kinds["broken"],
        "invalid plan: cycle": kinds["cyclic"],
        "invalid plan: unknown_tool": kinds["wrong tool"],
        "invalid plan: unknown_dependency": kinds["unknown step"],
        "duplicate plan": kinds["same"] - 1,
    }
    assert f"{len(rows):,} rows of {len(teacher.kinds):,} queries" in said


@pytest.mark.thorough
def test_several_teachers_share_the_queries_and_rows_are_balanced(tmp_path: Path) -> None:
    teacher = Teacher(kinds_of(120))
    (tmp_path / "prices.yaml").write_text(
        "alpha: {prompt: 1, completion: 2}\nbeta: {prompt: 10, completion: 20}\n"
    )
    with serving(teacher):
        line = command(tmp_path, teacher, name="alpha,beta")
        typed(f"{line} --prices.file prices.yaml --rows 24 --balance both", tmp_path)
    rows = rows_in(tmp_path)
    assert len(rows) == 24
    shapes = Counter((len(row["route_plan"]), row["difficulty"]) for row in rows)
    # Two of the four routes are one call long.
    assert shapes == {
        (n, level): 4 if n == 1 else 2
        for n in (1, 2, 3)
        for level in ("introductory", "intermediate", "advanced")
    }
    assert min(teacher.models.values()) > 0.25 * teacher.models.total()
    assert {row["model"] for row in rows} == {"alpha", "beta"} == set(teacher.models)
    spent = json.loads((tmp_path / "made" / "summary.json").read_text())["spent"]
    requests = teacher.models["alpha"] + 10 * teacher.models["beta"]
    assert spent["USD"] == pytest.approx(requests * (700 * 1 + 100 * 2) / 1e6)
    assert spent["prompt_tokens"] == 700 * teacher.models.total()


@pytest.mark.thorough
def test_bad_lines_are_named_before_anything_is_asked(tmp_path: Path) -> None:
    teacher = Teacher(kinds_of(24))
    with serving(teacher):
        line = command(tmp_path, teacher)
        queries = tmp_path / "queries.jsonl"
        good = queries.read_text()
        queries.write_text(
            f'{good}{{torn\n\n["a list"]\n{{"question": " "}}\n{{"query": "\\ud800"}}\n'
        )
        assert (
            "has 4 bad lines: line 26: not JSON; line 28: not a JSON object; line 29: no query; "
            "line 30: not UTF-8"
        ) in typed(line, tmp_path, status=2).stderr
        assert not teacher.asked
        typed(f"{line} --skip_bad", tmp_path)
        assert teacher.asked.total() == len(teacher.kinds)
        # More queries later: only those are asked.
        queries.write_text(good.replace("query 3 ", "query 3 really "))
        typed(f"{line} --resume", tmp_path)
        # A file must not mix rows of two profiles, so plans of another one are refused.
        assert "--profile" in typed(f"{line} --resume --profile graph", tmp_path, status=2).stderr
        assert teacher.asked.total() == len(teacher.kinds) + 1


@pytest.mark.parametrize(("name", "problems"), [("math", 8), ("code", 4)])
def test_right_solutions_become_conversations(tmp_path: Path, name: str, problems: int) -> None:
    line = f"sft {name} generate --model sim --sim.solve_probability 0.5 --k 3 --out made"
    typed(f"{line} --limit {problems} --log_level warning", tmp_path)
    groups = read_jsonl(tmp_path / "made" / "groups.jsonl")
    rows = read_jsonl(tmp_path / "made" / "rows.jsonl")
    assert [len(group["envserver"]["rollouts"]) for group in groups] == [3] * problems
    solved = {
        group["envserver"]["task_id"]
        for group in groups
        if any(one["reward"] == 1 for one in group["envserver"]["rollouts"])
    }
    assert solved and {row["task_id"] for row in rows} == solved
    assert len(rows) == len(solved) and all(row["reward"] == 1 for row in rows)
    assert all(row["messages"][-1]["role"] == "assistant" for row in rows)
