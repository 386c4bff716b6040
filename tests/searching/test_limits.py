"""A time limit holds for a whole search and for a whole network, whatever trials take; what did not fit is named."""

import time
from dataclasses import replace

import pytest
from instant import Clock, made_up
from searches import WORKLOAD, append, search, trials_of

import tvmconv as tc
from tvmconv.deadline import SLACK_FRACTION, SLACK_SECONDS, Deadline
from tvmconv.devices import find_device
from tvmconv.search.options import TuneOptions
from tvmconv.search.result import SkippedPhase
from tvmconv.search.search import EXTRA_FIRST_TRIAL_SECONDS
from tvmconv.search.task_scheduler import tune_tasks
from tvmconv.search.time_budget import MIN_TASK_SECONDS
from tvmconv.search.tune import tune_all
from tvmconv.search.tuners import BayesianTuner

LAYERS = [tc.parse(f"conv2d:1x{c}x14x14,{c}x{c}x3x3,s1,p1") for c in (8, 64, 16, 32)]


@pytest.fixture
def clock(instant, monkeypatch):
    """The clock that searches go by, which goes on while they wait for measurements alone."""
    instant.clock = Clock()
    monkeypatch.setattr(time, "monotonic", instant.clock)
    return instant.clock


def longest(seconds):
    """How long what is limited to some seconds may take, with the tenth that passes between two looks at the clock."""
    return seconds * (1 + SLACK_FRACTION) + SLACK_SECONDS + 0.11


@pytest.mark.parametrize("duration", [0.25, 2.0])
@pytest.mark.parametrize("seconds", [1.0, 8.0])
def test_a_search_ends_within_its_limit(log, instant, clock, seconds, duration):
    begun, instant.duration = clock.now, lambda trial: duration
    search(log, seconds=seconds, measure_baseline=True, remeasure_best=True)
    assert clock.now - begun <= longest(seconds)


@pytest.mark.parametrize("seconds", [1.0, 8.0])
@pytest.mark.parametrize(("duration", "has_config"), [(6.0, True), (100.0, False)])
def test_a_search_without_any_config_goes_on_for_some_time(log, instant, clock, seconds, duration, has_config):
    begun, instant.duration = clock.now, lambda trial: duration
    tuned = search(log, seconds=seconds, measure_baseline=True, remeasure_best=True)
    assert clock.now - begun <= longest(seconds) + EXTRA_FIRST_TRIAL_SECONDS
    assert (SkippedPhase.SEARCH not in tuned.omitted) == has_config


def test_a_first_config_is_waited_for_beyond_the_limit(log, instant, clock):
    instant.duration = lambda trial: 3.0
    tuned = search(log, seconds=1.0)
    assert len(trials_of(log)) == 1
    assert tuned.omitted == set()


@pytest.mark.parametrize(
    ("duration", "num_trials"),
    [(0.2, 4), (0.5, 4), (1.0, 2)],  # two for each of two builders, of which the last timings leave time for two
    ids=["after the first", "within the slack", "until the last timings"],
)
def test_first_configs_are_awaited_where_the_start_took_the_time(log, instant, clock, duration, num_trials):
    instant.duration, begun = (lambda trial: duration), clock.now
    request = TuneOptions("random", seconds=2.0, log=log, measure_baseline=False, started_at=begun - 1.9)
    tuned = tune_all(WORKLOAD, ["tiling"], [find_device("opencl:0")], request, lambda status: None)
    assert len(trials_of(log)) == num_trials
    assert clock.now - begun + 1.9 <= longest(2.0)
    assert SkippedPhase.SEARCH not in tuned.omitted


def test_next_search_is_prepared_after_the_first_trials(log, instant, clock):
    def prepare_next():
        num_trials.append(len(trials_of(log)))
        clock.now += 9.0  # results of other trials arrive meanwhile

    instant.duration, num_trials = (lambda trial: 0.5), []
    request = TuneOptions("random", seconds=2.0, log=log, measure_baseline=False, started_at=clock.now - 1.9)
    device = find_device("opencl:0")
    tune_all(WORKLOAD, ["tiling"], [device], request, lambda status: None, prepare_next=prepare_next)
    assert num_trials == [4]  # two for each of two builders


