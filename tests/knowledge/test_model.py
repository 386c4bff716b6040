"""A model tells fast configs from slow ones on workloads that it never saw; its file holds plain data only."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xgboost
from learnt import MACHINE, NEW, SHAPES, knowledge, records, seconds

import tvmconv as tc
from tvmconv import compat, registry
from tvmconv import training as train
from tvmconv.cost_model import model
from tvmconv.cost_model.equivalent import make_16_bit_equivalent
from tvmconv.cost_model.model import CostModel
from tvmconv.cost_model.predict import predict
from tvmconv.cost_model.recommend import recommend_configs
from tvmconv.cost_model.similarity import layer_key
from tvmconv.cost_model.trees import Trees
from tvmconv.devices import find_device
from tvmconv.logs.record import Record
from tvmconv.search.options import TuneOptions
from tvmconv.search.setup import ScheduleSelection, create_search


def test_trees_say_what_xgboost_says():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(300, 5)).astype(np.float32)
    targets = rows[:, 0] * rows[:, 1] + 2
    booster = xgboost.train({"max_depth": 4}, xgboost.DMatrix(rows, label=targets), 20)
    said = Trees.from_booster(booster).predict(rows)
    np.testing.assert_allclose(said, booster.predict(xgboost.DMatrix(rows)), atol=1e-5)
    assert said.std() > 0.5


def test_what_it_predicts_for_a_new_workload_is_near_the_best():
    space = registry.find_schedule(NEW, "direct").space(NEW)
    found = predict(NEW, {"direct": space}, knowledge(), 8)
    assert len(found) == 8
    costs = seconds(NEW, space, np.stack([space.point_from_config(each.config) for each in found]))
    everywhere = seconds(NEW, space, space.sample_legal(2000, np.random.default_rng(1)))
    assert costs[0] <= np.quantile(everywhere, 0.1)
    assert costs.min() <= np.quantile(everywhere, 0.05)
    assert found == sorted(found, key=lambda each: each.upper_bound_seconds)
    assert found == predict(NEW, {"direct": space}, knowledge(), 8)
    assert 0.5 < found[0].seconds / costs[0] < 2


def test_the_file_gives_the_same_model(tmp_path):
    knowledge().save(tmp_path / "k.npz")
    again = CostModel.load(tmp_path / "k.npz")
    assert (again.device_spec, again.provenance, again.training_layers) == (
        MACHINE,
        "made up",
        knowledge().training_layers,
    )
    space = registry.find_schedule(NEW, "direct").space(NEW)
    assert predict(NEW, {"direct": space}, again, 3) == predict(NEW, {"direct": space}, knowledge(), 3)


def assert_refused(path):
    with pytest.raises(tc.Error, match=rf"cannot read .*{path.name}|{path.name} has version") as raised:
        CostModel.load(path)
    assert "\n" not in str(raised.value)


def first(head):
    return head["experts"][0]


FAULTS = {
    "no head": lambda head, arrays: arrays.pop("head"),
    "no machine": lambda head, arrays: head.pop("machine"),
    "a version to come": lambda head, arrays: head.update(version=99),
    "nodes past the last": lambda head, arrays: arrays.update({"0.0.left": arrays["0.0.left"] + 10**6}),
    "a node past 31 bits": lambda head, arrays: arrays["0.0.left"].__setitem__(0, 2**31 - 1),
    "fractions for nodes": lambda head, arrays: arrays.update({"0.0.left": arrays["0.0.left"].astype(float)}),
    "fractions for roots": lambda head, arrays: arrays.update({"0.0.roots": arrays["0.0.roots"].astype(float)}),
    "roots in a row": lambda head, arrays: arrays.update({"0.0.roots": arrays["0.0.roots"][None]}),
    "leaves that are no numbers": lambda head, arrays: arrays["0.0.threshold"].fill(np.nan),
    "leaves without end": lambda head, arrays: arrays["0.0.threshold"].fill(1e30),
    "no base": lambda head, arrays: first(head)["members"][0].update(base=None),
    "a depth of 2.5": lambda head, arrays: first(head)["members"][0].update(depth=2.5),
    "no forests": lambda head, arrays: first(head).update(members=[]),
    "no features": lambda head, arrays: first(head).update(names=[]),
    "a portfolio of numbers": lambda head, arrays: first(head).update(portfolio=[1]),
    "a factor past 63 bits": lambda head, arrays: first(head).update(portfolio=[{"tile_f": [-1, 1, 1, 2**63]}]),
    "a choice that is none": lambda head, arrays: first(head).update(portfolio=[{"unroll_explicit": None}]),
    "an example of a filter": lambda head, arrays: first(head).update(examples=[["filter1d:9,k3", {}, 1.0]]),
    "layers that are a number": lambda head, arrays: head.update(taught=7),
    "a machine without arithmetic": lambda head, arrays: head["machine"].update(flops=0),
    "a machine without end": lambda head, arrays: head["machine"].update(bandwidth=10**400),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A file of the made-up model, and its arrays."""
    path = tmp_path_factory.mktemp("model") / "k.npz"
    knowledge().save(path)
    return path, dict(np.load(path))


