import pytest
from farm import Tracker


@pytest.fixture(scope="session")
def tracker():
    """A tracker of TVM's RPC, on which each test has workers of its own."""
    pytest.importorskip("tornado", reason="TVM's RPC tracker needs tornado and cloudpickle")
    tracker = Tracker()
    yield tracker
    tracker.close()


@pytest.fixture(autouse=True)
def late_fork_server():
    """The fork server starts ahead of time."""
