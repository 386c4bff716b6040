"""A builder for MetaSchedule that keeps its processes.

MetaSchedule's `LocalBuilder` starts processes for each batch of candidates, and each of them imports TVM and then its
tensor intrinsics, which takes a minute or more (see `tvmconv.compiler.tensor_intrinsics`). It ends a build after 30
seconds, so that candidates fail that would have been built. Here the processes are forked from one that has imported
both, and they stay. What they build is the same.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.builder import BuilderInput, BuilderResult, PyBuilder
from tvm.s_tir.meta_schedule.builder.local_builder import default_build

from tvmconv.errors import describe_error

TIMEOUT_SECONDS = 30.0  # of LocalBuilder
LIBRARY_FILE = "candidate.so"
_PRELOADED = ("tvmconv.compiler.preloaded_intrinsics", __name__)  # in the process from which the others are forked


def start_fork_server() -> None:
    """Start the process from which the builder's processes are forked, so that it imports its modules meanwhile."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(_PRELOADED))
    forkserver.ensure_running()


@derived_object
class PersistentBuilder(PyBuilder):
    """Builder whose processes live as long as it does. `start_fork_server` comes first.

    Args:
        num_processes: Number of processes.
    """

    def __init__(self, num_processes: int) -> None:
        super().__init__()
        self.num_processes = num_processes
        self.pool = self.make_pool()

    def make_pool(self) -> ProcessPoolExecutor:
        """Return a pool of processes, which start with the first build."""
        return ProcessPoolExecutor(self.num_processes, mp_context=multiprocessing.get_context("forkserver"))

    def build(self, build_inputs: list[BuilderInput]) -> list[BuilderResult]:
        """Build candidates, and return the files of their modules or the reasons why there are none."""
        futures = [self.pool.submit(build_candidate, each.mod, each.target) for each in build_inputs]
        return [self.wait_for_result(future) for future in futures]

    def wait_for_result(self, future: Future[str]) -> BuilderResult:
        """Return the result of a build; new processes take the place of those that hang."""
        try:
            return BuilderResult(future.result(TIMEOUT_SECONDS), None)
        except TimeoutError:
            self.end_processes()
            return BuilderResult(None, f"the build took more than {TIMEOUT_SECONDS:g} s")
        except BrokenProcessPool as error:
            self.end_processes()
            return BuilderResult(None, describe_error(error))
        except Exception as error:  # TVM and NVRTC raise many types
            return BuilderResult(None, describe_error(error))

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
    default_build(mod, target, None).export_library(str(path), options=["-s"])  # without symbols of a debugger
    return str(path)
