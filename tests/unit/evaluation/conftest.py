"""Evaluations with the simulated engine, in the folder of a test."""

import pytest
from support.in_process import Run, Said
from support.in_process import run as run

SIM = "--model sim --sim.latency_seconds 0 --workers.processes 1 --workers.heartbeat_seconds 60"
"""A worker of a busy machine may be silent for longer than users want to wait."""


@pytest.fixture
def evaluate(run: Run) -> Run:
    """Evaluates by the flags of a line."""

    def command(line: str, status: int = 0) -> Said:
        return run(f"evaluate {SIM} {line}", status)

    return command
