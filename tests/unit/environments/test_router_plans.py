"""Plans of the environment `router`: what is valid, how alike two are, what the authors measure."""

import copy
import dataclasses
import itertools
import json
from typing import Any

import pytest
from envserver_environments.router.course import (
    Plan,
    PlanError,
    Step,
    as_json,
    course_metrics,
    course_of,
    plan_of,
    plan_of_course,
    read_course,
    read_plan,
)
from envserver_environments.router.scoring import likeness
from envserver_records.tasks import Json
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import cases_of
from support.extent import examples

CASES = cases_of(__file__, "router_cases.json")
TOOLS = {
    "math": ("solve", "calculate"),
    "code": ("write", "run_tests"),
    "search": ("query",),
}
ARGUMENT = {"solve": "problem", "calculate": "expression", "write": "task", "query": "q"}


def plan(*steps: str, edges: str = "") -> Plan:
    """`plan("search.query", "math.solve", edges="12")`: an edge from the first to the second."""
    pairs = [(int(pair[0]), int(pair[1])) for pair in edges.split()]
    made = []
    for number, name in enumerate(steps, 1):
        agent, _, tool = name.partition(".")
        tool = tool or TOOLS[agent][0]
        before = tuple(f"s{one}" for one, other in pairs if other == number)
        made.append(Step(f"s{number}", agent, tool, {ARGUMENT.get(tool, "target"): "x"}, before))
    payloads = {(f"s{one}", f"s{other}"): "result" for one, other in pairs}
    return Plan(tuple(made), payloads, f"s{len(steps)}", "It is needed.")


CHAIN = plan("search", "math", "code", edges="12 23")


def broken(path: str, value: Any) -> str:
    """CHAIN as JSON, in which `value` is at a path such as `steps.0.agent`; None: nothing is."""
    plan = copy.deepcopy(as_json(CHAIN))
    *names, last = [int(name) if name.isdigit() else name for name in path.split(".")]
    inner: Any = plan
    for name in names:
        inner = inner[name]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return json.dumps(plan)


def error_of(text: str) -> str:
    with pytest.raises(PlanError) as caught:
        read_plan(text)
    return caught.value.kind


TEXT = json.dumps(as_json(CHAIN))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("unclosed_think", f"<think>{TEXT}"),
        ("json", ""),
        ("json", f"<think>{TEXT}</think>"),
        ("json", f"```json\n{TEXT}\n```"),
        ("json", f"{TEXT} Done."),
        ("json", TEXT[:-1] + ', "final_step": "s3"}'),
        ("json", TEXT[:-1] + ', "x": 1e999}'),
        ("json", "[" * 90_000),
        ("schema", TEXT + " " * 8 + "x" * 100_000),
        ("schema", "[]"),
        *((kind, broken(path, value)) for kind, path, value in CASES["wrong_plans"]),
        *((kind, broken(name, 3 * as_json(CHAIN)[name])) for name, kind in (
            ("steps", "schema"), ("handoffs", "handoffs_mismatch"),
        )),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_plan_is_named(kind: str, text: str) -> None:
    assert error_of(text) == kind


def test_a_plan_is_read_behind_thoughts_and_written_again() -> None:
    assert read_plan(f"<think>{{</think>\n {TEXT}\n") == CHAIN
    assert as_json(read_plan(TEXT)) == as_json(CHAIN)
    backwards = broken("steps", as_json(CHAIN)["steps"][::-1])
    assert [step.id for step in read_plan(backwards).in_order()] == ["s1", "s2", "s3"]


@st.composite
def plans(draw: st.DrawFn, most: int = 4) -> Plan:
    """Sound plans: every step but the last is used by a later one."""
    names = [f"{agent}.{tool}" for agent, tools in TOOLS.items() for tool in tools]
    steps = draw(st.lists(st.sampled_from(names), min_size=1, max_size=most))
    edges = set()
    for number in range(1, len(steps)):
        later = st.integers(number + 1, len(steps))
        edges |= {(number, other) for other in draw(st.sets(later, min_size=1, max_size=2))}
    return plan(*steps, edges=" ".join(f"{a}{b}" for a, b in sorted(edges)))


def best_by_trying(one: Plan, other: Plan) -> tuple[float, int, int]:
    """Sum of weights, hits and pairs of the best of all maps."""
    edges = {(a, b) for a, b in other.payloads}
    best = (0.0, 0, 0)
    targets = [*other.steps, *[None] * len(one.steps)]
    for chosen in itertools.permutations(targets, len(one.steps)):
        pairs = {
            a.id: (b.id, 1.0 if a.tool == b.tool else 0.5)
            for a, b in zip(one.steps, chosen, strict=True)
            if b is not None and a.agent == b.agent
        }
        hits = sum(
            a in pairs and b in pairs and (pairs[a][0], pairs[b][0]) in edges
            for a, b in one.payloads
        )
        best = max(best, (sum(weight for _, weight in pairs.values()), hits, len(pairs)))
    return best


