"""Files and answers with one thing wrong end in a result or in one line: no traceback, no hang, nothing lost.

By default some 150 cases are tried, some of each kind. `TVMCONV_FUZZ=2000 pytest tests/robustness` tries so many, and
`TVMCONV_FUZZ_SEED` chooses others.
"""

import contextlib
import gzip
import io
import json
import os
import random
import resource
import signal
import warnings
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from instant import made_up
from learnt import NEW, knowledge
from mutations import mutated_bytes, mutated_gzip, mutated_json, mutated_lines, mutated_text, mutated_zip

import tvmconv as tc
from tvmconv import cli, files, registry
from tvmconv import training as train
from tvmconv.arithmetic import ceil_div
from tvmconv.checksummed_file import read_checked, write_checked
from tvmconv.compiler.executable import ArrayType, CompiledKernel, Executable, LaunchConfig
from tvmconv.cost_model.model import CostModel
from tvmconv.cost_model.predict import predict
from tvmconv.devices import rpc
from tvmconv.errors import FallbackWarning
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import Log, read_records
from tvmconv.measure import kernel_archive, kernel_cache, serialization
from tvmconv.measure.results import ErrorKind, RunnerResult

SHIPPED = Path(__file__).parents[2] / "tuning_logs"
CASES = int(os.environ.get("TVMCONV_FUZZ", "150"))
SEED = os.environ.get("TVMCONV_FUZZ_SEED", "0")
SECONDS, MEGABYTES = 20, 700  # of one case, at most
SMALL = "conv2d:1x4x8x8,4x4x1x1,s1,p0"


class Hang(BaseException):
    """A case that takes too long; no `except` of the code under test takes it."""


@contextlib.contextmanager
def limited():
    """End a block that hangs; fail one that takes much memory, or that warns on the terminal."""

    def stop(*_):
        raise Hang

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    others = [
        str(each.message) for each in warned if not issubclass(each.category, (FallbackWarning, DeprecationWarning))
    ]
    assert not others, others
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEGABYTES << 10, "it takes much memory"


def command(*words, good=(0, 2)):
    """Something that runs a command line of a file, FILE in its words, and checks how it ends."""

    def run(file):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), limited():
            status = cli.main([word.replace("FILE", str(file)) for word in words])
        told, lines = out.getvalue() + err.getvalue(), err.getvalue().splitlines()
        assert status in good, (status, told)
        assert "Traceback" not in told
        assert status != 2 or (lines and lines[-1].startswith("tvmconv: ")), lines
        assert all(len(line) < 2000 for line in lines), lines
        assert all(line.isprintable() for line in told.splitlines()), told

    run.__name__ = " ".join(words[:2])
    return run


def call(function):
    """Something that calls a function with a file or with bytes, which may raise `tvmconv.Error` alone."""

    def run(argument):
        with limited(), contextlib.redirect_stderr(io.StringIO()):
            message = ""
            try:
                function(argument)
            except tc.Error as error:
                message = str(error)
            assert len(message.splitlines()) <= 1, message
            assert len(message) < 2000, message

    run.__name__ = getattr(function, "__name__", "call")
    return run


@pytest.fixture
def fuzz(tmp_path):
    """Try the cases of a kind, which its name draws; fail with all that failed."""

    def try_cases(kind, data, mutate, readers, suffix="", check=None):
        failures = []
        for number in range(ceil_div(CASES, KINDS)):
            draw = random.Random(f"{SEED} {kind} {number}")
            bad, what = mutate(data, draw)
            run = draw.choice(readers)
            file = tmp_path / f"{number}{suffix}"
            file.write_bytes(bad)
            try:
                run(file)
                assert file.read_bytes().startswith(bad), "the file has changed"
                if check:
                    check(file, bad)
            except (Exception, Hang) as error:
                failures.append(f"{kind} {number}, {what}, {run.__name__}: {type(error).__name__}: {str(error)[:600]}")
            file.unlink()
        assert not failures, "\n".join(failures)

    return try_cases


