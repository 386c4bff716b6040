"""Recorded spaces: whatever state a file is in, it is read as it is meant or refused in one line."""

import gzip
import json
import math

import pytest

from tvmconv import Error, KnobError
from tvmconv.search.recorded_space import load_recorded_space

ENTRIES = {
    "16,1": {"block_size_x": 16, "staged": True, "time": 3.875, "times": [3.9, 3.85]},
    "16,0": {"block_size_x": 16, "staged": False, "time": "CompilationFailedConfig"},
    "128,1": {"block_size_x": 128, "staged": True, "time": 1.5},
}
CACHE = {
    "schema_version": "1.1.0",
    "device_name": "Testing",
    "kernel_name": "convolution_kernel",
    "tune_params_keys": ["block_size_x", "staged"],
    "tune_params": {"block_size_x": [16, 32, 128], "staged": [True, False]},
    "cache": ENTRIES,
}


def head():
    """A cache as Kernel Tuner writes it, open for more entries."""
    return json.dumps({**CACHE, "cache": {}}, indent=1).removesuffix("}\n}").rstrip("}\n ") + "\n"


def lines(*names):
    return ",\n".join(f"{json.dumps(name)}: {json.dumps(ENTRIES[name])}" for name in names)


@pytest.fixture
def written(tmp_path):
    def write(content):
        path = tmp_path / "cache.json"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def configs(recording):
    return {tuple(recording.space.config_from_point(point).values()) for point in recording.space.enumerated_legal}


@pytest.mark.parametrize("packed", [str.encode, lambda text: gzip.compress(text.encode())], ids=["plain", "gzip"])
def test_a_cache_is_a_space_of_what_was_measured(written, packed):
    recording = load_recorded_space(written(packed(json.dumps(CACHE))))
    assert configs(recording) == {(16, True), (16, False), (128, True)}
    assert recording.best_seconds == 1.5e-3
    assert recording.num_failed == 1
    assert recording.measure({"block_size_x": 16, "staged": True}).cost == 3.875e-3
    assert recording.measure({"block_size_x": 16, "staged": False}).cost == math.inf


def test_only_what_was_measured_is_legal(written):
    space = load_recorded_space(written(json.dumps(CACHE))).space
    points = space.slice_points(0, space.size)
    assert {tuple(p) for p in points[space.is_legal(points)].tolist()} == {
        tuple(p) for p in space.enumerated_legal.tolist()
    }
    assert [*map(tuple, space.enumerated_legal)] == sorted(map(tuple, space.enumerated_legal))
    with pytest.raises(KnobError, match="one of 16, 128, not 32"):
        space.point_from_config({"block_size_x": 32})


@pytest.mark.parametrize(
    "tail",
    [",", "", ",\n", ',\n"128,1": {"block_size_x": 128, "sta', "}\n", "}}"],
    ids=["comma", "bare", "newline", "torn", "half closed", "closed"],
)
def test_an_interrupted_cache_is_read_to_its_last_whole_line(written, tail):
    assert configs(load_recorded_space(written(head() + lines("16,1", "16,0") + tail))) == {(16, True), (16, False)}


def test_results_in_the_t4_format_are_read(written):
    def result(block, value, invalidity):
        measured = [{"name": "time", "value": value, "unit": "ms"}]
        return {"configuration": {"block": block}, "measurements": measured, "invalidity": invalidity}

    results = [result(16, 2.0, "correct"), result(32, 1.0, "correct"), result(64, 0.5, "runtime")]
    recording = load_recorded_space(written(json.dumps({"schema_version": "1.0.0", "results": results})))
    assert (recording.best_seconds, recording.num_failed, len(recording.space.enumerated_legal)) == (1e-3, 1, 3)


@pytest.mark.parametrize("time", ['"RuntimeFailedConfig"', "NaN", "Infinity", "-1", "0", "null", "1e400"])
def test_what_is_no_time_is_a_failure(written, time):
    text = json.dumps(CACHE).replace("3.875", time)
    assert load_recorded_space(written(text)).num_failed == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected a JSON object"),
        ("[1, 2]", "expected a JSON object"),
        ("[" * 100_000, "expected a JSON object"),
        (b"\xff\xfe\x00", "neither JSON text nor JSON compressed by gzip"),
        (gzip.compress(b"{}", mtime=0)[:-6], "neither JSON text nor JSON compressed by gzip"),
        (b"\x1f\x8bnot gzip at all", "neither JSON text nor JSON compressed by gzip"),
        ("{}", "no 'tune_params_keys'"),
        ('{"tune_params_keys": ["a"], "cache": []}', "not a cache file"),
        ('{"tune_params_keys": ["a"], "cache": {"1": {"time": 1}}}', "no 'a'"),
        ('{"tune_params_keys": ["a"], "cache": {"1": {"a": 1}}}', "no 'time'"),
        ('{"tune_params_keys": ["a"], "cache": {"1": 7}}', "not a cache file"),
        ('{"tune_params_keys": ["a"], "cache": {}}', "no successful measurement among its 0 configs"),
        ('{"tune_params_keys": ["a"], "cache": {"1": {"a": 1, "time": "x"}}}', "no successful measurement among its 1"),
        ('{"tune_params_keys": ["a"], "cache": {"1": {"a": 1, "time": 1}, "2": {"a": "b", "time": 1}}}', "not a cache"),
        ('{"tune_params_keys": [], "cache": {"": {"time": 1}}}', "has no parameters that were tuned"),
        ('{"results": [{"configuration": {"a": 1}}]}', "no 'measurements'"),
    ],
)  # fmt: skip
def test_another_file_is_refused_in_one_line(written, content, message):
    with pytest.raises(Error, match=message) as caught:
        load_recorded_space(written(content))
    assert "\n" not in str(caught.value)
