"""What is no regular file is refused at once, and what unpacks beyond a limit before memory is taken."""

import gzip
import io
import os
import resource
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from tvmconv import files
from tvmconv import training as train
from tvmconv.cost_model.model import CostModel
from tvmconv.errors import Error
from tvmconv.measure import kernel_archive


def test_file_is_read_up_to_its_limit(tmp_path):
    file = tmp_path / "f"
    file.write_bytes(b"12345")
    assert files.read_bytes(file, 5) == b"12345"
    with pytest.raises(OSError, match="expected at most 4 bytes"):
        files.read_bytes(file, 4)


@pytest.mark.parametrize("data", [b"x" * 1000, b"", os.urandom(3_000_000)])
def test_gzip_of_several_members_is_unpacked(tmp_path, data):
    file = tmp_path / "f.gz"
    file.write_bytes(gzip.compress(data) + gzip.compress(data) + b"\0" * 8)
    assert files.read_bytes(file, unpack=True) == data * 2


@pytest.mark.parametrize("cut", [4, 12, 30, -1])
def test_damaged_gzip_is_refused(tmp_path, cut):
    file = tmp_path / "f.gz"
    file.write_bytes(gzip.compress(os.urandom(500))[:cut])
    with pytest.raises(files.DamagedFileError, match="gzip data are damaged"):
        files.read_bytes(file, unpack=True)


def test_gzip_beyond_its_limit_is_refused(tmp_path):
    file = tmp_path / "f.gz"
    file.write_bytes(gzip.compress(bytes(1 << 22)))
    with pytest.raises(OSError, match="expected at most 1 MiB"):
        files.read_bytes(file, 1 << 20, unpack=True)
    with pytest.raises(OSError, match="expected at most 1 MiB"), files.LimitedPackedFile(file, 1 << 20) as opened:
        opened.read()


@pytest.fixture(params=["pipe", "device", "folder", "socket"])
def irregular(request, tmp_path):
    """The path of something that is no regular file."""
    path = tmp_path / "f"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "folder":
        path.mkdir()
    elif request.param == "socket":
        import socket

        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(str(path))
    else:
        path.symlink_to("/dev/zero")
    return path


def test_irregular_file_is_refused_without_waiting(irregular):
    with pytest.raises(OSError, match=r"Is a directory|expected a regular file"):
        files.open_regular(irregular)


@pytest.mark.parametrize(
    "read",
    [CostModel.load, lambda path: list(kernel_archive.load_kernels(path)), lambda p: [*train.read_valid_records(p)]],
)
def test_readers_refuse_what_is_no_regular_file(irregular, read):
    with pytest.raises(Error, match="cannot read"):
        read(irregular)


COMMANDS = [
    ("log", "best"),
    ("log", "stats"),
    ("plot", "-o", "out.svg"),
    ("simulate",),
    ("counters", "--from"),
    ("suites", "--from"),
]


def test_commands_refuse_pipes_and_devices_without_hanging(tmp_path):
    pipe = tmp_path / "f.jsonl"
    os.mkfifo(pipe)
    code = f"from tvmconv.cli import main; print([main([*words, {str(pipe)!r}]) for words in {COMMANDS}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{[2] * len(COMMANDS)}\n"
    assert done.stderr.count("expected a regular file, not a pipe") == len(COMMANDS)


def bomb(names):
    """An archive of members that unpack to 512 MiB each."""
    packed = io.BytesIO()
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (1 << 29,)})
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in names:
            with archive.open(name, "w") as member:
                member.write(header.getvalue())
                for _ in range(1 << 5):
                    member.write(bytes(1 << 24))
    return packed.getvalue()


def test_archive_that_unpacks_beyond_its_limit_takes_no_memory(tmp_path):
    file = tmp_path / "bomb.npz"
    file.write_bytes(bomb(["head.npy"]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(Error, match="the archive unpacks to 512 MiB, expected at most 256 MiB"):
        CostModel.load(file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
