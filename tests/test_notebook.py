"""What objects show in notebooks and in a Python prompt, and charts as axes of Matplotlib."""

from html.parser import HTMLParser

import matplotlib as mpl
import pytest
from made_results import make_record, make_result, make_row

import tvmconv as tc
from tvmconv import palette
from tvmconv.reports.charts import compute_sweep_info, plot_sweep
from tvmconv.search.progress import SearchProgress

TEXT = "conv2d:1x8x8x8,8x8x3x3,s1,p1"
ROWS = (
    make_row("default", 1e3, speedup=1.0),
    make_row("tiling", 10, speedup=100.0),
    make_row("cudnn", 20, library="9"),
)


class _OpenTags(HTMLParser):
    """Collects the elements that a page does not close."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def shown():
    workload = tc.parse(TEXT)
    kernel = tc.build(workload, "tiling", arch="sm_90")
    record = make_record(tc.parse(TEXT), 10, "tiling")
    return {
        "workload": workload,
        "schedule": kernel.schedule,
        "space": kernel.schedule.space(workload),
        "kernel": kernel,
        "result": make_result(TEXT, *ROWS),
        "tuned": tc.TuneResult(SearchProgress(4, None, best=record), record, {}, 0.0),
        "explanation": tc.explain(kernel),
    }


KINDS = ("workload", "schedule", "space", "kernel", "result", "tuned", "explanation")


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_shows_itself_in_a_line_and_as_html(shown, kind):
    assert len(repr(shown[kind])) < 200
    assert "\n" not in repr(shown[kind])
    parser = _OpenTags()
    html = shown[kind]._repr_html_()
    parser.feed(html)
    assert parser.open == []
    assert "tiling" in html or TEXT in html or "configs" in html


def test_a_result_shows_speed_ups_over_the_named_baseline(shown):
    html = shown["result"]._repr_html_()
    assert "× default" in html
    assert "100 × default" in html


def test_a_space_yields_its_legal_configs(shown):
    space = shown["space"]
    configs = list(space)
    assert len(configs) == len(space.enumerated_legal)
    assert configs[0].keys() == space.knobs.keys()


@pytest.fixture
def axes():
    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    yield axes
    pyplot.close(figure)


def test_bars_of_a_result_have_the_colors_of_their_schedules(axes):
    assert tc.plot.result(make_result(TEXT, *ROWS), axes=axes) is axes
    colors = [mpl.colors.to_hex(bar.get_facecolor()) for bar in axes.patches]
    assert colors == [palette.STYLES["default"].color, palette.STYLES["tiling"].color, "#000000"]
    assert axes.get_xlabel() == "times as fast as default"


def test_a_schedule_has_the_same_color_in_any_order(axes):
    for names in (("default", "tiling", "direct"), ("direct", "default")):
        axes.clear()
        results = [make_result(TEXT, *(make_row(name, 10, gflops=1.0) for name in names))] * 2
        plot_sweep(compute_sweep_info("title", "layer", ["1", "2"], results), axes)
        colors = {line.get_label(): line.get_color() for line in axes.lines}
        assert colors == {name: palette.STYLES[name].color for name in names}


def test_every_built_in_schedule_has_a_style():
    texts = (
        TEXT,
        f"{TEXT},f16,nhwc",
        "conv2d:1x3x64x64,64x3x7x7,s2,p3,f16,nhwc",
        "conv2d:1x64x8x8,64x1x3x3,s1,p1,g64,f16,nhwc",
        "conv2d:1x64x8x8,64x4x3x3,s1,p1,g16,f16,nhwc",
        "conv2d:1x64x8x8,64x1x3x3,s1,p1,g64",
        "filter1d:65536,k5",
        "filter2d:512x512x3,5x5",
    )
    names = {schedule.name for text in texts for schedule in tc.schedules(tc.parse(text))}
    assert names - palette.STYLES.keys() == set()
