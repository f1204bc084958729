"""Data sets, and the plans of a teacher, as train, validation and test for fine-tuning.

Whether an answer is right is judged by the environment of the same name (`prepare`). Kept rows +
dropped rows = read rows; the parts are `split_three` of the kept rows in reading order.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any, Literal

from envserver_records.errors import ConfigError, InputError
from envserver_records.extras import install_command
from envserver_records.files import storing
from envserver_records.tasks import Json
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from envserver.export.stored import StoredGroup, StoredRollout, read_groups
from envserver.rows.sources import Source, streamed

from . import Spool, Three, new_folder, split_three, write_lines, write_summary

Message = dict[str, str]
Form = Literal["messages", "prompt"]


@dataclass(frozen=True)
class Example:
    """`row`: for the environment that verifies it; `facts`: names to count, by histogram."""

    prompt: str | list[Message]
    completion: str
    row: Json
    facts: dict[str, list[str]]

    def as_row(self, form: Form, template: Template | None = None) -> Json:
        if form == "messages":
            return {"messages": self._messages()}
        if isinstance(self.prompt, str):
            return {"prompt": self.prompt, "completion": self.completion}
        if template is None:
            said = [{"role": "assistant", "content": self.completion}]
            return {"prompt": self.prompt, "completion": said}
        before, whole = template(self.prompt, self.completion)
        return {"prompt": before, "completion": whole.removeprefix(before)}

    def _messages(self) -> list[Message]:
        prompt = self.prompt
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        return [*prompt, {"role": "assistant", "content": self.completion}]


Template = Callable[[list[Message], str], tuple[str, str]]


def template_of(tokenizer: str) -> Template:
    """Loads a chat template: renders a conversation before and with its completion."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            f"A tokenizer's chat template needs transformers, which cannot be imported: {error}.",
            hint=f"{install_command('local')}, or leave --tokenizer out: "
            "the template is then applied when the model is trained.",
        ) from error
    if "/" not in tokenizer and not Path(tokenizer).is_dir():
        raise ConfigError(
            f"There is no folder {tokenizer!r}.", hint="A name on the hub is OWNER/NAME."
        )
    try:
        loaded = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise ConfigError(f"There is no tokenizer {tokenizer!r}: {str(error)[:300]}") from error
    if not getattr(loaded, "chat_template", None):
        raise ConfigError(f"The tokenizer {tokenizer!r} has no chat template.")

    def render(prompt: list[Message], said: str) -> tuple[str, str]:
        before = loaded.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        answered = [*prompt, {"role": "assistant", "content": said}]
        whole = loaded.apply_chat_template(answered, tokenize=False)
        if not whole.startswith(before):
            raise ConfigError(
                f"The chat template of {tokenizer!r} renders an answered conversation differently.",
                hint="Leave --tokenizer out: `envserver_clients.sft` renders turn by turn.",
            )
        return before, whole

    return render


_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(?::[\w.-]+)?")


def rows_of(
    source: str, *, limit: int | None = None, split: str = "train"
) -> Iterator[Json | None]:
    """Yields the rows of `source` in order, None for a line that is not one; streams the hub."""
    is_hub = _HUB_NAME.fullmatch(source) and not Path(source).exists()
    name, _, config = source.partition(":")
    rows = streamed(name, config or None, split) if is_hub else _rows(source, split)
    return itertools.islice(rows, limit)


def _rows(source: str, split: str) -> Iterator[Json | None]:
    rows = Source(source).open(split)
    for number in range(rows.count):
        try:
            yield rows.read(number)
        except InputError:
            yield None


MATH_SYSTEM = (
    "You are an expert mathematics tutor. Work through each problem one step at a time, make your "
    "reasoning clear, and put the final answer in \\boxed{}."
)
_PROBLEM = ("question", "problem", "prompt")
_SOLUTION = ("generated_solution", "solution", "output", "response")


def math_example(row: Json) -> Example | str:
    """Returns a problem with its worked solution (XenArcAI/MathX-5M), or why it is dropped."""
    problem, solution = _text(row, _PROBLEM), _text(row, _SOLUTION)
    if problem is None:
        return "no problem"
    if solution is None:
        return "no solution"
    prompt = [{"role": "system", "content": MATH_SYSTEM}, {"role": "user", "content": problem}]
    return Example(prompt, solution, row, {})


def _text(row: Json, names: tuple[str, ...]) -> str | None:
    found = (row.get(name) for name in names)
    return next((text.strip() for text in found if isinstance(text, str) and text.strip()), None)


CODE_SYSTEM = "You are an expert programming assistant."
MAX_INSTRUCTION_CHARACTERS = 4000


