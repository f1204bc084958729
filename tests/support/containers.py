"""The container engine of this machine, for the tests of containers."""

from __future__ import annotations

import os

import pytest

from envserver.sandbox import find_engine


def image_of_real_engine() -> str:
    """Returns an image with Python that a running Docker or Podman has.

    Skips the test where no engine runs, or it does not have the image.
    ENVSERVER_TEST_IMAGE names another image than the default, python:3.12.
    """
    image = os.environ.get("ENVSERVER_TEST_IMAGE", "python:3.12")
    try:
        find_engine(image)
    except OSError as error:
        pytest.skip(f"no container engine ({error}); tests/README.md says how to start one")
    return image
