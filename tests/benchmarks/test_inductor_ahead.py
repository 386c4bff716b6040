"""Graphs that Inductor compiles before they wait for the GPU."""

import fcntl

import pytest

from tvmconv.benchmarks.inductor_ahead import make_waiting_backend


def is_held(lock):
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_graphs_are_compiled_before_they_hold_the_gpu(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    lock, held = tmp_path / "gpu.lock", []

    def compile_fx(gm, inputs):
        held.append(is_held(lock))
        return lambda *arguments: held.append(is_held(lock)) or gm(*arguments)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    layer, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    with make_waiting_backend(lock) as (backend, waiting):
        compiled = torch.compile(layer, backend=backend)
        assert torch.equal(compiled(x), layer(x))
        compiled(x)
    assert held == [False, True, True]
    assert not is_held(lock)
    assert 0 < waiting.seconds < 1
    compiled(x)
    assert held[-1] is False
