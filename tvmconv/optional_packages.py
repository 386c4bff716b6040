"""Install commands for optional packages."""

from __future__ import annotations

PACKAGES = {  # module or program: (extra of tvmconv that installs it, requirement for pip)
    "cuda.bindings": ("cuda", "cuda-bindings==13.*"),
    "nvrtc": ("cuda", "nvidia-cuda-nvrtc==13.*"),
    "cudart": ("cuda", "nvidia-cuda-runtime==13.*"),
    "nvdisasm": ("cuda", "nvidia-cuda-nvdisasm==13.*"),
    "cuda.bench": ("bench", "cuda-bench==0.3.*"),
    "onnx": ("onnx", "onnx"),
    "torch": ("torch", "torch"),
    "argcomplete": ("completion", "argcomplete"),
}


def format_install_command(name: str) -> str:
    """Return the command that installs a missing package, in one line."""
    extra, package = PACKAGES[name]
    return f"pip install \"{package}\" (in a clone of tvmconv: pip install -e '.[{extra}]')"
