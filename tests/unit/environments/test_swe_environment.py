"""The agents of `swe`: what they see, do and hand in."""

import json

import pytest
from envserver_environments.swe.patches import apply_changes, read_patch
from support.scripted_run import call, calls
from support.swe_scripts import ROMAN, SUBMIT, answers, attempt, bash

from envserver import Sandboxes


@pytest.mark.asyncio(loop_scope="module")
async def test_bash_shows_heads_and_tails_and_takes_the_files(rooms: Sandboxes) -> None:
    output, run = await attempt(
        rooms,
        "bash",
        bash("pwd; git status --short; git log --oneline | wc -l; ls"),
        bash("seq 1 30000; exit 3"),
        bash(
            "sed -i 's/6/7/' roman.py; echo new > added.txt; mkdir __pycache__;"
            "touch __pycache__/x.pyc"
        ),
        bash("git commit -qam mine; rm -rf .git/hooks; git config core.fsmonitor 'touch owned'"),
        SUBMIT,
    )
    first, second, *_ = answers(run)
    assert first.split() == ["[exit", "status", "0]", "/work", "1", "roman.py", "tests"]
    for part in ("[exit status 3]", "\n30000", "cut: "):
        assert part in second
    assert len(second) < 12_000
    assert output["submitted"]
    changed = apply_changes(ROMAN.tree, read_patch(output["patch"]))
    assert set(changed) == {*ROMAN.files, "added.txt"}
    assert b"3999" in changed["roman.py"].data


@pytest.mark.asyncio(loop_scope="module")
async def test_bash_wants_one_block_and_runs_no_thoughts(rooms: Sandboxes) -> None:
    two = f"{bash('touch a')}\n{bash('touch b')}"
    output, run = await attempt(rooms, "bash", two, "no block", bash("ls"), two, two, two)
    refused = [("exactly one block" in answer) for answer in answers(run)]
    assert refused == [True, True, False, True, True]
    assert "a\n" not in answers(run)[2]
    assert (output["submitted"], output["patch"]) == (False, "")
    assert run.metrics == {"format_errors": 5.0, "submitted": 0.0}
    thought = f"<think>Perhaps:\n{bash('touch a')}\n</think>{bash('ls')}"
    _, run = await attempt(rooms, "bash", thought, f"<think>{SUBMIT}", SUBMIT)
    assert answers(run)[0].split() == ["[exit", "status", "0]", "roman.py", "tests"]
    assert "exactly one block" in answers(run)[1]


@pytest.mark.asyncio(loop_scope="module")
async def test_only_what_is_handed_in_is_a_patch(rooms: Sandboxes) -> None:
    output, run = await attempt(rooms, "bash", bash("echo x > y"))
    assert len(run.asked) == run.max_turns
    assert output == {"patch": "", "submitted": False, "reason": "nothing was handed in"}
    # The word counts only as the first line.
    word = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    late = bash(f"echo; echo x; echo {word}")
    output, _ = await attempt(rooms, "bash", late, bash(f"echo {word}; exit 1"), word)
    assert not output["submitted"]
    # A repository that was destroyed, or filled, is told.
    fill = "for n in 1 2; do head -c 600000 /dev/zero | tr '\\0' x > big$n; done"
    for command, reason in (("rm -rf .git", "repository"), (fill, "")):
        output, _ = await attempt(rooms, "bash", bash(command), SUBMIT)
        assert (output["submitted"], output["patch"]) == (True, "")
        assert output["reason"] and reason in output["reason"]


@pytest.mark.asyncio(loop_scope="module")
async def test_tools_and_text(rooms: Sandboxes) -> None:
    output, run = await attempt(
        rooms,
        "tools",
        call("list_dir"),
        call("edit", path="roman.py", old='"""Roman numerals."""', new='"""Numerals."""'),
        calls(("write_file", {"path": "../out", "content": "x"})),
        call("fly"),
        call("submit"),
        call("list_dir"),
    )
    assert len(run.asked) == 5
    assert "roman.py" in answers(run)[0]
    assert [answer.startswith("Error") for answer in answers(run)] == [False, False, True, True]
    assert run.metrics == {"tool_errors": 2.0, "submitted": 1.0}
    assert '+"""Numerals."""' in output["patch"]
    # It ends with words, or too many errors.
    for script, ended in (
        ((call("list_dir"), "I am done."), (True, 2)),
        ((call("fly"),), (False, 10)),
    ):
        output, run = await attempt(rooms, "tools", *script)
        assert (output["submitted"], len(run.asked)) == ended
    write = {"tool": "write_file", "args": {"path": "a.txt", "content": "x\n"}}
    output, run = await attempt(
        rooms, "text", "THOUGHT: hm", f"TOOL_CALL: {json.dumps(write)}", "FINAL: I wrote it."
    )
    assert "+++ b/a.txt" in output["patch"]
    assert "write_file" in run.asked[0][1][0]["content"]
    output, _ = await attempt(rooms, "text", "TOOL_CALL: {")
    assert not output["submitted"]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_agent_never_sees_what_is_hidden(rooms: Sandboxes) -> None:
    """Neither in its prompt nor in its sandbox."""
    task = ROMAN.task()
    look = bash(
        "places='/work /tmp /home /root /etc /var /opt /srv';"
        "python3 -c 'import envserver_environments';"
        "find $places -name 'roman-*' 2>/dev/null;"
        "grep -rls test_[s]ubtractive $places; echo looked"
    )
    _, run = await attempt(rooms, "bash", look, SUBMIT)
    lines = answers(run)[0].splitlines()
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-2:] == ["ModuleNotFoundError: No module named 'envserver_environments'", "looked"]
    assert "test_subtractive" not in json.dumps([task.public, run.asked[0]])
    assert task.hidden["fail_to_pass"][0].endswith("test_subtractive")