def log_lines():
    """Records of two workloads, trials and last timings, in device terms of this host."""
    records = []
    for place, text in enumerate((SMALL, "conv2d:1x4x6x6,4x4x1x1,s1,p0")):
        w = tc.parse(text)
        found = registry.find_schedule(w, "tiling").space(w)
        for number, point in enumerate(found.sample_legal(6, np.random.default_rng(place))):
            config = found.config_from_point(point)
            records.append(made_up(w, "tiling", config, "NVIDIA H200", elapsed=number + 0.5, timestamp=1e9 + number))
        records.append(made_up(w, "tiling", config, "NVIDIA H200", final=True, elapsed=9.0, timestamp=2e9))
    failed = made_up(
        tc.parse(SMALL), "default", {}, "NVIDIA H200", times=(), error=ErrorKind.RUNTIME, message="it fails"
    )
    return "".join(f"{record.line()}\n" for record in [*records, failed]).encode()


def nothing_lost(good, file, bad):
    """Whether the records of the lines that are as they were are read."""
    whole = [line for line in bad.split(b"\n") if line in good.split(b"\n") and line]
    lines = [record.line().encode() for record in read_records(file, InvalidLines())]
    assert all(lines.count(line) >= whole.count(line) for line in whole), "records are lost"


def test_logs(fuzz, tmp_path):
    data, out = log_lines(), str(tmp_path / "out")
    commands = [
        command("log", "best", "FILE"),
        command("log", "best", "FILE", "--json", "--top", "3"),
        command("log", "stats", "FILE"),
        command("log", "stats", "FILE", "--json"),
        command("log", "merge", "FILE", "-o", f"{out}.jsonl"),
        command("log", "import", "FILE", "-o", f"{out}.jsonl"),
        command("plot", "FILE", "-o", f"{out}.svg"),
        command("plot", "FILE", "--workload", SMALL, "-o", f"{out}.svg"),
        command("simulate", "FILE", "--min-configs", "3", "--trials", "4", "--seeds", "1", "--tuner", "random"),
        call(lambda file: list(Log(file).new_records())),
    ]
    fuzz("logs", data, mutated_lines, commands, ".jsonl", partial(nothing_lost, data))


def test_search_goes_on_with_a_damaged_log(fuzz, instant):
    data = log_lines().replace(b"NVIDIA H200", b"cpu")
    words = ["tune", SMALL, "--schedule=tiling", "--tuner=random", "--device=opencl:0", "--trials=3", "--log=FILE"]
    tune = command(*words, good=(0, 1, 2))
    fuzz("tune", data, mutated_lines, [tune], ".jsonl", partial(nothing_lost, data))


def test_compressed_logs(fuzz):
    mutate = partial(mutated_gzip, inner=mutated_lines)
    readers = [call(lambda file: list(train.read_valid_records(file)))]
    fuzz("logs.gz", gzip.compress(log_lines()), mutate, readers, ".jsonl.gz")


def shipped(name, rows, count):
    """A JSON file of the package with some of its rows."""
    whole = json.loads(files.read_bytes(SHIPPED / "nvidia-h200" / name, unpack=True))
    return {**whole, rows: whole[rows][:count]}


