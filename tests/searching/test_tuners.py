"""Tuners propose what is legal and new, repeat themselves under a seed, and find fast configs."""

import itertools
import math
import subprocess
import sys
import time

import numpy as np
import pytest

from tvmconv import Error
from tvmconv.search.recorded_space import RecordedTrial
from tvmconv.search.tuners import TUNERS, create_tuner
from tvmconv.search.tuners.bayesian import BayesianTuner, iterate_initial_candidates
from tvmconv.search.tuners.gaussian_process import GaussianProcess, GPInputs
from tvmconv.space import ChoiceKnob, Constraint, SplitKnob
from tvmconv.space.search_space import ResourceUsage, Space


def usage(columns):
    f, x = columns["tile_f"], columns["tile_x"]
    return ResourceUsage(
        threads=f[:, 2] * x[:, 2],
        shared_bytes=4 * (f[:, 1:].prod(axis=1) + x[:, 1:].prod(axis=1)) * columns["tile_rc"][:, 1],
        accumulators=f[:, 1] * f[:, 3] * x[:, 1] * x[:, 3],
        blocks=f[:, 0] * x[:, 0],
    )


def conv_space(channels=64, pixels=4096, unroll=(0, 64, 512)):
    """A space of 10^6 configs like those of convolutions."""
    knobs = [
        SplitKnob("tile_f", channels, 4, (-1, 1, 4, 8)),
        SplitKnob("tile_x", pixels, 4, (-1, 2, 16, 2)),
        SplitKnob("tile_rc", 64, 2, (-1, 4)),
        ChoiceKnob("unroll", unroll, 0),
        ChoiceKnob("order", ("rows", "columns"), "rows"),
    ]
    return Space({knob.name: knob for knob in knobs}, usage_from_columns=usage)


def small_space():
    knobs = [
        SplitKnob("tile", 48, 3, (-1, 2, 2)),
        ChoiceKnob("unroll", (0, 16, 512), 16),
        ChoiceKnob("staged", (False, True), True),
    ]
    rule = Constraint("no staged large tiles", lambda c: ~c["staged"] | (c["tile"][:, 2] < 16))
    return Space({knob.name: knob for knob in knobs}, [rule])


def cost(space, config):
    """A made-up kernel: it wants warps along x, 128 threads, 64 accumulators, eight channels a step; some fail."""
    point = space.point_from_config(config)[None]
    columns = space.columns_from_points(point) | space.compute_usage(point).to_columns()
    if columns["accumulators"][0] > 256:
        return math.inf
    wanted = {"threads": 128, "accumulators": 64, "blocks": 256}
    distance = sum(abs(math.log2(columns[name][0] / best)) for name, best in wanted.items())
    distance += abs(math.log2(columns["tile_x"][0, 2] / 32)) + abs(math.log2(columns["tile_rc"][0, 1] / 8))
    return 1e-5 * (1 + distance + (config["order"] == "rows") + 0.5 * (config["unroll"] == 0))


def search(tuner, trials, batch=8):
    found = []
    while len(found) < trials:
        measured = [RecordedTrial(config, cost(tuner.space, config)) for config in tuner.ask(batch)]
        tuner.tell(measured)
        found += measured
    return found


def guess(points):
    """What somebody who knows nothing thinks of configs."""
    return points.sum(axis=1).astype(np.float32)


def keys(space, configs):
    return [tuple(space.point_from_config(config)) for config in configs]


def legal_keys(space):
    return [*map(tuple, space.enumerated_legal)]


tuners = pytest.mark.parametrize("name", TUNERS)


@pytest.mark.sample(3)
@tuners
def test_proposals_are_legal_distinct_and_new(name):
    space = conv_space()
    tuner = create_tuner(name, space, seed=1)
    proposed = keys(space, (trial.config for trial in search(tuner, 120)))
    assert len(set(proposed)) == 120
    assert space.is_legal(np.array(proposed)).all()


@pytest.mark.sample(3)
@tuners
def test_a_space_is_proposed_to_the_last_legal_config(name):
    space = small_space()
    tuner = create_tuner(name, space)
    proposed = []
    while batch := tuner.ask(7):
        tuner.tell([RecordedTrial(config, 1e-3 if config["unroll"] else math.inf) for config in batch])
        proposed += keys(space, batch)
    assert sorted(proposed) == legal_keys(space)


@tuners
@pytest.mark.parametrize("listed", [True, False])
def test_of_a_space_without_a_legal_config_nothing_is_proposed(name, listed):
    known, none = conv_space(), Constraint("none", lambda columns: np.zeros(len(columns["unroll"]), bool))
    space = Space((small_space() if listed else conv_space(512, 8192)).knobs, [none])
    assert (space.enumerated_legal is not None) == listed
    tuner = create_tuner(name, space)
    if isinstance(tuner, BayesianTuner):
        tuner.set_prior(guess)
        tuner.tell_transfer_trials(
            known, search(create_tuner("random", known), 10)
        )  # so that models are asked from the first on
    assert tuner.ask(3) == tuner.ask(3) == []


