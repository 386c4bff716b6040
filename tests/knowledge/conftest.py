import pytest
from learnt import knowledge

from tvmconv.cost_model import model


@pytest.fixture
def in_use(monkeypatch):
    """The made-up model is what predictions are made by."""
    monkeypatch.setattr(model, "_active_models", [])
    model.set_cost_model(knowledge())
