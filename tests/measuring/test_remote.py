import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from farm import Farm
from processes import GONE_SECONDS, processes_of, wait_for

from tvmconv import registry
from tvmconv.cli import main
from tvmconv.devices import rpc
from tvmconv.errors import DeviceError
from tvmconv.logs.record import Record
from tvmconv.measure import rpc as measure_rpc
from tvmconv.measure.measurer import Measurer
from tvmconv.workloads import parse

pytest.importorskip("tornado", reason="TVM's RPC tracker needs tornado and cloudpickle")

pytestmark = pytest.mark.usefixtures("shared_processes")  # those that build; workers are each test's own

SMALL = parse("conv2d:1x4x6x6,8x4x3x3,p1")


@pytest.fixture
def farm(tmp_path, tracker):
    farm = Farm(tmp_path, tracker)
    yield farm
    farm.close()


@pytest.fixture
def schedule():
    return registry.find_schedule(SMALL, "tiling")


@pytest.fixture
def configs(schedule):
    space = schedule.space(SMALL)
    return [space.config_from_point(point) for point in space.sample_legal(6, np.random.default_rng(0))]


def measure(measurer, enough):
    """Records until there are enough."""
    records = []
    while len(records) < enough:
        records += map(Record.from_measurement, measurer.collect_results(timeout=60))
    return records


@pytest.mark.slow
def test_killed_worker_ends_the_search_and_leaves_nothing_behind(farm, schedule, configs):
    farm.lend("k")
    with Measurer(SMALL, schedule, rpc.list_rpc_devices("k", farm.tracker), workers=1) as measurer:
        measurer.submit(configs)
        measure(measurer, 1)
        farm.workers[0].kill()
        farm.workers[0].wait()
        with pytest.raises(DeviceError, match="a worker of rpc:k is lost"):
            measure(measurer, len(configs))
        wait_for(lambda: not processes_of(farm.folder), GONE_SECONDS)
    wait_for(lambda: not [*farm.folder.iterdir()], GONE_SECONDS)


@pytest.mark.slow
def test_a_worker_that_hangs_is_given_up(farm, schedule, configs, monkeypatch):
    monkeypatch.setattr(measure_rpc, "ANSWER_SECONDS", 1.0)
    farm.lend("k")
    with Measurer(SMALL, schedule, rpc.list_rpc_devices("k", farm.tracker), workers=1, run_timeout=5.0) as measurer:
        measurer.submit(configs)
        measure(measurer, 1)
        for process in processes_of(farm.folder):
            os.kill(process, signal.SIGSTOP)
        with pytest.raises(DeviceError, match="has not answered for 6 s"):
            measure(measurer, len(configs))
    for process in processes_of(farm.folder):
        os.kill(process, signal.SIGCONT)


@pytest.mark.slow
def test_worker_serves_searches_in_turn_and_outlives_a_crash(farm, schedule, configs):
    farm.lend("k")
    with Measurer(SMALL, schedule, rpc.list_rpc_devices("k", farm.tracker), workers=1) as measurer:
        measurer.submit(configs)
        measure(measurer, 1)
        children = Path(f"/proc/{farm.workers[0].pid}/task").glob("*/children")
        forked = [int(pid) for each in children for pid in each.read_text().split()]
        for process in forked:
            if b"worker" in Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0"):
                os.kill(process, signal.SIGKILL)
        with pytest.raises(DeviceError):
            measure(measurer, len(configs))
    with Measurer(SMALL, schedule, rpc.list_rpc_devices("k", farm.tracker), workers=1) as measurer:
        measurer.submit(configs[:1])
        assert [record.ok for record in measure(measurer, 1)] == [True]
    farm.workers[0].send_signal(signal.SIGINT)
    assert farm.workers[0].wait(timeout=GONE_SECONDS) == 130


def test_without_an_address_or_a_worker_one_line_says_so(farm):
    with pytest.raises(DeviceError, match="tvmconv worker --tracker"):  # a key without workers
        rpc.list_rpc_devices("nobody", farm.tracker)
    tracker = "{}:{}".format(*farm.tracker)
    command = [sys.executable, "-m", "tvmconv", "worker", "--tracker", tracker, "--key", "k", "--device", "opencl:0"]
    finished = subprocess.run([*command, "--host", "192.0.2.1"], capture_output=True, text=True)
    assert (finished.returncode, finished.stderr.count("\n")) == (2, 1)
    assert "cannot listen on 192.0.2.1" in finished.stderr


REFUSALS = {
    "no tracker": (["--tracker", "127.0.0.1:1", "--device", "opencl:0"], "no tracker at 127.0.0.1:1"),
    "malformed tracker": (["--tracker", "here"], "'here'"),
    "compile-only device": (["--tracker", "127.0.0.1:1", "--device", "sm_90"], "not a device of this host"),
    "absent device": (["--tracker", "127.0.0.1:1", "--device", "opencl:99"], "'opencl:99'"),
}


@pytest.mark.parametrize(("words", "said"), REFUSALS.values(), ids=REFUSALS)
def test_bad_input_is_one_line_and_status_2(capsys, words, said):
    assert main(["worker", "--key", "k", *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert said in err
