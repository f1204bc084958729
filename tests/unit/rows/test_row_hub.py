"""Rows of a data set on the hub: the real library `datasets` reads a hub on this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.hub import DataSetHub, serving

CARD = b"""---
configs:
- config_name: hard
  data_files: [{split: test, path: hard/test-*}]
- config_name: easy
  data_files: [{split: train, path: easy.jsonl}]
---
"""
FILES = {
    "README.md": CARD,
    "hard/test-00000-of-00002.jsonl": b'{"question": "1 + 1", "answer": "2"}\n',
    "hard/test-00001-of-00002.jsonl": b'{"question": "1 + 2", "answer": "3"}\n',
    "easy.jsonl": b'{"question": "1 + 0", "answer": "1"}\n',
}
PROGRAM = """
import sys
from envserver import ConfigError
from envserver.rows.sources import Source

for name, split in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        rows = Source(f"hub:acme/sums{name}").open(split)
        print([rows.read(number)["answer"] for number in range(rows.count)])
    except ConfigError as error:
        print(error)
"""


@pytest.mark.thorough  # imports `datasets`
def test_configurations_shards_and_revisions_of_the_hub(tmp_path: Path) -> None:
    asked = ("/hard@v1", "test", "/easy", "train", "/hard", "train", "/none", "test")
    with serving(DataSetHub(FILES)) as hub:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *asked],
            env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        revisions = {path.split("/resolve/")[1].split("/")[0] for path in hub.asked}
    hard, easy, no_split, no_configuration = done.stdout.splitlines()
    assert hard == "['2', '3']" and easy == "['1']"
    assert "Should be one of ['test']" in no_split
    assert "Available: ['hard', 'easy']" in no_configuration
    assert {"v1", "main"} <= revisions
