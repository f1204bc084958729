"""The generation of verifiers that a package needs is found without importing it."""

from __future__ import annotations

from pathlib import Path

import pytest
from envserver_integrations.verifiers.backends import CLASSIC, V1, backend_of, is_classic
from support.env_packages import wheel

CODE = {"classic": "def load_environment(n=1):\n    return n\n", "v1": "__all__ = ['Sums']\n"}


@pytest.mark.parametrize("generation", ["classic", "v1"])
def test_a_folder_or_a_wheel_says_it(tmp_path: Path, generation: str) -> None:
    expected = {"classic": CLASSIC, "v1": V1}[generation]
    folder = tmp_path / "project"
    (folder / "build").mkdir(parents=True)
    (folder / "sums.py").write_text(CODE[generation])
    (folder / "build" / "old.py").write_text(CODE["classic"])  # what was built before says nothing
    assert backend_of("sums", [str(folder)]) is expected
    built = wheel(tmp_path, "sums", {"sums.py": CODE[generation]})
    assert backend_of("sums", [str(built)]) is expected


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        ([], V1),
        (["gsm8k", "verifiers<0.4"], CLASSIC),
        (["gsm8k", "verifiers>=0.4"], V1),
        (["gsm8k"], V1),
        (["git+https://example.com/sums.git", "verifiers==0.3.1"], CLASSIC),
    ],
)
def test_a_requirement_decides(packages: list[str], expected: object) -> None:
    assert backend_of("sums", packages) is expected


def test_the_version_that_is_installed_says_which_class_plays() -> None:
    assert [is_classic(one) for one in ("0.1.9", "0.3.1", "0.4.0", "1.0.0")] == [
        *(True, True),
        *(False, False),
    ]