@pytest.mark.parametrize("name", FAULTS)
def test_a_file_that_could_not_be_asked_is_one_line(saved, tmp_path, name):
    arrays = {key: array.copy() for key, array in saved[1].items()}
    head = json.loads(arrays["head"].tobytes())
    FAULTS[name](head, arrays)
    if "head" in arrays:
        arrays["head"] = np.frombuffer(json.dumps(head).encode(), np.uint8)
    np.savez(tmp_path / "k.npz", **arrays)
    assert_refused(tmp_path / "k.npz")


@pytest.mark.parametrize("fault", ["text", "cut", "pickle"])
def test_a_file_that_is_no_archive_of_arrays_is_one_line(saved, tmp_path, fault):
    path = tmp_path / "k.npz"
    if fault == "pickle":
        np.savez(path, head=np.array([{"version": 1}], object))
    else:
        path.write_bytes(b"no archive" if fault == "text" else saved[0].read_bytes()[:-1000])
    assert_refused(path)


def test_kernel_is_built_as_predicted_where_the_device_is_known(in_use):
    place = find_device("sm_90")
    built = tc.build(NEW, arch="sm_90")
    assert built.config == recommend_configs(NEW, place)[0].config
    assert built.prediction.schedule == built.schedule.name == "direct"
    assert tc.build(NEW, "direct", arch="sm_90").prediction is None
    assert recommend_configs(NEW, find_device("sm_80")) == []
    assert tc.build(NEW, arch="sm_80").prediction is None


def test_what_was_learnt_of_other_knobs_is_not_used():
    (key,) = knowledge().schedule_models
    expert = knowledge().schedule_models[key]
    other = CostModel(MACHINE, {key: replace(expert, knobs=("tile_f", "tile_y"))})
    space = registry.find_schedule(NEW, "direct").space(NEW)
    with pytest.warns(tc.FallbackWarning, match="the cost model of direct has other knobs"):
        assert predict(NEW, {"direct": space}, other) == []


def test_a_knob_that_was_added_later_keeps_its_default(monkeypatch):
    (key,) = knowledge().schedule_models
    schedule_model = knowledge().schedule_models[key]
    known = replace(schedule_model, knobs=tuple(knob for knob in schedule_model.knobs if knob != "copy_order"))
    monkeypatch.setitem(compat.ADDED_KNOBS, "direct", frozenset({"copy_order"}))
    space = registry.find_schedule(NEW, "direct").space(NEW)
    predictions = predict(NEW, {"direct": space}, CostModel(MACHINE, {key: known}))
    assert {each.config["copy_order"] for each in predictions} == {space.default["copy_order"]}


