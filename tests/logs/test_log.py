"""A log loses nothing: not to a crash, to a full disk, to garbage, or to another process that writes at once."""

import contextlib
import fcntl
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import tvmconv as tc
from tvmconv.logs.lines import MAX_LINE_BYTES, InvalidLines
from tvmconv.logs.log import Log, read_records
from tvmconv.logs.record import Record

W, OTHER = tc.parse("conv2d:1x8x6x6,4x8x3x3,p1"), tc.parse("conv2d:1x8x6x6,8x8x1x1")
RECORDS = [Record(W, "tiling", {"tile": (-1, i)}, "cpu", "opencl", times=(i * 1e-6,)) for i in range(1, 5)]
GARBAGE = b"\x00\xff\xfe{not a record\n"


@pytest.fixture
def log(tmp_path):
    return Log(tmp_path / "log.jsonl")


def append(log, *records):
    for record in records:
        log.append(record)
    return log


def test_new_records_are_given_once(log):
    append(log, RECORDS[0])
    assert list(log.new_records()) == RECORDS[:1]
    assert list(log.new_records()) == []
    append(log, RECORDS[1])
    assert list(log.new_records()) == RECORDS[1:2]


@pytest.mark.parametrize("how", ["replaced", "deleted"])
def test_another_file_at_the_path_is_read_from_the_start(log, tmp_path, how):
    list(append(log, *RECORDS[:2]).new_records())
    if how == "replaced":
        os.replace(append(Log(tmp_path / "other.jsonl"), *RECORDS[2:4]).path, log.path)
    else:
        log.path.unlink()
        append(log, RECORDS[2])
    assert list(log.new_records()) == RECORDS[2 : 4 if how == "replaced" else 3]
    assert not log.invalid_lines.count


def test_an_append_reaches_the_file_that_replaced_the_log(log, tmp_path):
    log.append(RECORDS[0])
    other = Log(tmp_path / "other.jsonl")
    other.append(RECORDS[1])
    waiting = threading.Event()

    def lock(file, operation):
        waiting.set()
        flock(file, operation)

    flock = fcntl.flock
    with log.path.open("rb") as held, ThreadPoolExecutor(1) as pool, pytest.MonkeyPatch.context() as patch:
        flock(held, fcntl.LOCK_EX)
        patch.setattr(fcntl, "flock", lock)
        append = pool.submit(log.append, RECORDS[2])
        assert waiting.wait(10)
        os.replace(other.path, log.path)
        flock(held, fcntl.LOCK_UN)
        append.result(10)
    assert list(read_records(log.path, InvalidLines())) == RECORDS[1:3]


def test_a_torn_last_line_costs_one_line(log):
    log.path.write_text(RECORDS[0].line() + "\n" + RECORDS[1].line()[:-9])
    log.append(RECORDS[2])
    assert list(log.new_records()) == [RECORDS[0], RECORDS[2]]
    assert (log.invalid_lines.count, log.invalid_lines.numbers) == (1, [2])


def test_a_last_line_that_is_still_being_written_is_not_bad_yet(log):
    line = RECORDS[0].line()
    log.path.write_text(line[:40])
    assert list(log.new_records()) == []
    log.path.write_text(line + "\n")
    assert list(log.new_records()) == RECORDS[:1]
    assert not log.invalid_lines.count


def test_a_last_line_that_lacks_only_its_newline_is_not_lost(log):
    log.path.write_text(RECORDS[0].line())
    assert list(log.new_records()) == RECORDS[:1]
    log.append(RECORDS[1])
    assert list(log.new_records()) == RECORDS[1:2]
    assert list(Log(log.path).new_records()) == RECORDS[:2]


def test_garbage_is_counted_with_its_line_numbers_and_skipped(log):
    good = [record.line().encode() + b"\n" for record in RECORDS]
    log.path.write_bytes(GARBAGE + good[0] + b"\n# a comment\n" + GARBAGE * 2 + good[1])
    assert list(log.new_records()) == RECORDS[:2]
    assert log.invalid_lines.numbers == [1, 5, 6]
    assert str(log.invalid_lines).startswith("3 bad lines (1, 5, 6), line 1: the line is not JSON")


def test_a_line_longer_than_any_record_is_one_bad_line(log):
    good = RECORDS[0].line().encode() + b"\n"
    log.path.write_bytes(good + b"x" * (3 * MAX_LINE_BYTES) + b"\n" + good)
    assert list(log.new_records()) == [RECORDS[0]] * 2
    assert log.invalid_lines.numbers == [2]
    log.append(RECORDS[1])
    assert list(log.new_records()) == [RECORDS[1]]


def test_processes_that_append_at_once_lose_nothing(log):
    code = (
        "import sys; from tvmconv.logs.log import Log; from tvmconv.logs.record import Record\n"
        "record, log = Record.parse(sys.argv[2]), Log(sys.argv[1])\n"
        "for _ in range(100): log.append(record)"
    )
    command = [sys.executable, "-c", code, log.path]
    processes = [subprocess.Popen([*command, record.line()]) for record in RECORDS[:3]]
    assert [process.wait() for process in processes] == [0, 0, 0]
    found = list(log.new_records())
    assert not log.invalid_lines.count
    assert [found.count(record) for record in RECORDS[:3]] == [100, 100, 100]


def test_an_append_that_fails_leaves_the_log_as_it_was(log, monkeypatch):
    log.append(RECORDS[0])
    before = log.path.read_bytes()
    write = os.write

    def half(file, data):
        if len(data) < 100:
            raise OSError(28, "No space left on device")
        return write(file, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(tc.Error, match="No space left"):
        log.append(RECORDS[1])
    assert log.path.read_bytes() == before


@pytest.mark.parametrize("path", ["/dev/full", "/proc/version", "/proc/nowhere/log.jsonl", "/"])
def test_a_log_that_cannot_be_written_is_an_error_of_one_line(path):
    with pytest.raises(tc.Error, match=f"^cannot write {path}: "):
        Log(path).append(RECORDS[0])


def test_a_log_that_cannot_be_read_is_an_error_of_one_line(tmp_path):
    with pytest.raises(tc.Error, match="No such file"):
        list(read_records(tmp_path / "nowhere.jsonl", InvalidLines()))
    with pytest.raises(tc.Error, match="Is a directory"):
        list(Log(tmp_path).new_records())


def test_a_killed_writer_leaves_a_log_that_goes_on(log):
    code = (
        "import sys; from tvmconv.logs.log import Log; from tvmconv.logs.record import Record\n"
        "record, log = Record.parse(sys.argv[2]), Log(sys.argv[1])\n"
        "while True: log.append(record); print(flush=True)"
    )
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-c", code, log.path, RECORDS[0].line()]
        writer = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
        for _ in range(50):
            writer.stdout.readline()
        writer.kill()
        told = 50 + len(writer.stdout.read().splitlines())
    log.append(RECORDS[1])
    *first, last = log.new_records()
    assert last == RECORDS[1]
    assert first in ([RECORDS[0]] * told, [RECORDS[0]] * (told + 1))
