"""What holds kernels back, from counters that were read before."""

import importlib
import json
from functools import partial
from pathlib import Path

import pytest

from tvmconv.devices.base import LostError
from tvmconv.errors import DeviceError

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def limits(monkeypatch):
    """The script, as Python imports it."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("limits")


def kernel(**what):
    units = {"tensor": 70.0, "issue": 28.0, "shared": 54.0, "l2": 50.0, "memory": 20.0}
    units |= {name: what.pop(name) for name in list(what) if name in units}
    return {
        "layer": "a",
        "schedule": "mma_sync",
        "blocks": 1024,
        "units": units,
        "busy": 98.0,
        "warps": 8.0,
        "conflicts": (0, 3),
        **what,
    }


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({}, "tensor cores"),
        ({"memory": 81.0}, "memory"),
        ({"tensor": 40.0}, "latency: 8 warps"),
        ({"tensor": 40.0, "busy": 70.0}, "latency: too few blocks"),
    ],
)
def test_the_busiest_unit_limits_or_else_latency_does(limits, what, reason):
    assert limits.Limits(**kernel(**what)).reason == reason


def test_readings_are_written_again(limits, tmp_path, capsys):
    file = tmp_path / "some-limits.json"
    file.write_text(json.dumps({"name": "some-limits", "provenance": "then", "kernels": [kernel(), kernel(l2=90.0)]}))
    assert limits.main(["--from", str(file), "-o", str(tmp_path)]) == 0
    page = (tmp_path / "some-limits.md").read_text()
    assert "| tensor cores |" in page
    assert page.rstrip().endswith("then")
    assert "L2 cache" in capsys.readouterr().out


def test_a_log_is_needed_in_one_line(limits, capsys):
    assert limits.main([]) == 2
    assert "give a --log" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("first", "fault", "failed", "launched"),
    [(1, DeviceError, [2], [1, 2, 3]), (1, LostError, [2], [1, 2]), (3, LostError, [], [3])],
)
def test_the_kernel_that_fails_is_named_and_the_others_are_launched(limits, first, fault, failed, launched, capsys):
    """Unless the process has lost the GPU: then another goes on behind it."""
    ran = []

    def run(number):
        ran.append(number)
        if number == 2:
            raise fault("unspecified launch failure")

    kernels = [limits._Kernel(f"layer {i}", "stem", {"rows": i}, 1, 1, partial(run, i)) for i in (1, 2, 3)]
    assert limits._launch(kernels, first) is not bool(failed)
    said = capsys.readouterr().err
    assert ran == launched
    assert [f'kernel {i}, layer {i} stem {{"rows": {i}}}: unspecified' in said for i in (1, 2, 3)] == [
        i in failed for i in (1, 2, 3)
    ]
    assert ("--first 3 goes on" in said) is (bool(failed) and fault is LostError)
