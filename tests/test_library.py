"""Schedules are found by name, also those of other packages, and what they cannot do is said in one line."""

import ast
import importlib
import pickle
import subprocess
import sys

import pytest
from faulty_schedules import WORKLOAD, right
from tvm.s_tir import Schedule as TirSchedule

import tvmconv as tc
from tvmconv import registry
from tvmconv.devices import find_device
from tvmconv.experiments import preparation as experiments
from tvmconv.space.search_space import BlockLimits, ResourceUsage
from tvmconv.target import get_block_limits

W = tc.parse("conv2d:1x4x8x8,4x4x3x3,s1,p1")


def test_an_unknown_name_is_answered_with_those_there_are():
    with pytest.raises(
        tc.ScheduleError, match=r"no schedule 'tilling' for conv2d.* in float32; the nearest is tiling; there are"
    ):
        registry.find_schedule(W, "tilling")


def test_two_schedules_of_one_name_are_refused(schedule_registry):
    def tiling(s, w, k):
        """Another one."""

    with pytest.raises(tc.ScheduleError, match=r"schedule tiling of conv2d is defined in .*builtin\.conv\.tiling and"):
        tc.schedule("conv2d")(tiling)


def test_a_space_is_made_once_and_anew_for_another_function(schedule_registry):
    def make(options):
        def mine(s, w, k):
            """Choose a number."""
            calls.append(w.text)
            k.choice("number", options, options[0])

        return tc.schedule("conv2d")(mine)

    w, calls = tc.parse("conv2d:1x8x8x8,8x8x3x3,s1,p1"), []
    for options in ((1, 2), (1, 2, 3)):
        make(options)
        schedule = registry.find_schedule(w, "mine")
        assert schedule.space(w) is schedule.space(tc.parse(w.text))
        assert schedule.space(w).size == schedule.space(w, get_block_limits("sm_90")).size == len(options)
        del schedule_registry["conv2d", "mine"]
    assert len(calls) == 2


def test_one_function_may_be_a_schedule_of_several_operators(schedule_registry):
    @tc.schedule("filter1d", "filter2d", device_kinds=("cuda",))
    def shared(s: TirSchedule, w, k):
        """Compute both alike."""

    found = [registry.find_schedule(tc.parse(text), "shared") for text in ("filter1d:9,k3", "filter2d:9x9x1,3x3")]
    assert [(s.operator, s.function, s.device_kinds) for s in found] == [
        ("filter1d", shared, ("cuda",)),
        ("filter2d", shared, ("cuda",)),
    ]


def test_a_schedule_is_registered_for_all_operators_or_none(schedule_registry):
    def texture(s, w, k):
        """Another one."""

    with pytest.raises(tc.ScheduleError, match="schedule texture of filter2d is defined in"):
        tc.schedule("filter1d", "filter2d")(texture)
    assert ("filter1d", "texture") not in schedule_registry


def test_what_tvm_cannot_schedule_is_one_line(schedule_registry):
    @tc.schedule("conv2d")
    def impossible(s: TirSchedule, w, k):
        """Ask for a block that is not there."""
        k.choice("colour", ("red", "blue"), default="red")
        s.get_sblock("nowhere")

    found = registry.find_schedule(W, "impossible")
    with pytest.raises(tc.ScheduleError, match="schedule impossible cannot compute conv2d") as caught:
        found.apply(W)
    assert "\n" not in str(caught.value)
    with pytest.raises(tc.KnobError, match="schedule impossible cannot take colour=blue for conv2d"):
        found.apply(W, {"colour": "blue"})


@pytest.fixture
def installed(tmp_path, monkeypatch, schedule_registry):
    """Installs a module under the entry-point group, as pip would."""

    def install(name, source):
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{registry.ENTRY_POINT_GROUP}]\n{name} = {name}\n")
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()
        registry._load_schedule_packages.cache_clear()

    yield install
    for name in [name for name in sys.modules if name.startswith("others_")]:
        del sys.modules[name]


