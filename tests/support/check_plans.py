"""Checks rows of plans by what is written of them, with nothing but the standard library.

`python check_plans.py ROWS`: prints how many rows there are; exit status 1 names the first fault.
"""

import json
import re
import sys
from pathlib import Path

TOOLS = {
    ("math", "solve"): "problem",
    ("math", "calculate"): "expression",
    ("code", "write"): "task",
    ("code", "run_tests"): "target",
    ("search", "query"): "q",
}
TEN = {
    "route_plan", "route_rationale", "expected_artifacts", "thinking_outline", "handoff_plan",
    "todo_list", "difficulty", "tags", "acceptance_criteria", "metrics",
}  # fmt: skip
CALL = re.compile(r"(?s)/(math|code)\(.+\)|/general-search\(.*query=\".+\".*mode=(web|rag|both)\)")


def fault_of_graph(plan: dict) -> str | None:
    if set(plan) != {"rationale", "steps", "handoffs", "final_step"} or not plan["rationale"]:
        return "keys"
    steps = {step["id"]: step for step in plan["steps"]}
    if not 1 <= len(steps) == len(plan["steps"]) <= 8:
        return "number of steps, or an id twice"
    for step in steps.values():
        needed = TOOLS.get((step["agent"], step["tool"]))
        if needed is None or not isinstance(step["args"].get(needed), str):
            return "tool"
        if any(name not in steps for name in step["depends_on"]):
            return "dependency on a missing step"
    edges = sorted((name, step["id"]) for step in steps.values() for name in step["depends_on"])
    if edges != sorted((one["from"], one["to"]) for one in plan["handoffs"]):
        return "handoffs"
    # Kahn's algorithm: what never becomes free waits in a circle.
    left, done = dict(steps), set()
    while free := [name for name, step in left.items() if done.issuperset(step["depends_on"])]:
        done.update(free)
        for name in free:
            del left[name]
    if left:
        return "cycle"
    needs, waiting = set(), [plan["final_step"]]
    while waiting:
        name = waiting.pop()
        if name not in steps:
            return "final step that is none"
        needs.add(name)
        waiting += steps[name]["depends_on"]
    return None if needs == set(steps) else "step that nothing uses"


def fault_of_ten_keys(row: dict) -> str | None:
    if not set(row) >= TEN:
        return "keys"
    if not row["route_plan"] or not all(map(CALL.fullmatch, row["route_plan"])):
        return "route_plan"
    if row["difficulty"] not in ("introductory", "intermediate", "advanced"):
        return "difficulty"
    lists = TEN - {"route_rationale", "handoff_plan", "difficulty", "metrics"}
    if not all(isinstance(row[key], list) and row[key] for key in lists):
        return "lists"
    return None if isinstance(row["metrics"], dict) and row["metrics"] else "metrics"


def main(path: str) -> None:
    queries, plans = set(), set()
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            row = json.loads(line)
            is_graph = "plan" in row
            query = " ".join((row["query"] if is_graph else row["user_query"]).casefold().split())
            plan = row["plan"] if is_graph else {key: row.get(key) for key in TEN}
            written = json.dumps(plan, sort_keys=True)
            fault = fault_of_graph(plan) if is_graph else fault_of_ten_keys(row)
            if not query or query in queries:
                fault = "query"
            elif written in plans:
                fault = "plan that was there before"
            if fault:
                sys.exit(f"{path}, line {number}: {fault}")
            queries.add(query)
            plans.add(written)
    print(len(queries))


if __name__ == "__main__":
    main(sys.argv[1])