CONFIGS = [{"x": x, "tile": tile, "way": way} for x in (1, 2, 4) for tile in (8, 16) for way in ("a", "b")]
KERNEL_TUNER = {
    "device_name": "GPU",
    "tune_params_keys": ["x", "tile", "way"],
    "cache": {str(n): {**config, "time": 1.0 + n} for n, config in enumerate(CONFIGS)},
}
T4_FIELDS = {"invalidity": "correct", "measurements": [{"name": "time", "value": 1.0, "unit": "ms"}]}
LAYERS = [{"name": f"conv{n}", "text": f"conv2d:1x{8 * n}x14x14,8x{8 * n}x3x3,s1,p1", "count": n} for n in (1, 2, 3)]
SIMULATE = ("simulate", "FILE", "--trials", "4", "--seeds", "1", "--tuner", "random", "--tuner", "xgb")
JSON_FILES = {
    "sweeps": (
        lambda: shipped("d2l/d2l-tuned.json", "layers", 2),
        [("plot", "FILE", "-o", "OUT.svg"), ("plot", "FILE", "FILE", "-o", "OUT.png")],
    ),
    "counters": (
        lambda: shipped("experiments/kernels-beside.json.gz", "kernels", 3),
        [("counters", "--from", "FILE"), ("counters", "--from", "FILE", "-o", "OUT")],
    ),
    "suites": (lambda: LAYERS, [("suites", "FILE"), ("suites", "FILE", "--batch", "4", "--dtype", "f16")]),
    "kernel tuner": (lambda: KERNEL_TUNER, [SIMULATE]),
    "t4.gz": (lambda: {"results": [{"configuration": config, **T4_FIELDS} for config in CONFIGS]}, [SIMULATE]),
}


@pytest.mark.parametrize("kind", JSON_FILES)
def test_json_files(fuzz, tmp_path, kind):
    make, lines = JSON_FILES[kind]
    commands = [command(*(word.replace("OUT", str(tmp_path / "out")) for word in words)) for words in lines]
    data = json.dumps(make()).encode()
    if kind.endswith(".gz"):
        fuzz(kind, gzip.compress(data), partial(mutated_gzip, inner=mutated_text), commands, ".json.gz")
    else:
        fuzz(kind, data, mutated_text, commands, ".json")


def test_onnx_models(fuzz, tmp_path):
    onnx = pytest.importorskip("onnx")
    helper, proto = onnx.helper, onnx.TensorProto
    weights = [helper.make_tensor(f"k{n}", proto.FLOAT, (8, 8, 3, 3), np.zeros(576, np.float32)) for n in (1, 2)]
    nodes = [
        helper.make_node("Conv", ["x", "k1"], ["a"], name="first", pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "k2"], ["y"], name="second", auto_pad="SAME_UPPER"),
    ]
    given = helper.make_tensor_value_info("x", proto.FLOAT, ["N", 8, 16, 16])
    gives = helper.make_tensor_value_info("y", proto.FLOAT, None)
    data = helper.make_model(helper.make_graph(nodes, "g", [given], [gives], weights)).SerializeToString()
    commands = [
        command("suites", "--from", "FILE", "--input", "1x8x16x16"),
        command("suites", "--from", "FILE", "-o", str(tmp_path / "out.json")),
    ]
    fuzz("onnx", data, mutated_bytes, commands, ".onnx")


def mutated_knowledge(data, draw):
    """A model of which an array is mutated, or a value of the JSON in it."""
    if draw.random() < 0.5:
        return mutated_zip(data, draw, ())
    with np.load(io.BytesIO(data)) as archive:
        arrays = dict(archive)
    text, what = mutated_json(arrays["head"].tobytes().decode(), draw)
    arrays["head"] = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
    packed = io.BytesIO()
    np.savez_compressed(packed, allow_pickle=False, **arrays)
    return packed.getvalue(), f"head: {what}"


def test_models_of_what_was_learnt(fuzz, tmp_path):
    knowledge().save(tmp_path / "good.npz")
    space = registry.find_schedule(NEW, "direct").space(NEW)

    def predicts(file):
        with np.errstate(all="ignore"):
            predict(NEW, {"direct": space}, CostModel.load(file), 2)

    fuzz("knowledge", (tmp_path / "good.npz").read_bytes(), mutated_knowledge, [call(predicts)], ".npz")