def test_another_packages_schedule_is_built_like_our_own(installed):
    installed(
        "others_schedules",
        '''"""A schedule from elsewhere: rows to blocks, by hand."""
from tvmconv.registry import schedule

@schedule("conv2d")
def by_hand(s, w, k):
    s.compute_inline(s.get_sblock("padded"))
    s.compute_inline(s.get_sblock("weight"))
    total = s.get_sblock("sum")
    store = s.cache_write(total, 0, "local")
    s.reverse_compute_inline(s.get_sblock("Y"))
    n, g, o, p, q, *_ = s.get_loops(total)
    s.bind(s.fuse(n, g, o), "blockIdx.x")
    s.bind(p, "threadIdx.x")
    s.reverse_compute_at(store, q)
''',
    )
    assert [s.name for s in tc.schedules(W)][-1] == "by_hand"
    assert registry.find_schedule(W, "by_hand").summary == "A schedule from elsewhere: rows to blocks, by hand."
    assert tc.build(W, "by_hand", device="opencl:0").verify().ok


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import a_module_that_nobody_has", "ModuleNotFoundError: No module named 'a_module_that_nobody_has'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(1)", "SystemExit: 1"),
        ("x = (", "SyntaxError: '(' was never closed"),
    ],
)
def test_a_package_that_does_not_import_leaves_the_others(installed, caplog, source, reason):
    installed("others_fine", "from tvmconv.registry import schedule\n@schedule('conv2d')\ndef fine(s, w, k): ...\n")
    installed("others_broken", source + "\n")
    names = [s.name for s in tc.schedules(W)]
    assert (names[0], names[-1]) == ("default", "fine")
    (warning,) = caplog.records
    assert warning.getMessage().startswith(f"package others_broken of schedules failed: {reason}")
    assert warning.getMessage().endswith(" (others_broken.py:1)")
    with pytest.raises(tc.ScheduleError, match=r"no schedule 'broken' for conv2d.*package others_broken of schedules"):
        registry.find_schedule(W, "broken")


SEVERAL = '''"""Two schedules."""
from tvmconv.registry import schedule

@schedule("conv2d")
def first(s, w, k):
    """The first of them."""

@schedule("conv2d")
def second(s, w, k): ...
'''


