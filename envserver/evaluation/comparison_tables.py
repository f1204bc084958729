"""Shows a comparison as tables and sentences, for terminals, Markdown and the HTML page. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from .comparison import Comparison, Fourfold, Paired, PartComparison
from .tables import TextTable, cell_text, estimate_text, markdown_table

MOST_CHANGES = 20
"""Tasks shown at each end: the largest losses and the largest gains."""
_MOST_NAMED = 5
_LEVEL = 0.05


def comparison_tables(found: Comparison) -> list[TextTable]:
    """Mean rewards, passes, who passed which, the tasks that differ most, settings that differ."""
    rewards = [(one.name, one.reward) for one in _all(found)]
    passed = [(one.name, one.passed) for one in _all(found)]
    tables = [
        _paired_table("Mean reward", found, rewards),
        _paired_table(
            f"Attempts that pass (reward of at least {found.rules.pass_at:g})",
            found,
            passed if passed != rewards else [],
        ),
        _fourfold(found),
        _changes(found),
        TextTable(
            "Settings that differ",
            ["", found.a, found.b],
            [[name, _said(one), _said(two)] for name, (one, two) in found.settings.items()],
        ),
    ]
    return [table for table in tables if table.rows]


def verdicts_of(found: Comparison) -> list[str]:
    """Returns the result in a sentence for each environment and one for all."""
    return list(_verdicts(found))


def comparison_notes(found: Comparison) -> list[str]:
    """Says what could not be compared and how the rest was tested."""
    return [
        *_about_tasks(found),
        *found.warnings,
        f"Tasks are paired by their ids; both sides are counted alike (--failures "
        f"{found.rules.failures}, --truncated {found.rules.truncated}). In brackets: 95 % "
        "intervals of the difference (bootstrap over tasks). p: two-sided sign-flip test "
        "of the pairs"
        + (
            ", exact (for one attempt at each task it is McNemar's)."
            if all(one.reward is None or one.reward.test.exact for one in found.parts)
            else "; where there are too many for an exact one, of random signs (*)."
        ),
    ]


def comparison_markdown(found: Comparison) -> str:
    """Returns the whole comparison as Markdown."""
    lines = [f"# {cell_text(found.b)} against {cell_text(found.a)}", ""]
    models = f"Models: {cell_text(found.models[0])} (first), {cell_text(found.models[1])} (second)."
    lines += [models, "", *map(cell_text, verdicts_of(found)), ""]
    lines += [f"- {cell_text(note)}" for note in comparison_notes(found)]
    for table in comparison_tables(found):
        lines += ["", f"## {cell_text(table.title)}", "", *markdown_table(table)]
    return "\n".join(lines) + "\n"


def _all(found: Comparison) -> list[PartComparison]:
    return [*found.parts, *([found.together] if found.together is not None else [])]


def _verdicts(found: Comparison) -> Iterator[str]:
    for part in [*found.parts, *([found.together] if found.together is not None else [])]:
        name = "" if len(found.parts) == 1 else f"{part.name}: "
        if part.reward is None:
            yield f"{name}No task counts on both sides: nothing could be compared."
            continue
        yield f"{name}{_verdict(part.reward, found)}"


def _verdict(pair: Paired, found: Comparison) -> str:
    p = pair.test.p_value
    size = f"by {abs(pair.difference.value):.3f} in mean reward (p = {_p(p)})"
    if p >= _LEVEL:
        return f"No difference is shown: {pair.difference.value:+.3f} in mean reward, p = {_p(p)}."
    which, other = (found.b, found.a) if pair.difference.value > 0 else (found.a, found.b)
    return f"{which} is better than {other} {size}."


def _about_tasks(found: Comparison) -> Iterator[str]:
    for names, side in ((found.parts_of_a, found.a), (found.parts_of_b, found.b)):
        if names:
            yield f"Only {side} has {', '.join(names)}."
    for part in found.parts:
        for ids, side in ((part.only_a, found.a), (part.only_b, found.b)):
            if ids:
                yield f"{part.name}: {_named(ids)} of {side} only: left out."
        if part.other_tasks:
            yield (
                f"{part.name}: {_named(part.other_tasks)} with the same id that ask something else "
                "on both sides: left out."
            )


def _named(ids: list[str]) -> str:
    more = f" and {len(ids) - _MOST_NAMED} more" if len(ids) > _MOST_NAMED else ""
    word = "task" if len(ids) == 1 else "tasks"
    return f"{len(ids)} {word} ({', '.join(ids[:_MOST_NAMED])}{more})"


def _paired_table(
    title: str, found: Comparison, pairs: list[tuple[str, Paired | None]]
) -> TextTable:
    header = ["", "tasks", found.a, found.b, "difference", "p", "better", "worse", "equal"]
    rows = [
        [
            name,
            str(pair.tasks),
            f"{pair.a:.3f}",
            f"{pair.b:.3f}",
            estimate_text(pair.difference, "+"),
            _p(pair.test.p_value) + ("" if pair.test.exact else " *"),
            *map(str, (pair.better, pair.worse, pair.equal)),
        ]
        for name, pair in pairs
        if pair is not None
    ]
    return TextTable(title, header, rows)


def _fourfold(found: Comparison) -> TextTable:
    header = ["", "both", f"only {found.a}", f"only {found.b}", "neither"]
    rows = [
        [part.name, *_counts(part.fourfold)] for part in _all(found) if part.fourfold is not None
    ]
    return TextTable("Tasks passed by", header, rows)


def _counts(four: Fourfold) -> list[str]:
    return [str(one) for one in (four.both, four.only_a, four.only_b, four.neither)]


def _changes(found: Comparison) -> TextTable:
    losses = [one for one in found.changes if one.b < one.a][:MOST_CHANGES]
    gains = [one for one in found.changes if one.b > one.a][-MOST_CHANGES:]
    left_out = len(found.changes) - len(losses) - len(gains)
    title = "Tasks that differ most" + (f" ({left_out} more differ)" if left_out else "")
    rows = [
        [
            one.task_id if len(found.parts) == 1 else f"{one.part}: {one.task_id}",
            f"{one.a:.3f}",
            f"{one.b:.3f}",
            f"{one.b - one.a:+.3f}",
        ]
        for one in [*losses, *gains]
    ]
    return TextTable(title, ["", found.a, found.b, "difference"], rows)


def _p(value: float) -> str:
    return "< 0.0001" if value < 0.0001 else f"{value:.4f}"


def _said(value: object) -> str:
    return "-" if value is None else str(value)
