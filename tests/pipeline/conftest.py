"""One tiny saved model for all tests here."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_saved import save_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a looped model with a gate, 3 loops of 2 layers."""
    return save_model(tmp_path_factory.mktemp("models") / "tiny-looped")