@tuners
def test_the_same_seed_gives_the_same_proposals(name):
    first, second = (search(create_tuner(name, conv_space(), seed=5), 60) for _ in range(2))
    assert first == second


@tuners
def test_what_a_log_holds_is_not_proposed_again(name):
    space = small_space()
    known = [space.config_from_point(point) for point in space.enumerated_legal[::-2]]
    tuner = create_tuner(name, space)
    tuner.tell(RecordedTrial(config, 1e-3) for config in known)
    proposed = keys(space, tuner.ask(10**6))
    assert sorted(proposed + keys(space, known)) == legal_keys(space)


@tuners
def test_a_log_may_hold_configs_that_are_not_searched(name):
    tuner = create_tuner(name, small_space())
    tuner.tell([RecordedTrial({"tile": (-1, 5, 5)}, 1e-3), RecordedTrial({"gone": 1}, 1e-3)])
    assert len(tuner.ask(5)) == 5


@tuners
def test_what_is_taken_counts_as_proposed(name):
    space = small_space()
    tuner = create_tuner(name, space)
    first = [space.config_from_point(point) for point in space.enumerated_legal[:3]]
    tuner.tell([RecordedTrial(first[0], 1e-3)])
    assert tuner.claim_points(space.enumerated_legal, 2) == first[1:]  # in their order, without what was learnt
    assert tuner.claim_points(space.enumerated_legal[:3], 2) == []
    rest = keys(space, tuner.ask(10**6))
    assert sorted(rest) == legal_keys(space)[3:]


@tuners
def test_near_a_config_are_its_fresh_neighbours_each_once(name):
    space = small_space()
    tuner, here = create_tuner(name, space), space.default
    neighbours = {*map(tuple, space.list_neighbors(space.point_from_config(here)))}
    learnt = space.config_from_point(space.list_neighbors(space.point_from_config(here))[0])
    tuner.tell([RecordedTrial(here, 1e-3), RecordedTrial(learnt, 1e-3)])
    few, others = tuner.ask_neighbors(here, 4), tuner.ask_neighbors(here, 10**6)
    assert len(few) == 4
    assert sorted(keys(space, few + others)) == sorted(neighbours - set(keys(space, [learnt])))
    assert tuner.ask_neighbors(here, 5) == []


@tuners
def test_nothing_is_near_a_config_that_is_not_searched(name):
    tuner = create_tuner(name, small_space())
    assert tuner.ask_neighbors({"tile": (-1, 5, 5)}, 3) == tuner.ask_neighbors({"gone": 1}, 3) == []
    assert tuner.ask_neighbors(small_space().default, 0) == []


