"""The headers with which TVM compiles CUDA code: those of wheels lack the ones of warp matrix instructions."""

import pytest

from tvmconv.compiler.cuda_environment import find_cuda_headers


@pytest.fixture
def make_headers(tmp_path, monkeypatch):
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvcc

    def make(name, version, *, is_complete):
        folder = tmp_path / name / "include"
        folder.joinpath("crt").mkdir(parents=True)
        folder.joinpath("cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")
        if is_complete:
            folder.joinpath("crt/mma.h").touch()
        return folder

    return make


def test_toolkit_of_the_same_version_serves_where_the_wheel_is_incomplete(make_headers, tmp_path):
    wheel = make_headers("wheel", 13050, is_complete=False)
    assert find_cuda_headers(wheel, tmp_path) == wheel
    make_headers("cuda-12.9", 12090, is_complete=True)
    assert find_cuda_headers(wheel, tmp_path) == wheel
    toolkit = make_headers("cuda-13.0", 13000, is_complete=True)
    assert find_cuda_headers(wheel, tmp_path) == toolkit
    (wheel / "crt/mma.h").touch()  # of the wheel nvidia-cuda-crt
    assert find_cuda_headers(wheel, tmp_path) == wheel
