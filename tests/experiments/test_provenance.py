"""Where numbers come from is told as far as it is known."""

from importlib import metadata

from tvmconv.experiments import provenance


def test_where_kernels_only_run_there_is_no_version_of_tvm(opencl, monkeypatch):
    assert ", TVM " in provenance.provenance(opencl, "run")
    real = metadata.version

    def version(name):
        if name == "apache-tvm":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    assert "TVM" not in provenance.provenance(opencl, "run", "cuDNN 9")
