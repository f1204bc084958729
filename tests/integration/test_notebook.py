"""The notebook of the documentation runs, in a real kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from support.waiting import PATIENCE

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"


@pytest.mark.thorough
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=PATIENCE, resources=resources).execute()
    shown = [_text(output) for cell in notebook.cells for output in cell.get("outputs", ())]
    assert "'exact'" in shown
    assert any(text.startswith("(6, ") for text in shown)
    assert any("tea" in text for text in shown)


def _text(output: Any) -> str:
    return str(output.get("data", {}).get("text/plain", output.get("text", "")))
