"""A rule of dlight and a database of MetaSchedule schedule the convolutions of a user's own pipeline."""

import pytest
import torch
from relax_models import CPU, Residual, differ, exported, randomized
from torch import nn
from tvm import relax
from tvm.s_tir import dlight

import tvmconv.relax
from tvmconv.errors import DeviceError, ModelError
from tvmconv.relax.compile_target import resolve_target

X = torch.randn(2, 4, 10, 14, generator=torch.Generator().manual_seed(0))


def scheduled(mod):
    """Names of the marked functions that bind loops to threads."""
    names = {str(variable.name_hint): function for variable, function in mod.functions_items()}
    return {name for name, f in names.items() if name.startswith("tvmconv_") and "blockIdx.x" in f.script()}


@pytest.fixture(scope="module")
def residual():
    return exported(randomized(Residual()), X)


def test_declared_convolutions_equal_pytorch():
    model = randomized(nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU()))
    mod = tvmconv.relax.declare_convolutions(exported(model, X), CPU)
    import tvm

    assert differ(tvm.compile(mod, CPU), model, X) < 1e-5


@pytest.mark.sample(1)
@pytest.mark.parametrize("target", ["opencl:0", "sm_80"])
def test_dlight_rule_schedules_what_is_declared(residual, target):
    mod = relax.get_pipeline("zero")(tvmconv.relax.declare_convolutions(residual, target))
    assert not scheduled(mod)
    with resolve_target(target).target:
        mod = dlight.ApplyDefaultSchedule(tvmconv.relax.dlight_rule(), dlight.gpu.Fallback())(mod)
    assert len(scheduled(mod)) == 3


def test_exported_database_is_applied_by_metaschedule(residual, tmp_path):
    mod = tvmconv.relax.declare_convolutions(residual, "sm_80")
    names = tvmconv.relax.export_database(mod, "sm_80", tmp_path)
    assert len(names) == 3
    with resolve_target("sm_80").target:
        applied = relax.transform.MetaScheduleApplyDatabase(str(tmp_path))(mod)
    assert len(scheduled(applied)) == len(names)


def test_database_needs_marked_functions_and_a_target_with_schedules(residual, tmp_path):
    with pytest.raises(ModelError, match="declare_convolutions"):
        tvmconv.relax.export_database(residual, "sm_80", tmp_path)
    with pytest.raises(DeviceError, match="expected cuda or opencl"):
        tvmconv.relax.export_database(residual, "llvm", tmp_path)
