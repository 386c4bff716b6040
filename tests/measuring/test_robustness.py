"""`tvmconv tune` interrupted, twice at once, on a full disk, with a worker lost: each trial is in the log once.

Nothing stays behind: no process, no temporary file, no shared memory.
"""

import os
import resource
import signal

import pytest
from farm import Farm
from processes import processes_of, wait_for
from tuning import DEADLINE, Searches, once


@pytest.fixture
def searches(tmp_path):
    searches = Searches(tmp_path)
    yield searches
    searches.close()


def test_ctrl_c_ends_with_one_line_and_the_same_command_goes_on(searches):
    search = searches.start("--trials=500")
    searches.wait_for_lines(3)
    os.killpg(search.pid, signal.SIGINT)  # as a terminal does
    out, err = search.communicate(timeout=DEADLINE)
    assert (search.returncode, out) == (130, "")
    assert err.splitlines()[1:] == [
        f"tvmconv: interrupted; {searches.log} is whole, and the same command goes on with it"
    ]
    assert searches.nothing_left()
    wanted = len(searches.trials()) + 2
    assert searches.start(f"--trials={wanted}").wait(DEADLINE) == 0
    assert len(searches.trials()) == wanted
    assert once(searches.trials())


@pytest.mark.slow
def test_ctrl_c_while_it_starts_ends_it_too(searches):
    search = searches.start("--trials=500")
    wait_for(lambda: len(processes_of(searches.folder)) > 1)
    search.send_signal(signal.SIGINT)
    _, err = search.communicate(timeout=DEADLINE)
    assert search.returncode == 130
    assert "Traceback" not in err
    assert searches.nothing_left()


@pytest.mark.slow
def test_searches_at_once_share_a_log_and_lose_and_tear_nothing(searches):
    rivals = [searches.start("--trials=8", f"--seed={seed}") for seed in (1, 2)]
    assert [search.wait(DEADLINE) for search in rivals] == [0, 0]
    trials = searches.trials()
    assert 8 <= len(trials) <= 10  # the last of both may come in at once
    assert len(trials) - len({record.identity for record in trials}) <= 2
    assert searches.nothing_left()


@pytest.mark.slow  # test_hostile.py has a disk that is full from the first record on
def test_a_disk_that_fills_up_is_one_line_and_the_log_is_whole(searches):
    limit = 1 << 23  # the largest file: room for a few records, and for what the compilers write
    searches.log.write_bytes(b"#" * (limit - 5000) + b"\n")
    search = searches.start(
        "--trials=500", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    )
    _, err = search.communicate(timeout=DEADLINE)
    assert search.returncode == 2
    assert err.splitlines()[1:] == [f"tvmconv: cannot write {searches.log}: File too large"]
    assert once(searches.trials())
    assert 1 <= len(searches.trials()) <= 10
    assert searches.lines()[-1].endswith(b"\n")
    assert searches.nothing_left()


@pytest.mark.slow
def test_a_worker_killed_in_mid_run_costs_no_trial(searches, tmp_path, tracker):
    farm = Farm(tmp_path / "workers", tracker)
    farm.folder.mkdir()
    try:
        farm.lend("k")
        farm.lend("k")
        address = "{}:{}".format(*farm.tracker)
        search = searches.start("--trials=8", "--device=rpc:k", f"--tracker={address}")
        searches.wait_for_lines(3)
        farm.workers[0].kill()
        assert search.wait(DEADLINE) == 0
    finally:
        farm.close()
    assert len(searches.trials()) == 8  # none is lost, and none is tried again
    assert once(searches.trials())
    assert all(record.ok for record in [*searches.trials(), *searches.finals()])
    assert searches.finals()
    assert searches.nothing_left()
