"""docs/models.md says of every model type what the connector does with it."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
model_walk = pytest.importorskip("support.model_walk")

pytestmark = [pytest.mark.models, pytest.mark.slow]

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "models.md"


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_the_document_is_what_is_found(segment_name: str) -> None:
    text = DOCUMENT.read_text()
    if f"transformers {transformers.__version__} " not in text:
        pytest.skip("the document is of another release of transformers")
    assert model_walk.document(segment_name) == text, "run: python tests/support/model_walk.py"


def test_a_wrong_model_would_be_noticed(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model type whose mask is not that of its cache, if it were accepted."""
    monkeypatch.setattr("lightcache.connectors.model_pages._UNMASKED", ())
    assert model_walk.verdict("moshi", segment_name).result.startswith("wrong")