def code_example(row: Json) -> Example | str:
    """Returns a program for an instruction (OpenCoder-LLM/opc-sft-stage2), or why it is dropped."""
    instruction, output = row.get("instruction"), row.get("output")
    if not isinstance(instruction, str) or not instruction.strip():
        return "no instruction"
    if len(instruction) > MAX_INSTRUCTION_CHARACTERS:
        return "instruction too long"
    if not isinstance(output, str) or not output.strip():
        return "no output"
    prompt = [{"role": "system", "content": CODE_SYSTEM}, {"role": "user", "content": instruction}]
    return Example(prompt, output, row, {})


Think = Literal["none", "outline"]
Call = Annotated[str, Field(pattern=r"(?s)^/(math|code|general-search)\(.*\)$")]


class RouterRow(BaseModel):
    """The plan in a row. Nothing is converted to fit; other keys are allowed."""

    model_config = ConfigDict(strict=True)

    route_plan: list[Call] = Field(min_length=1)
    route_rationale: str = Field(min_length=1)
    expected_artifacts: list[str]
    thinking_outline: list[str]
    handoff_plan: str
    todo_list: list[str]
    difficulty: Literal["introductory", "intermediate", "advanced"]
    tags: list[str]
    acceptance_criteria: list[str]
    metrics: dict[str, Any]


KEYS: tuple[str, ...] = tuple(RouterRow.model_fields)

PROMPT = f"""You are the router of a team of three specialists: math, code and general search.
Plan how the team answers the user's query. Reply with one JSON object and nothing else.

- Its keys: {", ".join(KEYS)}.
- route_plan lists the calls in their order: /math(...), /code(...), /general-search(...).
- Keep the user's own wording wherever you can.

User query:
"""


class GraphStep(BaseModel):
    """One step of a plan that is a graph."""

    model_config = ConfigDict(strict=True, extra="forbid")

    id: str
    agent: Literal["math", "code", "search"]
    tool: str
    args: dict[str, Any]
    depends_on: list[str]


class GraphPlan(BaseModel):
    """A plan of the environment's profile `graph`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    rationale: str = Field(min_length=1)
    steps: list[GraphStep] = Field(min_length=1)
    handoffs: list[dict[str, str]]
    final_step: str


GRAPH_PROMPT = f"""You are the router of a team of three specialists: math, code and search.
Plan how the team answers the user's query. Reply with one JSON object and nothing else.

- Its keys: {", ".join(GraphPlan.model_fields)}.
- Each of steps has {", ".join(GraphStep.model_fields)}. The agents' tools and their args: math:
  solve (problem), calculate (expression); code: write (task), run_tests (target); search:
  query (q).
- depends_on names the steps whose results a step needs; for each of them handoffs has one object
  with from, to and payload. All steps lead to final_step, whose result is the answer.