@pytest.mark.slow
def test_model_takes_first_the_neighbours_that_it_believes_fast():
    space = conv_space()
    tuner = create_tuner("gp", space)
    trials = search(tuner, 200)
    best = min(trials, key=lambda trial: trial.cost)
    near = [cost(space, config) for config in tuner.ask_neighbors(best.config, 10**6)]
    assert np.median(near[: len(near) // 4]) < 0.8 * np.median(near)


LOADED_AFTER = """
import math, sys
from tvmconv.space import ChoiceKnob
from tvmconv.space.search_space import Space
from tvmconv.search.recorded_space import RecordedTrial
from tvmconv.search.tuners import create_tuner
failures, quick = int(sys.argv[1]), sys.argv[2] == "quick"
tuner = create_tuner("gp", Space({name: ChoiceKnob(name, range(20), 0) for name in "ab"}))
configs = tuner.ask(12, skip_model=quick)
tuner.tell(RecordedTrial(c, math.inf if n < failures else 1e-6 * (1 + n)) for n, c in enumerate(configs))
assert len(tuner.ask(3, skip_model=quick)) == len(tuner.ask_neighbors(configs[-1], 3, skip_model=quick)) == 3
print(*(name in sys.modules for name in ("scipy.optimize", "xgboost")))
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("failures", "how", "loaded"),
    [(0, "", "True False"), (4, "", "True True"), (4, "quick", "False False")],
    ids=["none failed", "some failed", "quick, some failed"],
)
def test_libraries_of_cost_model_are_loaded_when_needed(failures, how, loaded):
    command = [sys.executable, "-c", LOADED_AFTER, str(failures), how]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == loaded


@pytest.mark.parametrize("name", ["gp", "ga"])
def test_the_default_comes_first(name):
    space = conv_space()
    assert create_tuner(name, space, seed=3).ask(4)[0] == space.default


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gp", "ga"])
def test_learning_beats_chance(name):
    def mean_best(tuner):
        return np.mean([min(t.cost for t in search(create_tuner(tuner, conv_space(), seed), 80)) for seed in range(4)])

    assert mean_best(name) < 0.9 * mean_best("random")


def test_a_batch_of_the_model_holds_no_near_copies():
    space = conv_space()
    tuner = create_tuner("gp", space)
    search(tuner, 40)
    points = [space.point_from_config(config) for config in tuner.ask(24)]
    assert all(np.count_nonzero(a != b) >= 2 for a, b in itertools.combinations(points, 2))


def test_process_interpolates_and_knows_where_it_does_not_know():
    rng = np.random.default_rng(0)
    points = rng.integers(0, 3, (40, 2)).astype(np.int32)
    features = rng.random((40, 3))
    values = 3 * features[:, 0] + (points[:, 1] == 2)
    known, asked = np.arange(30), np.arange(30, 40)
    process = GaussianProcess(GPInputs(features, points)[known], values[known])
    mean, deviation = process.predict(GPInputs(features, points)[asked])
    assert np.corrcoef(mean, values[asked])[0, 1] > 0.95
    _, at_known = process.predict(GPInputs(features, points)[known])
    _, far = process.predict(GPInputs(features + 5, points))
    assert at_known.max() < 0.3 * far.min()
    assert deviation.max() < far.min()


def test_what_was_learnt_from_another_workload_serves_this_one():
    space, other = conv_space(), conv_space(channels=256, pixels=1024, unroll=(0, 512))
    trials = search(create_tuner("random", other, seed=9), 200)
    tuner = create_tuner("gp", space, seed=4)
    tuner.tell_transfer_trials(other, trials)
    transferred = [cost(space, config) for config in tuner.ask(16)[1:]]
    chance = [cost(space, config) for config in create_tuner("random", space, seed=4).ask(64)]
    assert np.median(transferred) < 0.7 * np.median(chance)


def test_a_proposal_is_fast_after_thousands_of_trials():
    space = conv_space()
    tuner = create_tuner("gp", space)
    trials = [RecordedTrial(config, cost(space, config)) for config in create_tuner("random", space, seed=9).ask(2000)]
    tuner.tell(trials[:50])
    tuner.ask(1)  # imports XGBoost
    tuner.tell(trials)
    start = time.process_time()
    assert len(tuner.ask(64)) == 64
    assert time.process_time() - start < 2  # about 0.2 s on a machine that does nothing else


def test_an_unknown_tuner_is_answered_with_those_there_are():
    with pytest.raises(Error, match=r"no tuner 'annealing'; there are: gp, ga, random, grid"):
        create_tuner("annealing", small_space())


def estimated_space():
    """A space whose schedule believes that many elements a tile and little unrolling are fast."""

    def believed(columns):
        tile, one = columns["tile"], np.ones(len(columns["tile"]))
        return ResourceUsage(one, one, one, one, estimate=100 / tile[:, 2] + columns["unroll"])

    space = small_space()
    return Space(space.knobs, space.constraints, usage_from_columns=believed)


def test_first_proposals_are_what_the_schedule_believes_in():
    space = estimated_space()
    first, *others = create_tuner("gp", space, seed=1).ask(6)
    assert first == space.default
    estimates = [space.compute_usage(space.point_from_config(config)[None]).estimate[0] for config in others]
    assert estimates == sorted(estimates)
    assert estimates[0] == min(space.compute_usage(space.enumerated_legal).estimate)
    points = [space.point_from_config(config) for config in others]
    assert all(np.count_nonzero(a != b) > 1 for a, b in itertools.combinations(points, 2))


def test_a_draft_has_every_config_once():
    space = estimated_space()
    drafted = [point.tobytes() for point in iterate_initial_candidates(space)]
    assert len(drafted) == len(set(drafted)) == len(space.enumerated_legal)
    assert list(iterate_initial_candidates(small_space())) == []


@pytest.mark.parametrize(("num_measured", "sides"), [(40, [0] * 16), (60, [*[0] * 7, 1] * 2)])
def test_every_eighth_config_has_the_slow_option_of_two(num_measured, sides):
    numbers = tuple(range(1, 33))
    space = Space(
        {"side": ChoiceKnob("side", (0, 1), 0), "a": ChoiceKnob("a", numbers, 1), "b": ChoiceKnob("b", numbers, 1)}
    )
    tuner = create_tuner("gp", space)
    configs = create_tuner("random", space, seed=2).ask(num_measured)
    tuner.tell(RecordedTrial(config, (config["a"] + config["b"]) * 10.0 ** config["side"]) for config in configs)
    assert [config["side"] for _ in sides for config in tuner.ask(1)] == sides


def test_trials_of_another_workload_count_beside_a_prior():
    space, other = conv_space(), conv_space(channels=256)
    tuner = create_tuner("gp", space)
    tuner.set_prior(guess)
    tuner.tell_transfer_trials(other, search(create_tuner("random", other), 20))
    assert len({*map(str, search(tuner, 24))}) == 24
