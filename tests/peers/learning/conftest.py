"""A tiny random model for all."""

from pathlib import Path

import pytest


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
