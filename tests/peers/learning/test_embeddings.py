"""Embeddings of steps, by the real sentence-transformers with a model that is made here."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from envserver_factory.exporting.formats import Embedder, embed_steps
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

WORDS = ("[UNK]", "read", "the", "file", "done", "wrong")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight random numbers for each of a few words."""
    library = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    tokenizer = Tokenizer(WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("embedder")
    embedding = modules.StaticEmbedding(tokenizer, embedding_dim=8)
    library.SentenceTransformer(modules=[embedding]).save(str(folder))
    return folder


def trace(*texts: str) -> dict[str, Any]:
    return {"steps": [{"i": i, "type": "thought", "text": text} for i, text in enumerate(texts)]}


def test_each_step_gets_what_the_model_says_of_its_text(model: Path, tmp_path: Path) -> None:
    embedder = Embedder(str(model), cache=tmp_path, batch=2)
    given = trace("read the file", "done", "read the file", "  ")
    done = embed_steps(given, embedder)
    steps = done["steps"]
    from sentence_transformers import SentenceTransformer

    wanted = SentenceTransformer(str(model)).encode(["read the file", "done"])
    np.testing.assert_allclose([one["embedding"] for one in steps[:2]], wanted, rtol=1e-5)
    assert steps[2]["embedding"] == steps[0]["embedding"]
    assert "embedding" not in steps[3]
    assert done["metadata"]["embedder_id"] == str(model)
    assert embedder.computed == 2
    assert "embedding" not in given["steps"][0]


def test_nothing_is_computed_twice_and_a_torn_file_is_remade(model: Path, tmp_path: Path) -> None:
    first = embed_steps(trace("read", "wrong"), Embedder(str(model), cache=tmp_path))
    again = Embedder(str(model), cache=tmp_path)
    turned = embed_steps(trace("wrong", "read"), again)
    assert turned["steps"][1]["embedding"] == first["steps"][0]["embedding"]
    assert again.computed == 0
    torn, _ = sorted(tmp_path.rglob("*.npy"))
    torn.write_bytes(torn.read_bytes()[:40])
    mended = Embedder(str(model), cache=tmp_path)
    assert embed_steps(trace("read", "wrong"), mended) == first
    assert mended.computed == 1
