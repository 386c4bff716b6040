"""Programs that were built before: found again as long as nothing that they were made from has changed."""

import os
import resource
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import tvmconv as tc
from tvmconv import registry
from tvmconv.measure import kernel_cache

W = tc.parse("conv2d:1x4x6x6,4x4x3x3")
CONFIG = {"tile_c": [-1, 1, 1]}


@pytest.fixture
def where(tmp_path, monkeypatch):
    monkeypatch.setenv("TVMCONV_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture(scope="module")
def program(opencl):
    return tc.build(W, "tiling", device=opencl).executable


@pytest.fixture
def schedule():
    return registry.find_schedule(W, "tiling")


def test_a_program_is_found_again_for_its_config_and_device(where, opencl, program, schedule):
    assert kernel_cache.lookup(W, "tiling", CONFIG, opencl) is None
    kernel_cache.store(W, schedule, CONFIG, opencl, program)
    found = kernel_cache.lookup(W, "tiling", CONFIG, opencl)
    assert found == replace(program, kernels=tuple(replace(step, resources=None) for step in program.kernels))
    assert kernel_cache.lookup(tc.parse("conv2d:1x4x6x7,4x4x3x3"), "tiling", CONFIG, opencl) is None
    assert kernel_cache.lookup(W, "vthread", CONFIG, opencl) is None
    assert kernel_cache.lookup(W, "tiling", {"tile_c": [-1, 2, 1]}, opencl) is None
    assert kernel_cache.lookup(W, "tiling", CONFIG, replace(opencl, name="another")) is None


def test_program_is_gone_when_a_file_of_its_sources_changes(where, opencl, program, schedule, monkeypatch):
    kernel_cache.store(W, schedule, CONFIG, opencl, program)
    with monkeypatch.context() as patch:
        patch.setattr(kernel_cache, "hash_sources", lambda: "another")
        assert kernel_cache.lookup(W, "tiling", CONFIG, opencl) is None
    monkeypatch.setattr(kernel_cache, "_make_file_stamp", lambda file: [1, 2])
    assert kernel_cache.lookup(W, "tiling", CONFIG, opencl) is None


def flip(written, place):
    """The file with one wrong bit."""
    return written[:place] + bytes([written[place] ^ 1]) + written[place + 1 :]


DAMAGE = {
    "wrong bit of the checksum": lambda written: flip(written, 0),
    "wrong bit of the header": lambda written: flip(written, written.index(b"sources")),
    "wrong bit of the code": lambda written: flip(written, len(written) - 2),
    "truncated": lambda written: written[:-1],
    "deep": lambda written: b"[" * 100_000 + b"\n",
    "infinite": lambda written: written.replace(rb"\"num_prepack_kernels\": 0", rb"\"num_prepack_kernels\": Infinity"),
    **{str(other): lambda _, other=other: other for other in (b"", b"[]\n", b'{"sources": {}, "program": "{}"}\n')},
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_file_is_no_program_and_is_rebuilt(where, opencl, program, schedule, damage):
    kernel_cache.store(W, schedule, CONFIG, opencl, program)
    (file,) = where.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert kernel_cache.lookup(W, "tiling", CONFIG, opencl) is None
    kernel_cache.store(W, schedule, CONFIG, opencl, program)
    assert kernel_cache.lookup(W, "tiling", CONFIG, opencl) is not None


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_file_in_a_files_place_is_no_program(where, opencl, program, schedule, make):
    kernel_cache.store(W, schedule, CONFIG, opencl, program)
    (file,) = where.iterdir()
    file.unlink()
    make(file)
    assert kernel_cache.lookup(W, "tiling", CONFIG, opencl) is None
    kernel_cache.store(W, schedule, CONFIG, opencl, program)


def test_the_oldest_go_and_what_else_lies_there_stays(where, opencl, program, schedule, monkeypatch):
    monkeypatch.setattr(kernel_cache, "MAX_FILES", 2)
    where.mkdir()
    others = {where / name for name in ("thesis.tex", "zzz.json")}
    for file in others:
        file.write_text("precious")
        os.utime(file, (0, 0))
    for number in (1, 2, 4):
        kernel_cache.store(W, schedule, {"tile_c": [-1, number, 1]}, opencl, program)
    assert len(set(where.iterdir()) - others) == 2
    assert others <= set(where.iterdir())
    assert kernel_cache.lookup(W, "tiling", {"tile_c": [-1, 4, 1]}, opencl) is not None


def test_nothing_is_kept_where_it_is_not_wanted_or_possible(tmp_path, opencl, program, schedule, monkeypatch):
    monkeypatch.setenv("TVMCONV_CACHE", "none")
    monkeypatch.chdir(tmp_path)
    kernel_cache.store(W, schedule, CONFIG, opencl, program)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TVMCONV_CACHE", str(tmp_path / "file"))
    kernel_cache.store(W, schedule, CONFIG, opencl, program)
    assert kernel_cache.lookup(W, "tiling", CONFIG, opencl) is None


def test_what_there_is_no_room_for_leaves_nothing_behind(where, opencl, program, schedule, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # which the limit would cut off
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        kernel_cache.store(W, schedule, CONFIG, opencl, program)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(where.iterdir())
