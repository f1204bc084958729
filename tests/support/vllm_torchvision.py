"""Makes torchvision's wheel importable beside a torch without CUDA. Runs in .venv-vllm.

The wheel is a build for CUDA: it registers shapes for operators that this torch lacks, which ends
the import. vLLM and the processors of vision-language models use none of these operators.
"""

from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    found = find_spec("torchvision")
    assert found is not None and found.origin is not None, "torchvision is not installed"
    Path(found.origin).with_name("_meta_registrations.py").write_text("")


if __name__ == "__main__":
    main()