@settings(max_examples=examples(60), deadline=None)
@given(one=plans(3), other=plans())
def test_likeness_is_that_of_the_best_of_all_maps(one: Plan, other: Plan) -> None:
    weight, hits, pairs = best_by_trying(one, other)
    edges = len(one.payloads) + len(other.payloads)
    found = likeness(one, other)
    assert found.node_f1 == pytest.approx(2 * weight / (len(one.steps) + len(other.steps)))
    assert found.edge_f1 == pytest.approx(2 * hits / edges if edges else 1.0)
    form = 0.6 * found.node_f1 + 0.4 * found.edge_f1
    same = 2 * pairs / (len(one.steps) + len(other.steps))
    assert found.score == pytest.approx(form * (0.25 + 0.75 * same))


@pytest.mark.parametrize(("tool", "right", "given", "share"), CASES["arguments"])
def test_arguments_count(tool: str, right: str, given: str, share: float) -> None:
    def with_argument(text: str) -> Plan:
        (step,) = plan(tool).steps
        step = dataclasses.replace(step, args=dict.fromkeys(step.args, text))
        return dataclasses.replace(plan(tool), steps=(step,))

    found = likeness(with_argument(given), with_argument(right))
    assert found.arguments == pytest.approx(share, abs=0.15)


@settings(max_examples=examples(60), deadline=None)
@given(one=plans(6), other=plans(6), order=st.randoms(use_true_random=False))
def test_likeness_knows_neither_names_nor_the_order_of_steps(
    one: Plan, other: Plan, order: Any
) -> None:
    names = {step.id: f"n{number}" for number, step in enumerate(one.steps)}
    steps = [
        Step(names[s.id], s.agent, s.tool, s.args, tuple(names[n] for n in s.depends_on))
        for s in one.steps
    ]
    order.shuffle(steps)
    payloads = {(names[a], names[b]): text for (a, b), text in one.payloads.items()}
    renamed = Plan(tuple(steps), payloads, names[one.final_step], one.rationale)
    assert plan_of(as_json(renamed)).final_step == names[one.final_step]
    assert likeness(renamed, one).score == 1.0
    assert likeness(renamed, other) == likeness(one, other) == likeness(other, one)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["steps", "id", "args", "route_plan", "s1"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=examples(150), deadline=None)
@given(value=JSON, key=st.sampled_from(sorted(as_json(CHAIN))), place=st.integers(0, 2))
def test_no_answer_is_worse_than_not_valid(value: Any, key: str, place: int) -> None:
    inside = as_json(CHAIN)
    inside["steps"][place]["args"] = value
    answers = [value, {**as_json(CHAIN), key: value}, inside]
    for text in map(json.dumps, answers):
        for read in (read_plan, read_course):
            try:
                assert likeness(read(text), CHAIN).score <= 1.0
            except PlanError as error:
                assert str(error)


COURSE = course_of(CHAIN, "Find the rule and write a program")


def test_a_route_is_a_chain() -> None:
    assert likeness(plan_of_course(COURSE), CHAIN).score == 1.0
    assert read_course(json.dumps(COURSE)).steps[0].args == {"q": "x"}
    spoken = {**COURSE, "route_plan": ['/general-search(query="a \\"b\\" (c)", mode=both)']}
    assert plan_of_course(spoken).steps[0].args == {"q": 'a "b" (c)'}


@pytest.mark.parametrize(("kind", "change"), CASES["wrong_routes"])
def test_what_is_wrong_with_a_route_is_named(kind: str, change: Json) -> None:
    with pytest.raises(PlanError) as caught:
        plan_of_course({**COURSE, **change})
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, {"route_plan_exact": 1, "todo_covers_all_tools": 1, "length_ratio": 1}),
        (
            {"route_plan": COURSE["route_plan"][::-1]},
            {"route_tool_precision": 1, "route_first_tool_match": 0},
        ),
        ({"route_plan": "/math"}, {"route_length_match": 0, "route_tool_precision": 0}),
        ({"todo_list": ["- [ ] /math: a", "b"]}, {"todo_tool_alignment": 1 / 2}),
        ({"handoff_plan": "/MATH, /code"}, {"handoff_tools_covered": 0}),
        ({"metrics": {"primary": "much"}}, {"metrics_primary_list": 0}),
    ],
)
def test_the_authors_metrics_are_theirs_to_the_letter(
    change: Json, found: dict[str, float]
) -> None:
    measured = course_metrics(json.dumps({**COURSE, **change}), COURSE)
    assert {name: measured[name] for name in found} == found


def test_what_is_not_the_plan_alone_is_not_valid_json() -> None:
    text = json.dumps(COURSE)
    for wrong in (f"```\n{text}\n```", "[1]"):
        assert course_metrics(wrong, COURSE) == {"json_valid": 0}
    thought = course_metrics(f"<think>so</think>{text}", COURSE)
    assert (thought["json_valid"], thought["route_plan_exact"]) == (0, 1)
    deep = json.loads("[" * 600 + "]" * 600)
    measured = course_metrics(json.dumps({**COURSE, "tags": deep}), COURSE)
    assert measured.keys() <= course_metrics(text, COURSE).keys()
    assert error_of(broken("steps.0.args.q", deep)) == "tool_args"
