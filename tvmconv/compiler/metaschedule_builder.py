"""A builder for MetaSchedule that keeps its processes.

MetaSchedule's `LocalBuilder` starts processes for each batch of candidates, and each of them imports TVM and then its
tensor intrinsics, which takes half a minute or more (see `tvmconv.compiler.import_frames`). It ends a build after 30
seconds, so that candidates fail that would have been built. Here the processes import both once, and stay. They are
not forked, because TVM's import initializes CUDA, which a forked process cannot use. What they build is the same.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.builder import BuilderInput, BuilderResult, PyBuilder
from tvm.s_tir.meta_schedule.builder.local_builder import default_build

from tvmconv.compiler.cuda_library import export_library
from tvmconv.compiler.tensor_intrinsics import prepare_process
from tvmconv.errors import describe_error

TIMEOUT_SECONDS = 30.0  # of LocalBuilder
IMPORT_SECONDS = 60.0  # more for what comes before the first build
LIBRARY_FILE = "candidate.so"


@derived_object
class PersistentBuilder(PyBuilder):
    """Builder whose processes live as long as it does.

    Args:
        num_processes: Number of processes.
    """

    def __init__(self, num_processes: int) -> None:
        super().__init__()
        self.num_processes = num_processes
        self.pool = self.make_pool()

    def make_pool(self) -> ProcessPoolExecutor:
        """Return a pool of processes, which start with the first build."""
        self.seconds = TIMEOUT_SECONDS + IMPORT_SECONDS  # of the first build
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self.num_processes, mp_context=context, initializer=prepare_process)

    def build(self, build_inputs: list[BuilderInput]) -> list[BuilderResult]:
        """Build candidates, and return the files of their modules or the reasons why there are none.

        New processes take the place of those of a build that hangs, and build the other candidates. So they do where a
        build has ended its process, one at a time, because any of them may have been the reason.
        """
        results: list[BuilderResult] = []
        batch_size = len(build_inputs)
        while remaining := build_inputs[len(results) :][:batch_size]:
            for future in [self.pool.submit(build_candidate, each.mod, each.target) for each in remaining]:
                try:
                    results.append(BuilderResult(future.result(self.seconds), None))
                except TimeoutError:
                    results.append(BuilderResult(None, f"the build took more than {self.seconds:g} s"))
                    self.end_processes()
                    break
                except BrokenProcessPool as error:
                    if batch_size == 1:
                        results.append(BuilderResult(None, describe_error(error)))
                    batch_size = 1
                    self.end_processes()
                    break
                except Exception as error:  # TVM and NVRTC raise many types
                    results.append(BuilderResult(None, describe_error(error)))
                self.seconds = TIMEOUT_SECONDS
        return results

    def end_processes(self) -> None:
        """End the processes with what they build, and prepare new ones."""
        for process in list((self.pool._processes or {}).values()):
            process.kill()
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.pool = self.make_pool()


def build_candidate(mod: Any, target: Any) -> str:
    """Build a candidate as MetaSchedule does, and return the path of its library. MetaSchedule's runner would link an
    archive of objects, which `default_export` writes, before it times the candidate.
    """
    path = Path(tempfile.mkdtemp()) / LIBRARY_FILE
    options = ["-s"]  # without symbols of a debugger
    export_library(default_build(mod, target, None), path, str(target.attrs["arch"]), options=options)
    return str(path)