def test_modules_of_the_variable_are_found_in_the_folder(installed, tmp_path, monkeypatch):
    (tmp_path / "others_listed.py").write_text(SEVERAL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv(registry.SCHEDULES_VARIABLE, "others_listed, others_missing")
    registry._load_schedule_packages.cache_clear()
    summaries = {s.name: s.summary for s in tc.schedules(W)[-2:]}
    assert summaries == {"first": "The first of them.", "second": "Two schedules."}
    with pytest.raises(tc.ScheduleError, match="No module named 'others_missing'"):
        registry.find_schedule(W, "third")


def test_a_schedules_usage_keeps_its_space_within_limits(schedule_registry):
    def usage(w, columns):
        threads = columns["tile"][:, 1]
        return ResourceUsage(threads, 0 * threads, threads, w.flops // threads)

    @tc.schedule("conv2d", usage=usage)
    def one_tile(s: TirSchedule, w, k):
        """Ask for one tile, of rows at most."""
        k.split("tile", 64, parts=2, default=(-1, 8))
        k.require("at most 32 in a tile", lambda c: c["tile"][:, 1] <= 32)

    space = registry.find_schedule(W, "one_tile").space(W, limits=BlockLimits(max_threads=16))
    legal = [space.config_from_point(point)["tile"] for point in space.enumerated_legal]
    assert legal == [(-1, 1), (-1, 2), (-1, 4), (-1, 8), (-1, 16)]


def cuda_only(s: TirSchedule, w, k):
    """Never runs anywhere else."""


ARCHITECTURES = ("sm_75", "sm_80", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")


@pytest.mark.parametrize(
    ("options", "suited", "needs"),
    [({"min_arch": 80}, ARCHITECTURES[1:], "sm_80 or later"), ({"exact_arch": 90}, ("sm_90", "sm_90a"), "sm_90")],
)
def test_a_schedule_is_refused_on_other_architectures(schedule_registry, options, suited, needs):
    tc.schedule("conv2d", device_kinds=("cuda",), search_if=lambda w: True, **options)(cuda_only)
    schedule = registry.find_schedule(W, "cuda_only")
    for arch in ARCHITECTURES:
        assert (schedule in registry.schedules_to_tune(W, "cuda", arch)) == (arch in suited)
        if arch in suited:
            schedule.check_runs_on("cuda", arch, arch)
        else:
            with pytest.raises(tc.ScheduleError, match=rf"^schedule cuda_only needs {needs}, and is not for {arch}$"):
                tc.build(W, "cuda_only", arch=arch)
    with pytest.raises(tc.ScheduleError, match=r"is not for cuda:0, which is sm_75$"):
        schedule.check_runs_on("cuda", "sm_75", "cuda:0")
    assert schedule in registry.schedules_to_tune(W, "cuda")
    assert schedule not in registry.schedules_to_tune(W, "opencl")
    assert schedule not in experiments.select_schedules(W, None, find_device("sm_75"))
    assert schedule in experiments.list_unsupported_schedules(W, find_device("sm_75"))


def test_where_no_schedule_is_for_the_device_it_is_told_why(schedule_registry):
    for key in [key for key, schedule in schedule_registry.items() if "tf32" in schedule.dtypes]:
        del schedule_registry[key]
    tc.schedule("conv2d", dtypes=("tf32",), device_kinds=("cuda",))(cuda_only)
    with pytest.raises(tc.ScheduleError, match="schedule cuda_only is for cuda, not for opencl:0"):
        experiments.select_schedules(tc.parse(f"{W},tf32"), None, find_device("opencl:0"))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("conv2d:1x64x56x56,64x64x3x3,s1,p1", ["direct", "winograd"]),
        ("conv2d:1x64x56x56,64x64x1x1,s1,p0", ["direct", "implicit_gemm"]),
        ("conv2d:1x512x7x7,512x512x3x3,s1,p1", ["direct", "implicit_gemm", "winograd"]),
        ("conv2d:8x512x7x7,512x512x3x3,s1,p1", ["direct", "winograd"]),
        ("conv2d:1x512x7x7,512x1x3x3,s1,p1,g512", ["depthwise"]),
        ("conv2d:1x512x7x7,512x1x3x3,s1,p1,g512,f16", ["depthwise_nchw", "depthwise"]),
        ("conv2d:1x128x28x28,128x4x3x3,s1,p1,g32,f16", ["grouped_nchw"]),
        ("conv2d:1x512x7x7,512x1x3x3,s1,p1,g512,tf32", ["depthwise_nchw", "depthwise"]),
        ("conv2d:1x256x28x28,256x8x3x3,s1,p1,g32,f16", ["grouped_nchw", "mma_sync"]),
        ("conv2d:1x512x7x7,512x1x3x3,s1,p1,g512,f16,nhwc", ["depthwise_nhwc"]),
        ("conv2d:1x256x28x28,256x8x3x3,s1,p1,g32,f16,nhwc", ["grouped_nhwc", "grouped_mma_sync", "mma_sync"]),
        (
            "conv2d:1x512x14x14,512x16x3x3,s1,p1,g32,f16,nhwc",
            ["hopper", "grouped_mma_sync", "mma_sync", "grouped_nhwc"],
        ),
        ("conv2d:1x512x14x14,512x16x3x3,s1,p1,g32,nhwc", ["grouped_nhwc"]),
        ("conv2d:1x256x28x28,256x128x3x3,s1,p1,g2,f16,nhwc", ["hopper", "mma_sync"]),
        ("conv2d:1x64x56x56,64x64x3x3,s1,p1,f16,nhwc", ["hopper", "mma_sync"]),
        ("conv2d:1x64x56x56,64x64x3x3,s1,p1,tf32", ["hopper", "mma_sync"]),
        ("conv2d:1x3x224x224,64x3x7x7,s2,p3,bf16,nhwc", ["stem"]),
        ("conv3d:8x3x16x112x112,64x3x3x7x7,s1x2x2,p1x3x3,f16", ["stem"]),
        ("conv3d_dgrad:8x3x16x112x112,64x3x3x7x7,s1x2x2,p1x3x3,f16,nhwc", ["stem"]),
        ("conv1d_wgrad:8x1x16000,64x1x80,s4,p38,tf32", ["stem"]),
        ("conv2d_dgrad:32x24x56x56,72x24x1x1,s1,p0,f16,nhwc", ["pointwise_mma_sync", "mma_sync"]),
        ("conv2d_wgrad:32x72x56x56,24x72x1x1,s1,p0,bf16,nhwc", ["mma_sync", "pointwise_mma_sync"]),
        ("conv1d:8x64x1000,64x64x9,s1,p4", ["implicit_gemm"]),
        ("conv3d:2x64x9x16x16,64x32x3x3x3,s1,p1,g2", ["implicit_gemm"]),
    ],
)
def test_a_search_tries_what_promises_something(text, names):
    assert [schedule.name for schedule in registry.schedules_to_tune(tc.parse(text), "cuda")] == names


def test_a_schedule_may_write_its_function_itself(schedule_registry):
    @tc.schedule("conv2d")
    def own(s: TirSchedule, w, k):
        """Return the schedule of another function."""
        return TirSchedule(right())

    kernel = tc.build(WORKLOAD, "own", device="opencl:0")
    assert kernel.verify().ok


@pytest.fixture
def no_convolutions(schedule_registry):
    """Without any schedule of conv2d."""
    for key in [key for key in schedule_registry if key[0] == "conv2d"]:
        del schedule_registry[key]


def test_what_no_schedule_computes_has_no_naive_one(no_convolutions):
    assert registry.get_baseline_schedule(W) is None


def test_every_schedule_can_be_pickled_with_all_it_declares(python):
    program = (
        "import pickle, sys; schedules = pickle.load(sys.stdin.buffer)\n"
        "print([(s.operator, s.name, s.dtypes, s.device_kinds, s.condition is None) for s in schedules])"
    )
    sent = tc.schedules()
    ended = subprocess.run([*python, "-c", program], input=pickle.dumps(sent), capture_output=True, check=True)
    said = [(s.operator, s.name, s.dtypes, s.device_kinds, s.condition is None) for s in sent]
    assert ast.literal_eval(ended.stdout.decode()) == said


def test_two_baselines_of_an_operator_are_refused(schedule_registry):
    def simplest(s, w, k):
        """Another one."""

    with pytest.raises(tc.ScheduleError, match=r"conv2d has two baselines, default in .*default and simplest in"):
        tc.schedule("conv2d", baseline=True)(simplest)


def test_where_the_baseline_does_not_apply_there_is_none(no_convolutions):
    def half(s, w, k):
        """Compute in TF32."""

    tc.schedule("conv2d", dtypes=("tf32",))(half)
    w = tc.parse("conv2d:1x4x8x8,4x4x3x3,tf32")
    assert [s.name for s in tc.schedules(w)] == ["half"]
    assert registry.get_baseline_schedule(w) is None


@pytest.mark.parametrize("operator", sorted({s.operator for s in tc.schedules()}))
def test_every_operators_baseline_is_its_first_schedule(operator):
    first, *others = [s for s in tc.schedules() if s.operator == operator]
    assert first.baseline
    assert not any(s.baseline for s in others)


def test_schedules_of_others_are_listed_by_package_and_line(schedule_registry):
    def earlier(s, w, k): ...

    def later(s, w, k): ...

    def elsewhere(s, w, k): ...

    elsewhere.__module__ = "another.package"
    for function in (later, earlier, elsewhere):
        tc.schedule("conv2d")(function)
    names = [s.name for s in tc.schedules(W)]
    assert names[0] == "default"
    assert names[-3:] == ["elsewhere", "earlier", "later"]


OWN = """
import tvmconv as tc

@tc.schedule("conv2d")
def mine(s, w, k): ...

w = tc.parse("conv2d:1x4x8x8,4x4x3x3,s1,p1")
names = [schedule.name for schedule in tc.schedules(w)]
print(names[0], names[-1], tc.registry.get_baseline_schedule(w).name)
"""


def test_an_early_schedule_does_not_become_the_baseline(python):
    ran = subprocess.run([*python, "-c", OWN], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["default", "mine", "default"]


def test_summary_is_there_without_docstrings(monkeypatch):
    """As with PYTHONOPTIMIZE=2, where no module has its docstring."""
    schedule = registry.find_schedule(WORKLOAD, "tiling")
    expected = schedule.summary
    monkeypatch.setattr(importlib.import_module(schedule.function.__module__), "__doc__", None)
    assert schedule.summary == expected != ""