def test_of_dtypes_and_layouts_not_measured_nothing_is_known(in_use):
    assert recommend_configs(NEW, find_device("sm_90"))
    for text in (f"{NEW},nhwc", f"{NEW},f16,nhwc"):
        assert recommend_configs(tc.parse(text), find_device("sm_90")) == []


def test_8_bit_convolutions_take_configs_of_16_bit_ones_with_equal_bytes():
    text, place = "conv2d:32x256x14x14,256x256x3x3,s1,p1,i8,nhwc,scale,bias,quantize", find_device("sm_90")
    equivalent = make_16_bit_equivalent(tc.parse(text))
    assert equivalent is not None
    assert equivalent.text == "conv2d:32x128x14x14,256x128x3x3,s1,p1,f16,nhwc,scale,bias"
    schedule = registry.find_schedule(equivalent, "hopper")
    spaces = {"hopper": schedule.space(equivalent, place.limits)}
    known = [each.config for each in recommend_configs(equivalent, place, 8, spaces)]
    configs = [each.config for each in recommend_configs(tc.parse(text), place)]
    assert configs
    assert all(any(config.items() <= other.items() for other in known) for config in configs)
    depthwise = make_16_bit_equivalent(tc.parse("conv2d:2x48x14x14,48x1x3x3,s1,p1,g48,i8,nhwc"))
    assert depthwise is not None
    assert depthwise.C == 48
    assert make_16_bit_equivalent(equivalent) is None
    assert make_16_bit_equivalent(tc.parse("conv2d:2x3x14x14,16x3x3x3,s1,p1,i8,nhwc")) is None


def test_default_comes_first_unless_another_promises_more(monkeypatch):
    w, place = tc.parse("conv2d:2x640x32x32,640x640x3x3,f16,nhwc"), find_device("sm_90")
    first = registry.schedules_to_tune(w, place.kind, place.arch)[0]
    default = (first.name, first.space(w, place.limits).default)
    orders = {}
    for lead in (0.0, 1e9):
        monkeypatch.setattr("tvmconv.cost_model.predict.MIN_SPEEDUP_OVER_DEFAULT", lead)
        orders[lead] = [(each.schedule, each.config) for each in recommend_configs(w, place)]
    assert orders[1e9] == [default, *(each for each in orders[0.0] if each != default)]
    assert orders[0.0][0] != default


def faster_by(schedule, share, text=""):
    """One record of each workload of the made-up ones, by another schedule, with a share of the time of their best."""
    best = {}
    for each in records():
        w = tc.parse(f"{each.workload}{text}")
        best[w] = min(share * each.cost, best.get(w, 1.0))
    spaces = {w: registry.find_schedule(w, schedule).space(w) for w in best}
    return [
        Record(w, schedule, spaces[w].default, MACHINE.name, "cuda -arch=sm_90", times=(cost,))
        for w, cost in best.items()
    ]


def test_nothing_is_learnt_of_a_dtype_that_is_never_fast(monkeypatch):
    monkeypatch.setattr(train, "BOOSTING_ROUNDS", 3)
    half = [replace(each, workload=tc.parse(f"{each.workload},f16,nhwc")) for each in records()]
    slow = train.train(train.collect_samples([*records(), *half, *faster_by("tiling", 0.1, ",f16,nhwc")]), MACHINE)
    assert slow.schedule_models["direct"].kinds == ("float32 nchw",)


@pytest.mark.parametrize("workers", [1, 2, 15])
def test_search_begins_with_a_default_per_builder_then_predictions(in_use, tmp_path, workers):
    place = find_device("sm_90")
    field = ScheduleSelection.resolve(NEW, [], place)
    contest = create_search(NEW, field, place, TuneOptions(log=tmp_path / "log.jsonl", workers=workers))
    defaults = [(s.name, s.space(NEW, place.limits).default) for s in field.high_priority]
    assert contest.ask(20) == defaults[:workers]
    expected = [(each.schedule, each.config) for each in recommend_configs(NEW, place, 3)]
    assert contest.ask(20)[:3] == expected
    yardstick = TuneOptions("random", log=tmp_path / "log.jsonl")
    assert create_search(NEW, ScheduleSelection.resolve(NEW, [], place), place, yardstick).ask(1) != expected[:1]


