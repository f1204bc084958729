"""Exports to Parquet: what pandas, pyarrow and `datasets` read is what was delivered."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
from envserver_factory.exporting.formats import Options, Written, format_of
from envserver_factory.exporting.parquet import ParquetShards
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import delivered
from support.extent import examples

from envserver.export import StoredRollout, group_of
from envserver.export.stored import StoredGroup, StoredRow

parquet = pytest.importorskip("pyarrow.parquet")

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image"}]}]


FACTS: dict[str, Any] = {
    "flags": ["lossy_detok"],
    "hooks": [{"at": "request", "reason": "shorter", "changed": ["messages"]}],
    "egress": [{"method": "GET", "host": "api.test", "port": 80, "status": 200}],
}


def line(rollouts: Sequence[dict[str, Any]], group_id: str = "g-0") -> dict[str, Any]:
    """A group as `process` writes it; each rollout has `messages` and rows of (id, logprob | None).

    None: the token is context.
    """
    made = delivered.line(0, [one.get("reward", 1.0) for one in rollouts], **FACTS)
    made["envserver"]["group_id"] = group_id
    for name in ("tokens", "masks", "inference_logprobs", "messages", "scores"):
        made[name] = []
    for facts, rollout in zip(made["envserver"]["rollouts"], rollouts, strict=True):
        rows = rollout["rows"] or [[]]
        begin = len(made["tokens"])
        for row in rows:
            made["tokens"].append([token for token, _ in row])
            made["masks"].append([-100 if p is None else token for token, p in row])
            made["inference_logprobs"].append([1.0 if p is None else p for _, p in row])
            made["messages"].append(rollout["messages"])
            made["scores"].append(facts["reward"])
        facts |= {
            "rows": list(range(begin, begin + len(rows))),
            "output": rollout.get("output"),
            "row_flags": [["lossy_detok"]] * len(rows),
            "versions": [[[3, 0, len(row)]] for row in rows],
        }
    return made


def export(folder: Path, groups: Sequence[StoredGroup], shard_rows: int = 1000) -> list[Written]:
    form = format_of("parquet", Options())
    writer = ParquetShards(folder, shard_rows, row_group_bytes=4096)
    for group in groups:
        for row in form.rows(group, group.rollouts):
            writer.put(row)
    return writer.close()


def as_read(rollout: StoredRollout, number: int, row: StoredRow | None) -> dict[str, Any]:
    """What a row of the table must say of a training row (None: the rollout has none)."""
    agent = row.agent if row else None
    same = (
        "rollout_id group_id env domain task_id split model reward finish_reason limit turns index "
        "truncated attempt seed flags policy_version created_at length sampled usage rewards"
    )
    in_json = "components metrics agent_metrics output tools actions others"
    return {
        **{name: getattr(rollout, name) for name in same.split()},
        **{name: orjson.loads(orjson.dumps(getattr(rollout, name))) for name in in_json.split()},
        **{
            name: msgspec.to_builtins(getattr(rollout, name))
            for name in ("turn_rewards", "hooks", "egress")
        },
        "messages": without_nulls(rollout.messages),
        "rows": len(rollout.rows),
        "row": number,
        "agent": agent,
        "agent_reward": rollout.rewards.get(agent or "", rollout.reward),
        "row_flags": row.flags if row else [],
        "versions": [list(span) for span in row.versions] if row else [],
        "tokens": row.tokens.tolist() if row else [],
        "mask": row.mask.astype(bool).tolist() if row else [],
        "logprobs": row.logprobs.tolist() if row else [],
        "images": [],
    }


def read(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for row in parquet.read_table(folder).to_pylist():
        as_text = row["messages_json"]  # of conversations that have no columns
        row["messages"] = without_nulls(json.loads(as_text) if as_text else row["messages"])
        for name in [name for name in row if name.endswith("_json")]:
            text = row.pop(name)
            if name not in ("messages_json", "generation_params_json"):
                row[name.removesuffix("_json")] = None if text is None else json.loads(text)
        row["versions"] = [list(span.values()) for span in row["versions"]]
        rows.append(row)
    return rows


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
CONTENTS = st.none() | st.text(max_size=20) | st.just(PARTS[0]["content"]) | JSON_VALUES
CALLS = st.none() | st.just([]) | st.just([CALL]) | JSON_VALUES
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"])},
    optional={"content": CONTENTS, "tool_calls": CALLS, "name": JSON_VALUES, "new": JSON_VALUES},
)
LOGPROBS = st.none() | st.floats(-50, 0, width=32)
ROLLOUTS = st.fixed_dictionaries(
    {
        "rows": st.lists(
            st.lists(st.tuples(st.integers(0, 2**31 - 1), LOGPROBS), min_size=1, max_size=6),
            max_size=3,
        ),
        "messages": st.lists(MESSAGES, max_size=3),
        "reward": st.floats(0, 1),
        "output": JSON_VALUES,
    }
)


@settings(max_examples=examples(30), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.lists(ROLLOUTS, min_size=1, max_size=3), max_size=3), st.integers(1, 5))
def test_what_is_read_back_is_what_was_delivered(
    tmp_path_factory: pytest.TempPathFactory, rollouts: list[list[Any]], shard_rows: int
) -> None:
    folder = tmp_path_factory.mktemp("parquet")
    groups = [group_of(line(each, f"g-{n}"), f"line {n}") for n, each in enumerate(rollouts)]
    written = export(folder, groups, shard_rows)
    expected = [
        as_read(rollout, number, row)
        for group in groups
        for rollout in group.rollouts
        for number, row in enumerate(rollout.rows or [None])
    ]
    assert read(folder) == expected
    assert sum(each.rows for each in written) == len(expected)
    assert all(each.rows <= shard_rows for each in written)
    assert sorted(path.name for path in (folder / "data").iterdir()) == [
        each.path.removeprefix("data/") for each in written
    ]


def test_columns_are_typed_for_those_who_read_them(tmp_path: Path) -> None:
    """Values that `datasets` loads: test_export_hub.py."""
    rows = [[(5, None), (6, -0.5), (7, -0.25)]]
    export(tmp_path, [group_of(line([{"rows": rows, "messages": []}]), "line 1")])
    frame = pytest.importorskip("pandas").read_parquet(tmp_path)
    assert frame["reward"].dtype == np.float64 and frame["truncated"].dtype == np.bool_
    assert frame["tokens"][0].dtype == np.int32 and frame["logprobs"][0].dtype == np.float32
    assert frame["logprobs"][0].tolist() == [0.0, -0.5, -0.25]