def program():
    """A program of a convolution that does nothing."""
    w = tc.parse(SMALL)
    arrays = tuple(ArrayType(*each) for each in zip(w.argument_shapes, w.argument_dtypes, strict=True))
    code = b"__kernel void k(__global float *x, __global float *w, __global float *y) { y[0] = x[0] * w[0]; }"
    step = CompiledKernel(code, "k", LaunchConfig((1, 1, 1), (1, 1, 1)), (0, 1, 2), 0)
    return Executable((step,), arrays)


def test_kept_kernels(fuzz, tmp_path, monkeypatch, opencl):
    monkeypatch.setenv(kernel_cache.CACHE_VARIABLE, str(tmp_path / "kept"))
    w = tc.parse(SMALL)
    schedule = registry.find_schedule(w, "default")
    kernel_cache.store(w, schedule, {}, opencl, program())
    (place,) = (tmp_path / "kept").iterdir()
    good = read_checked(place)

    def find(file):
        write_checked(place, file.read_bytes())  # the checksum is right, and what it is of is not
        found = kernel_cache.lookup(w, "default", {}, opencl)
        assert found is None or isinstance(found, Executable)

    def mutate(data, draw):
        header, newline, code = data.partition(b"\n")
        if draw.random() < 0.5:
            return mutated_bytes(data, draw)
        head, what = mutated_text(header, draw)
        return head + newline + code, what

    fuzz("kept", good, mutate, [call(find)], "")


def test_archives_of_programs(fuzz, tmp_path):
    kernel_archive.save_kernels(tmp_path / "good.zip", [({"workload": SMALL, "steps": []}, program())] * 2)
    data = (tmp_path / "good.zip").read_bytes()
    load = call(lambda file: list(kernel_archive.load_kernels(file)))
    fuzz("programs", data, partial(mutated_zip, text_names=("0.json", "1.json")), [load], ".zip")


def test_archives_of_pytorch_models(fuzz, tmp_path):
    torch = pytest.importorskip("torch")
    from tvmconv.torch import archive

    packed = io.BytesIO()
    torch.export.save(torch.export.export(torch.nn.ReLU(), (torch.ones(2, 3),)), packed)
    header, code = serialization.encode_executable(program(), None)
    device = {"name": "a CPU", "arch": None}
    head = {"version": archive.VERSION, "place": "cpu", "device": device}
    head["kernels"] = [{"workload": SMALL, "program": header}]
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as written:
        for name, contents in {archive.HEADER_FILE: json.dumps(head), archive.MODEL_FILE: packed.getvalue()}.items():
            written.writestr(name, contents)
        written.writestr(archive.CODE_FILE.format(0), code)
    mutate = partial(mutated_zip, text_names=(archive.HEADER_FILE,))
    fuzz("torch", whole.getvalue(), mutate, [call(archive.load)], ".tvmconv")


def test_messages_of_workers(fuzz, tmp_path):
    outcome = RunnerResult((1e-6, 2e-6), 3e-7, phases={"load": 1.5}, seconds=0.25)
    header, code = serialization.encode_executable(program(), 1e-6)
    order = serialization.SessionRequest(SMALL, 7, 2.5, 1 << 30).encode()
    text = {"device": "opencl", "name": "a CPU"}
    readers = {
        "outcome": (serialization.encode_result(outcome), serialization.decode_result),
        "program": (header, lambda text: serialization.decode_executable(text, code)),
        "order": (order, serialization.SessionRequest.decode),
        "device": (json.dumps(text), lambda text: rpc.read_description(Session(text))),
    }
    for name, (good, decode) in readers.items():
        decoded = call(lambda file, decode=decode: decode(file.read_text(encoding="utf-8", errors="replace")))
        fuzz(f"worker's {name}", good.encode(), mutated_text, [decoded], "")


class Session:
    """A session with a worker that answers with a text."""

    def __init__(self, text):
        self._text = text

    def get_function(self, name):
        return lambda: self._text


KINDS = 17  # calls of `fuzz`
