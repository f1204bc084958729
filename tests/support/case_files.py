"""Tables of cases that lie as JSON beside the tests that go through them."""

import json
from pathlib import Path
from typing import Any


def cases(test_file: str, name: str) -> Any:
    """The table in the file `name` beside a test (its `__file__`)."""
    return json.loads(Path(test_file).with_name(name).read_text(encoding="utf-8"))
