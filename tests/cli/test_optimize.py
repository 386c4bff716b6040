"""`tvmconv optimize`."""

import importlib
import sys
from types import SimpleNamespace

import pytest

from tvmconv.cli import main

MODULE = """
import torch

def tiny():
    print("making it")
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU())

def volumes():
    return torch.nn.Conv3d(3, 4, 3)

def without_weights():
    return torch.nn.Conv2d(3, 8, 3, device="meta")

def broken():
    raise RuntimeError("no weights here")
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module with models in it."""
    pytest.importorskip("torch", reason="PyTorch is missing")
    (tmp_path / "models_of_mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "models_of_mine"
    sys.modules.pop("models_of_mine", None)


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [[], ["--layout", "nhwc", "--dtype", "bf16"]])
def test_a_model_becomes_a_report_and_a_file(module, options, tmp_path, capsys):
    import torch

    import tvmconv.torch

    out = tmp_path / "out"
    command = ["optimize", f"{module}:tiny", "--input", "1x3x8x9", "--device", "opencl:0", "--all", "-o", str(out)]
    assert main([*command, *options]) == 0
    printed = capsys.readouterr()
    assert "bias,relu" in printed.out
    assert "making it" not in printed.out
    assert "bias,relu" in (out / "report.txt").read_text()
    dtype = torch.bfloat16 if options else torch.float32
    with torch.no_grad():
        assert tvmconv.torch.load(out / "model.tvmconv")(torch.zeros(1, 3, 8, 9, dtype=dtype)).shape == (1, 8, 8, 9)


def test_volumes_are_optimized_in_the_faster_layout(module, capsys):
    command = ["optimize", f"{module}:volumes", "--input", "1x3x4x5x6", "--device", "opencl:0"]
    assert main([*command, "--layout", "nhwc", "--dtype", "bf16"]) == 0
    assert "conv3d:1x3x4x5x6,4x3x3x3x3,s1,p0,bf16" in capsys.readouterr().out


def test_a_model_is_quantized_with_inputs_of_a_file(module, tmp_path, monkeypatch, capsys):
    import torch

    from tvmconv.torch.report import Report

    given = []

    def optimize_within(*arguments, quantization, **options):
        given.append(quantization)
        return SimpleNamespace(report=lambda: Report(()))

    monkeypatch.setattr(importlib.import_module("tvmconv.torch.optimize"), "optimize_within", optimize_within)
    command = ["optimize", f"{module}:tiny", "--input", "1x3x6x6", "--device", "opencl:0", "--quantize", "i8"]
    torch.save([torch.ones(2, 3, 8, 8), (torch.ones(1, 3, 6, 6),)], tmp_path / "batches.pt")
    calibrate = ["--calibrate", str(tmp_path / "batches.pt")]
    assert main([*command, "--dtype", "bf16", *calibrate, "--max-layer-error", "0.2"]) == 0
    assert main(command) == 0
    assert "calibrated with random inputs" in capsys.readouterr().err
    (first,), _ = given[0].batches
    assert (first.dtype, first.shape, given[0].dtype.text, given[0].max_error) == (
        torch.bfloat16,
        (2, 3, 8, 8),
        "i8",
        0.2,
    )
    assert [batch[0].shape for batch in given[1].batches] == [(1, 3, 6, 6)]
    torch.save(torch.ones(1), tmp_path / "tensor.pt")
    (tmp_path / "text.pt").write_text(MODULE)
    for name, error in (("tensor.pt", "not Tensor"), ("absent.pt", "No such file"), ("text.pt", "torch.save")):
        assert main([*command, "--calibrate", str(tmp_path / name)]) == 2
        assert error in capsys.readouterr().err


def test_an_unwritable_folder_is_refused_at_once(module, tmp_path, capsys):
    (tmp_path / "file").touch()
    out = str(tmp_path / "file" / "out")
    assert main(["optimize", f"{module}:broken", "--input", "1x3x8x8", "-o", out]) == 2
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["{}:without_weights", "--input", "1x3x8x8"], "without_weights on cpu: NotImplementedError"),
        (["{}:tiny", "--input", "99999x3x99999x99999", "--device", "opencl:0"], "tiny on cpu: RuntimeError"),
        (["{}:broken", "--input", "1x3x8x8"], "no weights here"),
        (["{}:absent", "--input", "1x3x8x8"], "absent"),
        (["{}:tiny", "--input", "1x4x8x8"], "does not run on the example"),
        (["{}:tiny", "--input", "x"], "x"),
        (["{}:tiny", "--input", "image=1x3x8x8"], "in order"),
        (["{}:tiny"], "--input"),
        (["{}:tiny", "--input", "1x3x8x8", "--calibrate", "f"], "for --quantize"),
        (["{}:tiny", "--input", "1x3x8x8", "--device", "sm_90"], "can only be compiled for"),
    ],
)
def test_wrong_requests_are_refused_in_one_line(module, words, error, capsys):
    assert main(["optimize", *(word.format(module) for word in words)]) == 2
    printed = capsys.readouterr().err.replace("making it\n", "")
    assert error in printed
    assert printed.count("\n") == 1


def test_without_pytorch_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith("tvmconv.torch")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["optimize", "a:b", "--input", "1x3x8x8"]) == 2
    assert 'pip install "torch"' in capsys.readouterr().err
