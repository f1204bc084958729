"""The public names of the packages beside `envserver` can be imported."""

from __future__ import annotations

import subprocess
import sys

import envserver_environments
import envserver_factory
import envserver_tools
import pytest


@pytest.mark.parametrize("package", [envserver_environments, envserver_tools, envserver_factory])
def test_every_public_name_is_there_and_no_other(package: object) -> None:
    for name in package.__all__:  # type: ignore[attr-defined]
        assert getattr(package, name).__doc__ or isinstance(getattr(package, name), tuple | str)
    with pytest.raises(AttributeError, match="no attribute 'Missing'"):
        _ = package.Missing  # type: ignore[attr-defined]


def test_the_packages_import_nothing_heavy() -> None:
    code = "import sys, envserver_environments, envserver_tools; print('envserver' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
