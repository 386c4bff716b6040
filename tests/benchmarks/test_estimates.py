"""`tvmconv bench estimates`: estimates beside measured times."""

from dataclasses import replace

import numpy as np
import pytest

import tvmconv as tc
from tvmconv import registry
from tvmconv.logs.record import Record
from tvmconv.target import get_block_limits

WORKLOAD = tc.parse("conv2d:1x64x14x14,64x64x3x3,s1,p1,f16,nhwc")


def records(noise):
    """Configs of `hopper` that take what it estimates, times some noise."""
    rng = np.random.default_rng(0)
    space = registry.find_schedule(WORKLOAD, "hopper").space(WORKLOAD, get_block_limits("sm_90"))
    points = space.sample_legal(40, rng)
    seconds = space.compute_usage(points).estimate * 1e-6 * np.exp(noise * rng.standard_normal(len(points)))
    about = Record(WORKLOAD, "hopper", {}, "NVIDIA H200", "cuda -arch=sm_90")
    return [
        replace(about, config=space.config_from_point(point), times=(time,))
        for point, time in zip(points, seconds.tolist(), strict=True)
    ]


def test_what_is_estimated_well_correlates_and_noise_shows(bench, log, tmp_path, capsys):
    page = tmp_path / "page.md"
    found = []
    for noise in (0.0, 3.0):
        log.write_text("".join(f"{record.line()}\n" for record in records(noise)))
        assert bench([str(log), "-o", str(page)]) == 0
        *_, line = capsys.readouterr().out.splitlines()
        assert line.split()[:5] == ["hopper", "NVIDIA", "H200", "1", "40"]
        found.append([float(cell) for cell in line.split()[5:]])
    assert found[0] == [1.0] * 6
    assert found[1][0] < 0.9
    assert "| hopper | NVIDIA H200 | 1 | 40 |" in page.read_text()


@pytest.mark.parametrize(
    ("words", "said"), [(["--min-configs", "41"], "no layer has 41 configs"), (["--least", "0"], "0")]
)
def test_bad_input_is_one_line_and_status_2(bench, log, words, said, capsys):
    log.write_text("".join(f"{record.line()}\n" for record in records(0.0)))
    assert bench([str(log), *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
