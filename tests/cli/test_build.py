from tvmconv.cli import main
from tvmconv.errors import CompileError
from tvmconv.logs.record import Record
from tvmconv.workloads import parse

SMALL = "conv2d:1x4x6x6,8x4x3x3,p1"


def test_build_exports_the_fastest_of_a_log(capsys, tmp_path):
    log, folder = tmp_path / "log.jsonl", tmp_path / "kernel"
    times = {8: 3e-6, 4: 1e-6, 2: 2e-6}
    records = [
        Record(parse(SMALL), "tiling", {"tile_c": (-1, c, 1)}, "NVIDIA A100", "cuda -arch=sm_80", times=(seconds,))
        for c, seconds in times.items()
    ]
    log.write_text("\n".join(record.line() for record in records) + "\n")
    assert main(["build", SMALL, "--log", str(log), "--arch", "sm_80", "-o", str(folder)]) == 0
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert "`tile_c=-1,4,1`" in page
    assert "1 µs" in page
    notes = capsys.readouterr().err
    assert "built is tiling with the knobs of a record, 1.00 µs on NVIDIA A100" in notes  # which is not just any sm_80


def test_build_without_a_record_says_what_it_built(capsys, tmp_path):
    (tmp_path / "log.jsonl").touch()
    status = main(
        ["build", SMALL, "tiling", "--log", str(tmp_path / "log.jsonl"), "--arch", "sm_80", "-o", str(tmp_path)]
    )
    assert status == 0
    assert "default knobs" in capsys.readouterr().err


def test_build_verifies_a_kernel_that_can_run_here(capsys, tmp_path):
    main(["build", SMALL, "tiling", "--device", "opencl:0", "-o", str(tmp_path)])
    assert "float64 reference" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_build_does_not_export_a_wrong_kernel(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tvmconv.workloads.dtypes.SUM_TOLERANCE", 0.0)
    status = main(["build", SMALL, "tiling", "--device", "opencl:0", "-o", str(tmp_path / "new")])
    assert (status, (tmp_path / "new").exists()) == (2, False)
    assert "is wrong by" in capsys.readouterr().err


def test_build_of_no_kernel_leaves_the_folder_alone(tmp_path, monkeypatch):
    def fail(*_args, **_options):
        raise CompileError("NVRTC is not available")

    monkeypatch.setattr("tvmconv.kernel.Kernel.cubin", property(fail))
    assert main(["build", SMALL, "tiling", "--arch", "sm_80", "-o", str(tmp_path / "new")]) == 2
    assert not (tmp_path / "new").exists()
