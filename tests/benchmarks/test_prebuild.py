"""Kernels built in one place, to be measured in another."""

import json
import os
import signal
import zipfile

import pytest

import tvmconv as tc
from tvmconv import cli, registry
from tvmconv.benchmarks import prebuild
from tvmconv.benchmarks.builder_pool import start_builders
from tvmconv.compiler import nvrtc
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import read_records
from tvmconv.measure.serialization import decode_executable
from tvmconv.target import get_block_limits

needs_nvrtc = pytest.mark.skipif(nvrtc.explain_unavailability() is not None, reason=str(nvrtc.explain_unavailability()))
SCHEDULES = ["mma_sync", "tensor_core"]
TEXT = "conv2d:1x16x8x8,16x16x3x3,s1,p1,f16,nhwc"


@pytest.fixture
def build(bench, tmp_path):
    """Build so many configs of one layer; the archive."""
    suite, archive = tmp_path / "suite.json", tmp_path / "kernels.zip"
    suite.write_text(json.dumps([{"name": "small", "text": TEXT, "count": 1}]))

    def build(configs):
        words = ["build", "--suite", str(suite), "--configs", str(configs), "--workers", "1", "-o", str(archive)]
        words += [word for name in SCHEDULES for word in ("--schedule", name)]
        assert bench(words) == 0
        return archive

    return build


@pytest.mark.slow
@needs_nvrtc
def test_an_archive_starts_with_the_default_and_is_added_to(build, capsys):
    build(1)
    archive = build(2)
    assert f"{len(SCHEDULES)} kernels" in capsys.readouterr().out.splitlines()[-1]
    with zipfile.ZipFile(archive) as found:
        entries = [json.loads(found.read(name)) for name in found.namelist() if name.endswith(".json")]
        codes = [found.read(name) for name in found.namelist() if name.endswith(".bin")]
    assert {entry["workload"] for entry in entries} == {TEXT}
    assert [entry["schedule"] for entry in entries] == SCHEDULES * 2
    for first, second in zip(entries, entries[len(SCHEDULES) :], strict=False):
        assert first["config"] == tc.build(tc.parse(TEXT), first["schedule"], arch="sm_90").config
        assert second["config"] != first["config"]
    program, _ = decode_executable(entries[0]["header"], codes[0])
    assert program.kernels[0].launch.num_blocks == entries[0]["resources"]["blocks"]


def test_an_interrupt_ends_builders_without_a_traceback():
    with start_builders(1, niceness=3) as pool:
        assert pool.submit(signal.getsignal, signal.SIGINT).result() == signal.SIG_DFL
        assert pool.submit(os.nice, 0).result() == min(os.nice(0) + 3, 19)


def test_all_searched_schedules_are_proposed_by_default(tmp_path):
    suite = tmp_path / "suite.json"
    suite.write_text(json.dumps([{"name": "small", "text": TEXT}]))
    words = ["build", "--suite", str(suite), "--configs", "1", "-o", "kernels.zip"]
    entries = prebuild.propose(cli.parse_words(["bench", "prebuild", *words]))
    searched = registry.schedules_to_tune(tc.parse(TEXT), "cuda", "sm_90")
    assert [entry["schedule"] for entry in entries] == [schedule.name for schedule in searched]


def test_the_first_configs_are_those_of_a_search(tmp_path):
    suite = tmp_path / "suite.json"
    text = "conv2d:32x64x56x56,256x64x1x1,s1,p0,i8,nhwc,scale,quantize"
    suite.write_text(json.dumps([{"name": "pointwise", "text": text}]))
    words = ["build", "--suite", str(suite), "--first", "8", "-o", "kernels.zip"]
    entries = [*prebuild.propose_first(cli.parse_words(["bench", "prebuild", *words]))]
    assert len(entries) == 8
    assert {"hopper", "mma_sync"} == {entry["schedule"] for entry in entries}
    default = registry.find_schedule(tc.parse(text), "hopper")
    space = default.space(tc.parse(text), get_block_limits("sm_90"))
    assert entries[0]["config"] == space.default


@needs_nvrtc
@pytest.mark.usefixtures("prebuild_in_threads")
def test_kernels_are_measured_on_their_architecture_alone(bench, build, tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    assert bench(["measure", str(build(1)), "--device", "opencl:0", "--log", str(log)]) == 2
    assert "is for sm_90, and opencl:0 is opencl" in capsys.readouterr().err
    assert not log.exists()


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04", None])
def test_what_is_no_archive_is_refused_in_one_line(bench, tmp_path, content, capsys):
    archive = tmp_path / "kernels.zip"
    if content is None:
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("1.json", "[]")
    else:
        archive.write_bytes(content)
    assert bench(["measure", str(archive), "--device", "opencl:0", "--log", str(tmp_path / "log")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_share_is_a_part_of_so_many(bench, tmp_path, capsys):
    for share in ("3/2", "0/2", "1", "x"):
        assert bench(["measure", "k.zip", "--share", share, "--log", str(tmp_path / "l")]) == 2
        assert "expected I/N" in capsys.readouterr().err


@pytest.mark.gpu
def test_kernels_are_measured_on_a_gpu(bench, build, gpu, tmp_path):
    log = tmp_path / "log.jsonl"
    assert bench(["measure", str(build(3)), "--device", gpu.text, "--log", str(log)]) == 0
    records = [record for record in read_records(log, InvalidLines()) if record.ok]
    assert len([record for record in records if not record.final]) == 3 * len(SCHEDULES)
    assert {record.workload.text for record in records} == {TEXT}
