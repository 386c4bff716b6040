"""A model tells fast configs from slow ones on workloads that it never saw, and its file holds plain data only."""

import dataclasses
import json

import numpy as np
import pytest
import xgboost

import tvmconv as tc
from tvmconv import library, training
from tvmconv.devices import find
from tvmconv.knowledge import model
from tvmconv.knowledge.choose import promising
from tvmconv.knowledge.features import Machine
from tvmconv.knowledge.model import Knowledge
from tvmconv.knowledge.predict import predict
from tvmconv.knowledge.trees import Trees
from tvmconv.logs.record import Record

MACHINE = Machine("Some GPU", "sm_90", 100, 50e12, 2e12)
TEXTS = [
    f"conv2d:1x{c}x{side}x{side},{o}x{c}x1x1" for c, o, side in ((16, 32, 14), (32, 32, 28), (64, 16, 14), (8, 64, 28))
]
NEW = tc.parse("conv2d:1x48x20x20,24x48x1x1")


def seconds(w, space, points):
    """A made-up time: best are blocks of 64 threads, each with four sums."""
    usage = space.usage(points)
    bad = np.abs(np.log2(usage.threads / 64)) + np.abs(np.log2(usage.accumulators / 4))
    return MACHINE.least_seconds(w) * 2.0 ** (0.5 + bad)


@pytest.fixture(scope="module")
def records():
    made = []
    for text in TEXTS:
        w = tc.parse(text)
        space = library.find(w, "direct").space(w)
        points = space.sample(150, np.random.default_rng(0))
        for point, cost in zip(points, seconds(w, space, points), strict=True):
            made.append(
                Record(w, "direct", space.config(point), MACHINE.name, "cuda -arch=sm_90", times=(float(cost),))
            )
    return made


@pytest.fixture(scope="module")
def knowledge(records):
    several = {key: own + own for key, own in training.samples(records).items()}  # it takes five workloads
    return training.train(several, MACHINE, "made up")


def test_trees_say_what_xgboost_says():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(300, 5)).astype(np.float32)
    targets = rows[:, 0] * rows[:, 1] + 2
    booster = xgboost.train({"max_depth": 4}, xgboost.DMatrix(rows, label=targets), 20)
    said = Trees.of_booster(booster).predict(rows)
    np.testing.assert_allclose(said, booster.predict(xgboost.DMatrix(rows)), atol=1e-5)
    assert said.std() > 0.5


def test_what_it_predicts_for_a_new_workload_is_near_the_best(knowledge):
    space = library.find(NEW, "direct").space(NEW)
    found = predict(NEW, {"direct": space}, knowledge, 8)
    assert len(found) == 8
    costs = seconds(NEW, space, np.stack([space.point(each.config) for each in found]))
    everywhere = seconds(NEW, space, space.sample(2000, np.random.default_rng(1)))
    assert costs[0] <= np.quantile(everywhere, 0.05)
    assert costs.min() <= np.quantile(everywhere, 0.02)
    assert found == sorted(found, key=lambda each: each.careful_seconds)
    assert found == predict(NEW, {"direct": space}, knowledge, 8)
    assert 0.5 < found[0].seconds / costs[0] < 2


def test_the_file_gives_the_same_model(knowledge, tmp_path):
    knowledge.save(tmp_path / "k.npz")
    again = Knowledge.load(tmp_path / "k.npz")
    assert (again.machine, again.provenance) == (MACHINE, "made up")
    space = library.find(NEW, "direct").space(NEW)
    assert predict(NEW, {"direct": space}, again, 3) == predict(NEW, {"direct": space}, knowledge, 3)


@pytest.mark.parametrize("fault", ["text", "cut", "version", "pickle", "fields"])
def test_a_file_that_is_no_model_is_one_line(knowledge, tmp_path, fault):
    path = tmp_path / "k.npz"
    knowledge.save(path)
    if fault == "text":
        path.write_text("no archive")
    elif fault == "cut":
        path.write_bytes(path.read_bytes()[:-1000])
    elif fault == "pickle":
        np.savez(path, head=np.array([{"version": 1}], object))
    else:
        head = json.loads(np.load(path)["head"].tobytes())
        head["version"] = 99 if fault == "version" else 1
        if fault == "fields":
            del head["machine"]
        np.savez(path, head=np.frombuffer(json.dumps(head).encode(), np.uint8))
    with pytest.raises(tc.Error, match=r"k\.npz") as raised:
        Knowledge.load(path)
    assert "\n" not in str(raised.value)


@pytest.fixture
def in_use(knowledge):
    before = model._in_use.given, model._in_use.knowledge
    model.use(knowledge)
    yield
    model._in_use.given, model._in_use.knowledge = before


def test_a_kernel_is_built_as_predicted_where_the_device_is_known(in_use):
    place = find("sm_90")
    built = tc.build(NEW, arch="sm_90")
    assert built.config == promising(NEW, place)[0].config
    assert built.prediction.schedule == built.schedule.name == "direct"
    assert tc.build(NEW, "direct", arch="sm_90").prediction is None
    assert promising(NEW, find("sm_80")) == []
    assert tc.build(NEW, arch="sm_80").prediction is None


def test_what_was_learnt_of_other_knobs_is_not_used(knowledge):
    (key,) = knowledge.experts
    expert = knowledge.experts[key]
    other = Knowledge(MACHINE, {key: dataclasses.replace(expert, knobs=("tile_f", "unheard_of"))})
    space = library.find(NEW, "direct").space(NEW)
    with pytest.warns(tc.FallbackWarning, match="what was learnt of direct is of other knobs"):
        assert predict(NEW, {"direct": space}, other) == []
