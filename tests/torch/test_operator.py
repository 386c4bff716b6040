"""The operator: what PyTorch asks of one, and under `torch.compile`, as a file, on tensors that do not fit."""

import copy
import json
import threading
import zipfile

import pytest
import torch
from small_models import X

import tvmconv.torch
from tvmconv.errors import DeviceError, Error, ModelError
from tvmconv.torch import archive
from tvmconv.torch.layer import TunedConv
from tvmconv.torch.operator import conv

TEXT = "conv2d:2x8x9x11,8x8x3x3,s1,p1,bias,add,relu"


def kernel(model):
    """The name of the kernel of the block's second convolution."""
    layers = [module for module in model.graph.modules() if isinstance(module, TunedConv)]
    return next(name for layer in layers for name in layer.kernels.values() if name.startswith(TEXT))


def arguments(name, **other):
    """Of the block's second convolution, from random tensors."""
    torch.manual_seed(1)
    x, add = torch.randn(2, 8, 9, 11), torch.randn(2, 8, 9, 11)
    given = {"x": x, "weight": torch.randn(8, 8, 3, 3), "bias": torch.randn(8), "add": add, "workload": name}
    return (*{**given, **other}.values(),)


def expected(x, weight, bias, add, _):
    return torch.relu(torch.nn.functional.conv2d(x, weight, bias, padding=1) + add)


@pytest.mark.parametrize("lie", [lambda t: t, lambda t: t.transpose(2, 3).contiguous().transpose(2, 3)])
def test_it_is_an_operator_as_pytorch_wants_it(made, lie):
    given = arguments(kernel(made), x=lie(torch.randn(2, 8, 9, 11)))
    assert torch.allclose(conv(*given), expected(*given), atol=1e-4)
    assert set(torch.library.opcheck(conv, given).values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("other", "error"),
    [
        ({"x": torch.randn(1, 8, 9, 11)}, r"does not take x \(1, 8, 9, 11\)"),
        ({"x": torch.randn(2, 8, 9, 11).double()}, "float64"),
        ({"bias": None}, "does not take"),
        ({"bias": torch.randn(8).half()}, "float16"),
        ({"workload": "conv2d:2x8x9x11,8x8x3x3,s1,p1"}, "no kernel for"),
        ({"workload": "filter1d:100,5"}, "no kernel for"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(made, other, error):
    with pytest.raises(Error, match=error):
        conv(*arguments(kernel(made), **other))


def test_threads_do_not_disturb_each_other(made):
    given, wrong = arguments(kernel(made)), []

    def run(seed):
        own = (torch.randn(2, 8, 9, 11, generator=torch.Generator().manual_seed(seed)), *given[1:])
        wrong.extend(1 for _ in range(5) if not torch.allclose(conv(*own), expected(*own), atol=1e-4))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_it_compiles_whole_and_sees_weights_that_change(made, block):
    model, other = copy.deepcopy(made), copy.deepcopy(block)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.allclose(compiled(X), other(X), atol=1e-4)
        for each in (model, other):
            each.conv1.weight.mul_(2)
            each.bn2.running_mean.add_(1)
        assert torch.allclose(compiled(X), other(X), atol=1e-4)
        assert torch.allclose(compiled(X[:1]), other(X[:1]), atol=1e-4)


def test_a_model_is_saved_and_loaded(made, block, tmp_path):
    file = tmp_path / "block.tvmconv"
    made.save(file)
    loaded = tvmconv.torch.load(file)
    with torch.no_grad():
        assert torch.allclose(loaded(X), block(X), atol=1e-4)
    with pytest.raises(Error, match="cannot write"):
        made.save(tmp_path / "no" / "file")


def test_a_model_is_saved_with_the_weights_that_it_has(made, tmp_path):
    model, file = copy.deepcopy(made), tmp_path / "block.tvmconv"
    model.load_state_dict({name: value * 2 for name, value in made.state_dict().items()})
    model.save(file)
    loaded = tvmconv.torch.load(file)
    with torch.no_grad():
        assert torch.allclose(loaded(X), model(X), rtol=1e-4, atol=1e-4)


def test_files_that_are_none_and_of_other_devices_are_refused(made, tmp_path, monkeypatch):
    file = tmp_path / "block.tvmconv"
    file.write_bytes(b"PK")
    with pytest.raises(ModelError, match="cannot read"):
        tvmconv.torch.load(file)
    made.save(file)
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(ModelError, match="cannot read"):
        tvmconv.torch.load(file)
    made.save(file)
    with zipfile.ZipFile(file) as saved:
        head = json.loads(saved.read(archive.HEADER_FILE))
        contents = {name: saved.read(name) for name in saved.namelist()}
    head["kernels"][0]["program"] = "{}"
    for name, content in ((archive.HEADER_FILE, json.dumps(head).encode()), (archive.MODEL_FILE, b"")):
        with zipfile.ZipFile(tmp_path / "other.tvmconv", "w") as other:
            for each, there in {**contents, name: content}.items():
                other.writestr(each, there)
        with pytest.raises(ModelError, match="cannot read"):
            tvmconv.torch.load(tmp_path / "other.tvmconv")
    data = bytearray(file.read_bytes())
    data[data.index(archive.HEADER_FILE.encode()) + len(archive.HEADER_FILE)] ^= 0xFF  # of what is compressed
    file.write_bytes(data)
    with pytest.raises(ModelError, match="cannot read"):
        tvmconv.torch.load(file)
    made.save(file)
    with pytest.raises(DeviceError, match="rebuild=True"):
        tvmconv.torch.load(file, device="sm_90")
    monkeypatch.setattr(archive, "READABLE_VERSIONS", (3,))
    with pytest.raises(ModelError, match="save the model again"):
        tvmconv.torch.load(file)
