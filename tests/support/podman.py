"""A real Podman for tests, with storage and images of its own."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .docker_setup import BASE

_IMAGE = "localhost/envserver-test-base:latest"
_STORAGE = (
    '[storage]\ndriver = "{driver}"\nrunroot = "{folder}/run"\ngraphroot = "{folder}/graph"\n'
)
_CONTAINERS = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
{runtime}
"""


@dataclass(frozen=True)
class Podman:
    """A Podman that runs containers.

    Args:
        variables: environment variables with which its command, and only that, is found.
        refused: why it runs no containers here; "" if it does.
    """

    variables: dict[str, str]
    image: str = _IMAGE
    refused: str = ""

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, **self.variables}
        return subprocess.run(
            ["podman", *words], env=environ, capture_output=True, text=True, check=False
        )


@contextlib.contextmanager
def podman(folder: Path) -> Iterator[Podman]:
    """A Podman whose data lies in `folder`, with the base image of the tests."""
    (folder / "storage.conf").write_text(_STORAGE.format(driver="overlay", folder=folder))
    # Debian's default runtime does not know machines with both versions of cgroups.
    runtime = 'runtime = "runc"' if shutil.which("runc") else ""
    (folder / "containers.conf").write_text(_CONTAINERS.format(runtime=runtime))
    variables = {
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        "CONTAINERS_CONF": str(folder / "containers.conf"),
        "DOCKER_HOST": f"unix://{folder}/no-docker",
    }
    made = Podman(variables)
    with subprocess.Popen(["zstd", "-dcq", str(BASE)], stdout=subprocess.PIPE) as base:
        done = subprocess.run(
            ["podman", "import", "-", _IMAGE],
            env={**os.environ, **variables},
            stdin=base.stdout,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode == 0:
        done = made.run("run", "--rm", "--network", "none", _IMAGE, "python3", "-c", "")
    try:
        yield Podman(variables, refused=done.stderr.strip() if done.returncode else "")
    finally:
        made.run("rm", "--all", "--force")
        made.run("rmi", "--all", "--force")
