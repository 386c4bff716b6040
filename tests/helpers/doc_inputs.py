"""Files that the blocks of README and docs read: a model, a log, a suite."""

import json
import re
from pathlib import Path

from doc_blocks import ROOT, Block

READ = {  # what a block reads: the name that it has there, and the pattern of a command that reads it
    "model.onnx": r"--from model\.onnx",
    "mine.json": r"suites mine\.json",
    "model.json": r"--suite model\.json",
    "search.jsonl": r"--log search\.jsonl",
    "my.jsonl": r"(train|simulate) my\.jsonl|plot my\.jsonl",
    "old.log": r"old\.log",
    "results": r"results/counters\.json",
}


def make(block: Block, folder: Path) -> None:
    """Make what a block reads and no block before it has written."""
    for name, pattern in READ.items():
        if re.search(pattern, block.text) and not (folder / name).exists():
            MAKERS[name](folder / name)


def make_model(path: Path) -> None:
    """Write a network of two convolutions, in ONNX."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper, save

    weights = [np.zeros((16, 3, 3, 3), np.float32), np.zeros((16, 16, 3, 3), np.float32)]
    nodes = [
        helper.make_node("Conv", ["x", "k0"], ["a"], name="conv1", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "k1"], ["y"], name="conv2", pads=[1, 1, 1, 1]),
    ]
    graph = helper.make_graph(
        nodes,
        "two",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, "height", "width"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(weight, f"k{number}") for number, weight in enumerate(weights)],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)


def make_suite(path: Path) -> None:
    """Write a suite of one layer."""
    layers = [{"name": "conv1", "text": "conv2d:1x16x28x28,16x16x3x3,s1,p1", "count": 2}]
    path.write_text(json.dumps(layers), encoding="utf-8")


def make_log(path: Path) -> None:
    """Copy a shipped log of ResNet-50's layers."""
    path.write_bytes((ROOT / "tuning_logs/nvidia-h200/resnet50/resnet50.jsonl").read_bytes())


def make_autotvm_log(path: Path) -> None:
    """Write a record of AutoTVM's."""
    path.write_bytes((ROOT / "tests/data/tophub-cuda.jsonl").read_bytes())


MAKERS = {
    "model.onnx": make_model,
    "mine.json": make_suite,
    "model.json": make_suite,
    "search.jsonl": make_log,
    "my.jsonl": make_log,
    "old.log": make_autotvm_log,
    "results": lambda path: None,
}


def path_of(text: str) -> Path:
    """The path in the first line of a file."""
    return Path(text.partition("\n")[0].removeprefix("# ").removeprefix("%%writefile "))


def write(folder: Path, text: str) -> None:
    """Write a block's file, and what an installation would make of a project's entry points."""
    path = folder / path_of(text)
    assert not path.exists(), f"{path.name} is there already"
    path.write_text(text.removeprefix(f"%%writefile {path.name}\n"), encoding="utf-8")
    if path.name == "pyproject.toml":
        _install(folder, text)


def _install(folder: Path, project: str) -> None:
    name = re.search(r'^name = "(.*)"$', project, re.MULTILINE)
    entries = re.search(r'^\[project\.entry-points\."(.*)"\]\n((?:.+\n)+)', project, re.MULTILINE)
    assert name
    assert entries
    info = folder / f"{name[1].replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    text = f"[{entries[1]}]\n" + entries[2].replace('"', "")
    (info / "entry_points.txt").write_text(text, encoding="utf-8")
