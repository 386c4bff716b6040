"""A rule of dlight that raises an error for a function leaves it to the next rule, and the model is compiled."""

import pytest
import torch
from relax_models import exported
from torch import nn
from tvm import relax, tirx
from tvm.s_tir import dlight

from tvmconv.relax.compile_target import resolve_target
from tvmconv.relax.guarded_rules import guard_rule, make_default_pipeline


class Gate(nn.Module):
    """A gate of the channels, for which the rule Reduction of TVM 0.27 raises an error."""

    def __init__(self):
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.excite(nn.functional.silu(self.squeeze(x.mean((2, 3), keepdim=True)))))


@pytest.fixture(scope="module")
def gate():
    return exported(Gate().eval(), torch.randn(2, 8, 5, 7))


def list_unscheduled(mod):
    functions = {str(variable.name_hint): each for variable, each in mod.functions_items()}
    return [
        name for name, f in functions.items() if isinstance(f, tirx.PrimFunc) and "tirx.is_scheduled" not in f.attrs
    ]


def test_other_rules_schedule_what_a_rule_raises_an_error_for(gate):
    target = resolve_target("sm_90").target
    with target, pytest.raises(AssertionError, match="not properly inlined"):  # else guards are needed no more
        relax.get_default_pipeline(target)(gate)
    with target:
        assert list_unscheduled(make_default_pipeline(target)(gate)) == []


def test_pipeline_is_that_of_tvm_where_no_rule_fails():
    mod = exported(
        nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Softmax(1)).eval(), torch.ones(1, 4, 5, 6)
    )
    target = resolve_target("sm_80").target
    with target:
        ours, theirs = make_default_pipeline(target)(mod), relax.get_default_pipeline(target)(mod)
    assert ours.script() == theirs.script()


def test_only_errors_of_a_rule_are_left_to_the_next_one():
    @dlight.base.ScheduleRule.from_callable("failing")
    def fail(function, target, tunable):
        raise RuntimeError

    @dlight.base.ScheduleRule.from_callable("scheduling")
    def schedule(function, target, tunable):
        return function, target, tunable

    assert guard_rule(fail).apply("f", "t", False) is None
    assert guard_rule(schedule).apply("f", "t", False) == ("f", "t", False)