def test_given_configs_precede_defaults(in_use, tmp_path):
    place = find_device("sm_90")
    field = ScheduleSelection.resolve(NEW, [], place)
    given = [(each.schedule, each.config) for each in recommend_configs(NEW, place, 2)]
    unknown = ("no schedule", {})
    options = TuneOptions(log=tmp_path / "log.jsonl", workers=3, first_configs=[unknown, *given])
    assert create_search(NEW, field, place, options).ask(20)[:2] == given


def test_defaults_that_the_model_does_not_know_are_measured_soon(in_use, tmp_path):
    place = find_device("sm_90")
    field = ScheduleSelection.resolve(NEW, [], place)
    contest = create_search(NEW, field, place, TuneOptions(log=tmp_path / "log.jsonl", workers=1))
    soon = contest.ask(1) + contest.ask(3 + len(field.high_priority))
    unheard = [s for s in field.high_priority if s.name not in model.cost_model_for(place.arch).schedule_models]
    assert unheard
    assert all((s.name, s.space(NEW, place.limits).default) in soon for s in unheard)


@pytest.mark.slow
def test_model_of_the_package_predicts_for_every_network():
    shipped = CostModel.load(model.PACKAGED_MODEL)
    place = find_device("sm_90")
    for dtype, layout in (("float32", "nchw"), ("float16", "nhwc"), ("tf32", "nhwc")):
        for layer in tc.suite("yolov8s", dtype=dtype, layout=layout)[1:40:13]:
            w = layer.workload
            there = {s.name: s.space(w, place.limits) for s in registry.schedules_to_tune(w, "cuda", "sm_90")}
            (best, *_) = predict(w, there, shipped)
            space = there[best.schedule]
            assert space.is_legal(space.point_from_config(best.config)[None])[0]
            assert best.seconds >= shipped.device_spec.roofline_seconds(w) / 2


def test_layers_taught_are_known_in_any_batch_dtype_and_layout():
    assert knowledge().training_layers == {layer_key(record.workload) for record in records()}
    assert knowledge().count_training_layers([NEW]) == 0
    w = tc.parse("conv2d:8x64x56x56,64x32x3x3,s1,p1,g2,f16,nhwc,bias,relu")
    assert layer_key(w) == "conv2d:1x64x56x56,64x32x3x3,s1,p1,g2"
    assert layer_key(tc.parse("filter1d:99,k5,clamp")) == "filter1d:99,k5,clamp"


LAYERS = Path(__file__).parents[2] / "tuning_logs/sampled/layers.jsonl.xz"


@pytest.mark.slow
def test_what_was_learnt_of_images_serves_signals_and_volumes():
    """Of a layer's measured configs, what the model takes to be the fastest is nearly so: it has not seen these."""
    found = train.collect_samples(each for each in train.read_valid_records(LAYERS) if each.schedule == "implicit_gemm")
    machine = CostModel.load(model.PACKAGED_MODEL).device_spec
    of_images = train.train({key: own for key, own in found.items() if key[0] == "conv2d"}, machine)
    ratios, at_random = [], []
    for sample in (*found["conv1d", "implicit_gemm"], *found["conv3d", "implicit_gemm"]):
        expert = of_images.find_schedule_model(sample.workload, "implicit_gemm", sample.space)
        if expert and len(sample.points) >= 8:
            picked = expert.log2_slowdown(sample.workload, sample.space, sample.points, machine).mean(axis=0).argmin()
            ratios.append(sample.seconds[picked] / sample.seconds.min())
            at_random.append(np.median(sample.seconds) / sample.seconds.min())
    assert len(ratios) >= 20
    assert statistics.geometric_mean(ratios) < 1.35 < statistics.geometric_mean(at_random)


