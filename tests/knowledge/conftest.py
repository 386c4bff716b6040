import pytest
from learnt import knowledge

from tvmconv.knowledge import model


@pytest.fixture
def in_use(monkeypatch):
    """The made-up model is what predictions are made by."""
    monkeypatch.setattr(model, "_in_use", model._InUse())
    model.use(knowledge())
