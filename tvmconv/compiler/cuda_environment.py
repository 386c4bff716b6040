"""The environment of processes in which TVM compiles CUDA code: it finds no headers in NVIDIA's wheels by itself, and
those wheels lack the headers of warp matrix instructions unless nvidia-cuda-crt is installed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

TOOLKITS = Path("/usr/local")
WMMA_HEADER = "crt/mma.h"  # mma.h includes it; the wheel of the CUDA runtime has mma.h alone
OPTIONS_VARIABLE = "TVM_CUDA_NVRTC_EXTRA_OPTS"


def make_cuda_environment() -> dict[str, str]:
    """Return environment variables with which TVM finds CUDA's headers and libcudart, in wheels or in a toolkit.

    A toolkit serves where the wheels lack the headers of warp matrix instructions, which TVM's code for float16 uses.
    """
    from cuda.pathfinder import find_nvidia_header_directory, load_nvidia_dynamic_lib

    environment = {}
    with contextlib.suppress(RuntimeError):  # not found; TVM says so where it needs the library
        runtime = load_nvidia_dynamic_lib("cudart").abs_path
        paths = [os.path.dirname(runtime or ""), os.environ.get("LD_LIBRARY_PATH")]
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))
    wheel, cccl = (find_nvidia_header_directory(library) for library in ("cudart", "cccl"))
    headers = find_cuda_headers(Path(wheel) if wheel else None)
    if headers is None:
        return environment
    own_cccl = headers / "cccl"
    includes = [str(own_cccl) if own_cccl.is_dir() else cccl, str(headers)]
    options = [os.environ.get(OPTIONS_VARIABLE, ""), *(shlex.quote(f"-I{path}") for path in includes if path)]
    environment[OPTIONS_VARIABLE] = " ".join(filter(None, options))
    if "CUDA_PATH" not in os.environ:
        environment["CUDA_PATH"] = str(headers.parent)
    return environment


def find_cuda_headers(wheel: Path | None, toolkits: Path = TOOLKITS) -> Path | None:
    """Return the first folder of headers that is complete, or else the first one at all.

    Args:
        wheel: Folder of the headers of the CUDA runtime in a wheel or a toolkit; its major version is required.
        toolkits: Folder with the folders of toolkits.
    """
    folders = [folder for folder in (wheel, *_list_toolkit_headers(toolkits)) if folder is not None]
    version = read_major_version(folders[0]) if folders else None
    complete = (f for f in folders if (f / WMMA_HEADER).is_file() and read_major_version(f) == version)
    return next(complete, folders[0] if folders else None)


def read_major_version(headers: Path) -> int | None:
    """Return the major version of the CUDA runtime of a folder of headers; None if the folder lacks its header."""
    try:
        text = (headers / "cuda_runtime_api.h").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    return int(match[1]) // 1000 if match else None


def _list_toolkit_headers(toolkits: Path) -> Iterator[Path]:
    """Yield the folders of headers of installed toolkits: those that the environment names first."""
    compiler = shutil.which("nvcc")
    roots = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME")]
    roots += [str(Path(compiler).resolve().parents[1])] if compiler else []
    roots += [str(toolkits / "cuda"), *sorted(map(str, toolkits.glob("cuda-*")), reverse=True)]
    for root in filter(None, roots):
        for folder in (Path(root, "include"), Path(root, "targets", "x86_64-linux", "include")):
            if (folder / "cuda_runtime_api.h").is_file():
                yield folder