GRADIENTS = [f"conv2d_dgrad:2x{c}x{n}x{n},{o}x{c}x3x3,s1,p1" for c, o, n in SHAPES]


def gradient_records(device=MACHINE):
    """Made-up times of gradients, which a device with half the rates needs twice."""
    for text in GRADIENTS:
        w = tc.parse(text)
        space = registry.find_schedule(w, "implicit_gemm").space(w)
        points = space.sample_legal(12, np.random.default_rng(0))
        for point, cost in zip(points, seconds(w, space, points), strict=True):
            times = (float(cost) * MACHINE.bandwidth / device.bandwidth,)
            config = space.config_from_point(point)
            yield Record(w, "implicit_gemm", config, device.name, "cuda -arch=sm_90", times=times)


def test_gradients_have_kinds_and_features_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setattr(train, "BOOSTING_ROUNDS", 3)
    learnt = train.train(train.collect_samples(gradient_records()), MACHINE)
    learnt.save(tmp_path / "k.npz")
    expert = CostModel.load(tmp_path / "k.npz").schedule_models["implicit_gemm"]
    assert expert.kinds == ("dgrad float32 nchw",)
    assert {"w.dgrad", "w.wgrad", "w.transpose"} <= {*expert.names}
    gradient = tc.parse("conv2d_dgrad:2x32x20x20,32x32x3x3,s1,p1")
    space = registry.find_schedule(gradient, "implicit_gemm").space(gradient)
    predicted = predict(gradient, {"implicit_gemm": space}, learnt)
    assert predicted[0].schedule == "implicit_gemm"
    for other in (gradient.forward, tc.parse(gradient.text.replace("dgrad", "wgrad"))):
        assert expert.view(other) is None
    packaged = CostModel.load(model.PACKAGED_MODEL)
    models = packaged.schedule_models.values()
    assert not any(each.view(gradient) for each in models)
    assert any(each.view(gradient.forward) for each in models)


def test_operators_of_a_schedule_may_lack_features_of_others(monkeypatch):
    monkeypatch.setattr(train, "BOOSTING_ROUNDS", 3)
    records = []
    for text in [gradient.replace("dgrad", kind) for kind in ("dgrad", "wgrad") for gradient in GRADIENTS[:4]]:
        w = tc.parse(f"{text},f16,nhwc")
        space = registry.find_schedule(w, "mma_sync").space(w)
        for number, point in enumerate(space.sample_legal(6, np.random.default_rng(0))):
            config, times = space.config_from_point(point), (1e-5 * (1 + number),)
            records.append(Record(w, "mma_sync", config, MACHINE.name, "cuda -arch=sm_90", times=times))
    expert = train.train(train.collect_samples(records), MACHINE).schedule_models["mma_sync"]
    assert "cluster" in expert.names  # of a dgrad alone, whose sums may meet in a cluster
    assert {"dgrad float16 nhwc", "wgrad float16 nhwc"} == {*expert.kinds}
    assert np.isfinite(expert.log2_slowdown(w, space, space.sample_legal(2, np.random.default_rng(1)), MACHINE)).all()


def test_records_of_another_device_count_relative_to_its_rates(monkeypatch):
    monkeypatch.setattr(train, "BOOSTING_ROUNDS", 3)
    slow = replace(MACHINE, name="Slow GPU", flops=MACHINE.flops / 2, bandwidth=MACHINE.bandwidth / 2)
    slow = replace(slow, launch_seconds=2 * MACHINE.launch_seconds)
    found = train.collect_samples([*gradient_records(), *gradient_records(slow)], device_specs={slow.name: slow})
    samples = found["conv2d_dgrad", "implicit_gemm"]
    assert len(samples) == 2 * len(GRADIENTS)
    for sample in samples:
        spec = sample.device_spec or MACHINE
        slowdown = np.log2(sample.seconds / spec.roofline_seconds(sample.workload))
        usage = sample.space.compute_usage(sample.points)
        expected = 0.5 + np.abs(np.log2(usage.threads / 64)) + np.abs(np.log2(usage.accumulators / 4))
        np.testing.assert_allclose(slowdown, expected, rtol=1e-6)
    assert train.train(found, MACHINE).device_spec == MACHINE


