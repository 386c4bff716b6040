"""What to install where a package is missing that tvmconv does not always need."""

from __future__ import annotations

PACKAGES = {  # by module or program: the extra of tvmconv that has it, and what a package installer calls it
    "cuda.bindings": ("cuda", "cuda-bindings==13.*"),
    "nvrtc": ("cuda", "nvidia-cuda-nvrtc==13.*"),
    "cudart": ("cuda", "nvidia-cuda-runtime==13.*"),
    "nvdisasm": ("cuda", "nvidia-cuda-nvdisasm==13.*"),
    "cuda.bench": ("bench", "cuda-bench==0.3.*"),
    "onnx": ("onnx", "onnx"),
    "torch": ("torch", "torch"),
}


def format_install_command(name: str) -> str:
    """Return the command that installs what is missing, as a remedy in one line.

    Args:
        name: the module or program that is missing, a key of `PACKAGES`.
    """
    extra, package = PACKAGES[name]
    return f"pip install \"{package}\" (in a clone of tvmconv: pip install -e '.[{extra}]')"
