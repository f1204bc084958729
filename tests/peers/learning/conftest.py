"""A tiny random model for all; and what trackio keeps goes where nobody looks for it later."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

# It reads this when it is imported, and others import it, too.
os.environ["TRACKIO_DIR"] = tempfile.mkdtemp(prefix="trackio-")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of text; no test changes it."""
    from support.tiny_model import main

    folder = tmp_path_factory.mktemp("model") / "base"
    main(folder)
    return folder