@pytest.mark.slow
def test_a_schedule_has_one_expert_of_all_operators(monkeypatch):
    monkeypatch.setattr(train, "BOOSTING_ROUNDS", 3)
    found = train.collect_samples(
        each for each in train.read_valid_records(LAYERS) if each.schedule == "depthwise_nhwc"
    )
    assert {operator for operator, _ in found} == {"conv1d", "conv2d", "conv3d"}
    learnt = train.train(found, CostModel.load(model.PACKAGED_MODEL).device_spec)
    (expert,) = learnt.schedule_models.values()
    assert {each.workload.partition(":")[0] for each in expert.examples} == {"conv1d", "conv2d", "conv3d"}
    layers = [sample.workload for own in found.values() for sample in own]
    assert (
        learnt.count_training_layers(layers)
        == learnt.count_training_layers([replace(w, N=w.N + 1, dtype="bfloat16") for w in layers])
        == len(layers)
    )
    assert learnt.count_training_layers([replace(w, C=2 * w.C, O=2 * w.O, groups=2 * w.groups) for w in layers]) == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("text", ["conv1d:1x80x3000,384x80x3,p1,f16,nhwc", "conv3d:1x64x8x28x28,64x64x3x3x3,p1"])
def test_signals_and_volumes_are_built_as_predicted(text):
    w = tc.parse(text)
    built = tc.build(w, arch="sm_90")
    assert built.prediction
    assert built.config == recommend_configs(w, find_device("sm_90"))[0].config


def predict_best_us(text):
    (best, *_) = recommend_configs(tc.parse(text), find_device("sm_90"))
    return best.seconds * 1e6


@pytest.mark.slow
def test_only_conversions_that_a_config_needs_are_predicted():
    """X of filters of one tap, and of first layers, is read as it lies; others cost at most a copy of X."""
    for sizes in ("1x256x56x56,128x256x1x1,s1,p0", "1x3x224x224,64x3x7x7,s2,p3"):
        first, last = (predict_best_us(f"conv2d:{sizes},f16{layout}") for layout in ("", ",nhwc"))
        assert abs(first / last - 1) < 0.1
    first, last = (predict_best_us(f"conv2d:32x128x28x28,128x128x3x3,s1,p1,f16{layout}") for layout in ("", ",nhwc"))
    assert last < first < last + 1.1 + 2 * 32 * 128 * 28 * 28 * 2 / 2.5e6


def test_predictions_compare_how_channels_first_pixels_are_loaded():
    """On an H200 the best measured time was 67 µs with halo rows transposed in shared memory, 112 with a conversion."""
    w, device = tc.parse("conv2d:32x32x160x160,32x32x3x3,s1,p1,f16"), find_device("sm_90")
    spaces = {
        schedule.name: schedule.space(w, device.limits) for schedule in registry.schedules_to_tune(w, "cuda", "sm_90")
    }
    predictions = predict(w, spaces, CostModel.load(model.PACKAGED_MODEL), 100)
    loaders = [(each.schedule, each.config.get("input_loader")) for each in predictions]
    assert loaders[0] == ("hopper", "halo_smem")
    assert {("hopper", "converted"), ("hopper", "halo"), ("mma_sync", "halo")} <= set(loaders)


def test_no_other_schedule_replaces_a_first_one_without_a_model():
    for dtype in ("f16", "tf32"):
        assert (
            recommend_configs(tc.parse(f"conv2d:1x192x56x56,192x1x3x3,s1,p1,g192,{dtype}"), find_device("sm_90")) == []
        )
