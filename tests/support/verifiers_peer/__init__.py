"""Packages of verifiers' two generations, and homes in which `envserver` finds them installed."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from envserver.registry.installed import Installed, write_record
from envserver.running.installing import describe, make_venv

PACKAGES = Path(__file__).parent


def install(python: Path, backend: str, names: Sequence[str], home: Path) -> None:
    """Installs environments of `PACKAGES/backend` as `envserver env install` does, without pip.

    Args:
        python: of the virtual environment that `make verifiers-peer` made; the one that is made
            here uses its libraries.
        home: XDG_DATA_HOME.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_DATA_HOME", str(home))
        place = home / "envserver" / "environments" / f"verifiers-{backend}"
        place.mkdir(parents=True)
        own = make_venv(place)
        (site,) = (Path(each) for each in own.own_path if each.endswith("site-packages"))
        ask = "import sysconfig as s, verifiers as v; print(s.get_path('purelib'), v.__version__)"
        libraries, version = subprocess.check_output([python, "-c", ask], text=True).split()
        added = [libraries, str(PACKAGES / backend)]
        (site / "peer.pth").write_text("\n".join(added))
        own = msgspec.structs.replace(own, own_path=[*own.own_path, *added])
        references = [f"verifiers:{name}" for name in names]
        described = describe(references, own.executable, own.search_path, place, "cannot be used")
        write_record(
            Installed(
                package=f"verifiers-{backend}",
                version=version,
                source=references[0],
                environments=described,
                interpreter=own,
            )
        )


def refusal(python: Path, backend: str, name: str, home: Path) -> str:
    """Returns what is said when an environment that cannot be used is loaded."""
    code = (
        "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
        "from envserver.registry import find; find(sys.argv[2])()"
    )
    record = home / "envserver" / "environments" / f"verifiers-{backend}" / "installed.json"
    one = msgspec.convert(json.loads(record.read_text()), Installed)
    assert one.interpreter is not None
    words = [one.interpreter.executable, "-P", "-c", code]
    words += [json.dumps(one.interpreter.search_path), f"verifiers:{name}"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    return " ".join(ended.stderr.split())