User query:
"""


def example_of(row: Json, *, think: Think = "none") -> Example | str:
    """Returns the example of `row`, or why it is dropped: a short text, equal for equal faults."""
    query = row.get("user_query", row.get("query"))
    if not isinstance(query, str) or not query.strip():
        return "no query"
    is_graph = isinstance(row.get("plan"), dict) and "steps" in row["plan"]
    plan: Json = row["plan"] if is_graph else row
    try:
        (GraphPlan if is_graph else RouterRow).model_validate(plan)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = first["loc"][0]
        return f"no {key}" if first["type"] == "missing" else f"{key} is wrong"
    keys = GraphPlan.model_fields if is_graph else KEYS
    completion = json.dumps({key: plan[key] for key in keys}, ensure_ascii=False)
    if think == "outline":
        outline = plan["rationale"] if is_graph else "\n".join(row["thinking_outline"])
        completion = f"<think>\n{outline}\n</think>\n{completion}"
    route = route_of(plan)
    if route is None:
        return "steps are no graph without a cycle"
    facts = {"tools": tools_of(plan), "plan_shapes": [route]}
    return Example((GRAPH_PROMPT if is_graph else PROMPT) + query.strip(), completion, row, facts)


def tools_of(plan: Json) -> list[str]:
    if "steps" in plan:
        return [step["agent"] for step in plan["steps"]]
    return [call[1:].partition("(")[0] for call in plan["route_plan"]]


def route_of(plan: Json) -> str | None:
    """Returns the shape of a plan, `code+search->math`; None if steps wait for each other."""
    if "steps" not in plan:
        return "->".join(tools_of(plan))
    agents = {step["id"]: step["agent"] for step in plan["steps"]}
    order = TopologicalSorter({step["id"]: step["depends_on"] for step in plan["steps"]})
    try:
        order.prepare()
    except CycleError:
        return None
    stages: list[str] = []
    while order.is_active():
        ready = order.get_ready()
        stages.append("+".join(sorted(agents.get(name, "?") for name in ready)))
        order.done(*ready)
    return "->".join(stages)


OnProgress = Callable[[int], None]
"""Called with the number of rows read so far."""
Check = Callable[[Path], Iterator[str | None]]
"""Gets a JSONL file of {"task": row, "response": text}; yields for each line its fault or None."""

SUMMARY = "summary.json"


@dataclass(frozen=True)
class Plan:
    """Options of the files; `check` keeps only the examples that it finds right."""

    seed: int
    val_ratio: float
    test_ratio: float
    form: Form
    template: Template | None = None
    check: Check | None = None


def prepare(
    rows: Iterable[Json | None],
    example_of: Callable[[Json], Example | str],
    out: Path,
    plan: Plan,
    *,
    source: str,
    on_progress: OnProgress = lambda count: None,
) -> Json:
    """Writes the examples of `rows` below `out`; returns the contents of summary.json."""
    if plan.val_ratio < 0 or plan.test_ratio < 0 or plan.val_ratio + plan.test_ratio >= 1:
        raise ConfigError("val_ratio and test_ratio must be 0 or more, and below 1 together.")
    dropped: Counter[str] = Counter()
    facts: list[dict[str, list[str]]] = []
    with ExitStack() as stack:
        folder = stack.enter_context(new_folder(out, mark=SUMMARY))
        spool, asked = stack.enter_context(Spool()), stack.enter_context(Spool())
        read = 0
        for read, row in enumerate(rows, 1):
            on_progress(read)
            example = "no JSON object" if row is None else example_of(row)
            if isinstance(example, str):
                dropped[example] += 1
                continue
            spool.add(example.as_row(plan.form, plan.template))
            facts.append(example.facts)
            if plan.check is not None:
                asked.add({"task": example.row, "response": example.completion})
        with storing(out):
            right = _right(plan.check, asked, folder, dropped)
        kept = list(range(len(spool))) if right is None else right
        if not kept:
            raise InputError(
                f"None of the {read} rows of {source} is usable.",
                hint="; ".join(f"{count} times: {why}" for why, count in dropped.most_common(5)),
                place=source,
            )
        parts = split_three(
            len(kept), seed=plan.seed, val_ratio=plan.val_ratio, test_ratio=plan.test_ratio
        )
        with storing(out):
            digests = _written(folder, parts, kept, spool, plan)
            summary = {
                "input": source,
                "rows": read,
                "counts": {name: len(part) for name, part in parts._asdict().items()},
                "dropped": dropped.total(),
                "dropped_reasons": dict(dropped.most_common()),
                "seed": plan.seed,
                "sha256": digests,
                **_histograms(facts[number] for number in kept),
            }
            write_summary(folder / SUMMARY, summary)
    return summary


def _right(
    check: Check | None, asked: Spool, folder: Path, dropped: Counter[str]
) -> list[int] | None:
    """Returns the numbers of the right examples; None for all, where nothing was checked."""
    if check is None or not len(asked):
        return None
    file = folder / "candidates.jsonl"
    write_lines(file, asked.lines(range(len(asked))))
    right: list[int] = []
    for number, fault in enumerate(check(file)):
        if fault is None:
            right.append(number)
        else:
            dropped[fault] += 1
    file.unlink()
    return right


def _written(
    folder: Path, parts: Three, kept: list[int], spool: Spool, plan: Plan
) -> dict[str, str]:
    shares = {"train": 1.0, "validation": plan.val_ratio, "test": plan.test_ratio}
    return {
        name: write_lines(folder / f"{name}.jsonl", spool.lines(kept[number] for number in part))
        for name, part in parts._asdict().items()
        if shares[name] > 0
    }


def _histograms(facts: Iterable[dict[str, list[str]]]) -> dict[str, dict[str, int]]:
    counted: dict[str, Counter[str]] = {}
    for fact in facts:
        for histogram, names in fact.items():
            counted.setdefault(histogram, Counter()).update(names)
    return {histogram: dict(counts.most_common()) for histogram, counts in counted.items()}


Balance = Literal["none", "route", "difficulty", "both"]

_LEVELS = ("introductory", "intermediate", "advanced")


@dataclass(frozen=True)
class Selection:
    rows: int | None = None
    balance: Balance = "none"
    seed: int = 7


@dataclass(frozen=True)
class _Candidate:
    """A usable row: its number in the spool, its query's position, its plan's digest."""

    number: int
    position: int
    digest: bytes
    route: str
    difficulty: str

    def cell(self, balance: Balance) -> Hashable:
        parts = {"none": (), "route": (self.route,), "difficulty": (self.difficulty,)}
        return parts.get(balance, (self.route, self.difficulty))


def write_plans(groups: Path, out: Path, selection: Selection) -> Json:
    dropped: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    found: list[_Candidate] = []
    with storing(out), Spool() as spool:
        for group in read_groups([str(groups)]):
            spent["groups"] += 1
            _spend(group, spent)
            best = _best(group)
            if best is None:
                dropped[_fault(group)] += 1
            else:
                found.append(_candidate(group, best, spool))
        kept = _distinct(found, dropped)
        chosen = _chosen(kept, selection, dropped)
        beside = out.with_name(f".{out.name}.new")
        digest = write_lines(beside, spool.lines(row.number for row in chosen))
        beside.replace(out)
    return {
        "groups": spent.pop("groups"),
        "rows": len(chosen),
        "dropped": dict(dropped.most_common()),
        "routes": dict(Counter(row.route for row in chosen).most_common()),
        "difficulties": dict(Counter(row.difficulty for row in chosen).most_common()),
        "spent": dict(spent),
        "sha256": digest,
    }


def balanced(cells: Sequence[Hashable], wanted: int, *, seed: int) -> list[int]:
    """Returns `wanted` positions in order, of each value equally many, as far as there are."""
    of_cell: dict[Hashable, list[int]] = defaultdict(list)
    for position, cell in enumerate(cells):
        of_cell[cell].append(position)
    rng, ranked = random.Random(seed), []
    for number, positions in enumerate(of_cell.values()):
        rng.shuffle(positions)
        ranked += [(rank, number, position) for rank, position in enumerate(positions)]
    return sorted(position for _, _, position in sorted(ranked)[:wanted])


def _best(group: StoredGroup) -> StoredRollout | None:
    valid = [
        rollout
        for rollout in group.rollouts
        if rollout.components.get("valid") == 1 and rollout.reward
    ]
    return max(valid, key=lambda candidate: candidate.reward or 0.0, default=None)


def _fault(group: StoredGroup) -> str:
    for rollout in reversed(group.rollouts):
        for name in rollout.metrics:
            if name.startswith("invalid_"):
                return f"invalid plan: {name.removeprefix('invalid_')}"
        if rollout.truncated or rollout.finish_reason == "length":
            return "invalid plan: cut off"
    return "plan with a wrong result"


def _candidate(group: StoredGroup, rollout: StoredRollout, spool: Spool) -> _Candidate:
    plan = json.loads(rollout.output["plan"].rpartition("</think>")[2])
    query, is_graph = group.public["query"], "steps" in plan
    facts: Json = {"query": query, "plan": plan} if is_graph else {"user_query": query, **plan}
    # The first call of a rollout is the plan's.
    calls = (timing.name for timing in rollout.timings if timing.kind == "engine")
    number = spool.add({"id": rollout.task_id, **facts, "model": next(calls, rollout.model)})
    written = json.dumps(plan, sort_keys=True).encode()
    return _Candidate(
        number,
        rollout.index,
        hashlib.sha256(written).digest()[:16],
        route_of(plan) or "",
        _LEVELS[min(len(plan["steps"]), 3) - 1] if is_graph else plan["difficulty"],
    )


def _distinct(found: Iterable[_Candidate], dropped: Counter[str]) -> list[_Candidate]:
    of_plan: dict[bytes, _Candidate] = {}
    for candidate in sorted(found, key=lambda candidate: candidate.position):
        if of_plan.setdefault(candidate.digest, candidate) is not candidate:
            dropped["duplicate plan"] += 1
    return list(of_plan.values())


def _chosen(
    kept: list[_Candidate], selection: Selection, dropped: Counter[str]
) -> list[_Candidate]:
    if selection.rows is None or selection.rows >= len(kept):
        return kept
    dropped["above --rows"] += len(kept) - selection.rows
    if selection.balance == "none":
        return kept[: selection.rows]
    cells = [candidate.cell(selection.balance) for candidate in kept]
    return [kept[n] for n in balanced(cells, selection.rows, seed=selection.seed)]


def _spend(group: StoredGroup, spent: Counter[str]) -> None:
    for rollout in group.rollouts:
        for name in ("prompt_tokens", "completion_tokens"):
            spent[name] += rollout.usage.get(name, 0)
        cost = rollout.usage.get("cost") or {}
        for model in (cost.get("models") or {}).values():
            spent[cost["currency"]] += model