@pytest.mark.parametrize(("counts_from_ready_workers", "num_trials"), [(True, 10), (False, 1)])
def test_start_of_processes_is_no_part_of_a_suite_layers_time(
    log, instant, clock, monkeypatch, counts_from_ready_workers, num_trials
):
    def wait_for_worker(pool, key, timeout):
        clock.now += 5.0
        return True

    monkeypatch.setattr("tvmconv.measure.workers.pool.WorkerPool.wait_for_worker", wait_for_worker)
    instant.duration, request = (lambda trial: 0.2), TuneOptions("random", seconds=2.0, log=log, measure_baseline=False)
    request = replace(
        request,
        started_at=clock.now - 1.9,
        remeasure_best=False,
        waits_for_first_trials=False,
        counts_from_ready_workers=counts_from_ready_workers,
    )
    tune_all(WORKLOAD, ["tiling"], [find_device("opencl:0")], request, lambda status: None)
    assert len(trials_of(log)) == num_trials


def test_records_of_an_earlier_session_spare_the_wait(log, instant, clock):
    instant.duration = lambda trial: 0.5
    append(log, [made_up(WORKLOAD, "tiling", {"no_knob": 1}, find_device("opencl:0").name)])
    search(log, seconds=0.7)
    assert len(trials_of(log)) == 2


@pytest.mark.parametrize(("seconds", "quick"), [(2.0, True), (60.0, False)])
def test_short_search_loads_no_cost_model(log, instant, clock, monkeypatch, seconds, quick):
    asked, propose = [], BayesianTuner.ask

    def observed(self, n, **how):
        asked.append(how["skip_model"])
        return propose(self, n, **how)

    monkeypatch.setattr(BayesianTuner, "ask", observed)
    instant.duration = lambda trial: 0.05
    search(log, seconds=seconds, tuner="gp", trials=60)
    assert {*asked} == {quick}


def test_a_naive_schedule_that_takes_too_long_is_given_up(log, instant, clock):
    instant.duration = lambda trial: 0.5 if trial.config else 5.0
    append(log, [made_up(WORKLOAD, "tiling", {"no_knob": 1}, find_device("opencl:0").name)])
    tuned = search(log, seconds=2.0, measure_baseline=True)
    assert tuned.omitted == {SkippedPhase.BASELINE}
    assert tuned.status.reference is None


def test_last_timings_that_are_cut_off_leave_the_fastest_trial(log, instant, clock):
    instant.duration = lambda trial: 30.0 if trial.is_final else 0.5
    tuned = search(log, seconds=10.0, remeasure_best=True)
    assert tuned.final == min(trials_of(log), key=lambda record: record.cost)
    assert tuned.omitted == {SkippedPhase.FINAL_MEASUREMENTS}


def searched(network, opencl, log, seconds):
    """What came of a network's searches, in the order in which they were done."""
    request = TuneOptions("random", log=log, measure_baseline=False)
    searches = tune_tasks(network, [opencl], request, deadline=Deadline.after(seconds))
    return {workload: one(lambda status: None) for workload, one in searches}


@pytest.mark.sample(1)
@pytest.mark.parametrize("seconds", [1.0, 20.0])
@pytest.mark.parametrize("duration", [0.25, 2.0])
def test_a_network_is_searched_within_its_limit(log, instant, clock, opencl, seconds, duration):
    begun, instant.duration = clock.now, lambda trial: duration
    searched(dict.fromkeys(LAYERS, 1), opencl, log, seconds)
    assert clock.now - begun <= longest(seconds)


def test_the_layers_that_cost_a_network_most_are_searched_first(log, instant, clock, opencl):
    instant.duration = lambda trial: 0.2
    found = searched(dict.fromkeys(LAYERS, 1), opencl, log, 2 * MIN_TASK_SECONDS)
    assert [workload.O for workload in found] == [64, 32, 16, 8]
    left_out = [workload.O for workload, tuned in found.items() if SkippedPhase.SEARCH in tuned.omitted]
    assert left_out == [16, 8]
    assert found[LAYERS[0]].status.num_trials == 0


def test_the_seconds_left_are_never_negative(log, instant, clock):
    instant.duration, left = (lambda trial: 1.5), []
    search(log, seconds=2.0, progress=lambda status: left.append(status.remaining_seconds))
    assert left
    assert min(left) >= 0.0
