"""The page of `tvmconv report`: one file that asks for nothing, the same for the same contents, and safe."""

import base64
import hashlib
import itertools
import re
from html.parser import HTMLParser

import pytest
from pages import contents, failed, hostile_page, record

from tvmconv.analysis.memory.requests import CostliestRequest
from tvmconv.reports.page.contents import render_page
from tvmconv.reports.page.markup import escape_text
from tvmconv.reports.page.memory import _render_banks
from tvmconv.reports.page.svg import AxisScale, compute_full_width, spread_labels
from tvmconv.reports.timing_groups import times_from_log
from tvmconv.reports.trials import compute_knob_importances, group_failures, select_representative_trials


class Elements(HTMLParser):
    """The elements of a page, and the texts in them."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.texts = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)


PAGE = render_page(contents())
FOUND = Elements(PAGE).found


def test_same_contents_same_bytes():
    assert render_page(contents()) == PAGE


def test_policy_allows_the_pages_own_script_and_style_alone():
    policy = next(attrs["content"] for tag, attrs in FOUND if tag == "meta" and "http-equiv" in attrs)
    for tag, name in (("script", "script-src"), ("style", "style-src")):
        (inner,) = re.findall(f"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy


def test_nothing_is_loaded_and_nothing_styled_in_attributes():
    for tag, attrs in FOUND:
        assert tag not in {"link", "img", "iframe", "object", "use", "image", "base"}
        assert "style" not in attrs
        assert not any(name.startswith("on") or name == "src" for name in attrs)
        assert attrs.get("href", "#").startswith("#")


def test_hostile_text_is_text():
    shown = Elements(hostile_page())
    assert [tag for tag, _ in shown.found].count("script") == 1
    assert not any(tag == "img" or any(name.startswith("on") for name in attrs) for tag, attrs in shown.found)
    assert "<script>window.pwned = 1</script>" in "".join(shown.texts)


def test_hostile_text_can_be_written_as_utf_8():
    assert hostile_page().encode("utf-8")


def test_ids_are_there_once_and_what_is_named_by_them_is_there():
    ids = [attrs["id"] for _, attrs in FOUND if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = {attrs["href"][1:] for _, attrs in FOUND if "href" in attrs}
    labels = {attrs["aria-labelledby"] for _, attrs in FOUND if "aria-labelledby" in attrs}
    assert links | labels <= set(ids)


def test_each_picture_says_what_it_shows():
    for tag, attrs in FOUND:
        if tag == "svg":
            assert attrs.get("aria-label") or attrs.get("aria-hidden") == "true"


def test_what_is_no_text_is_replaced():
    assert escape_text("a\x00b\ud800") == "a�b�"


@pytest.mark.parametrize(
    ("scale", "ticks"),
    [
        (AxisScale(0, 10, 0, 100), [0, 2, 4, 6, 8, 10]),
        (AxisScale(1, 3, 0, 100, is_integer=True), [1, 2, 3]),
        (AxisScale(5, 300, 0, 100, is_log=True), [5, 10, 20, 50, 100, 200]),
        (AxisScale(1, 1e6, 0, 100, is_log=True), [1, 10, 100, 1e3, 1e4, 1e5, 1e6]),
    ],
)
def test_ticks_are_round(scale, ticks):
    assert scale.list_ticks() == pytest.approx(ticks)


def test_labels_do_not_cover_one_another():
    places = spread_labels([10, 11, 12, 95], 10, 0, 100)
    gaps = [later - earlier for earlier, later in itertools.pairwise(places)]
    assert min(gaps) >= 10
    assert max(places) <= 100


def test_a_bar_that_would_leave_no_room_is_broken():
    assert compute_full_width([1.0, 2.0, 300.0]) == 12.0
    assert compute_full_width([1.0, 2.0]) == 2.0


def test_a_knob_explains_the_variance_that_it_decides():
    records = [record(1e-5 * (1 + i % 2), config={"decides": i % 2, "idle": i // 2 % 3}) for i in range(36)]
    decides, idle = compute_knob_importances(records)
    assert (decides.knob, decides.explained_fraction) == ("decides", pytest.approx(1))
    assert idle.explained_fraction == pytest.approx(0)


def test_failures_by_kind_have_the_first_message():
    (found,) = group_failures([record(1e-5), failed("first"), failed("second")])
    assert (found.kind, found.count, found.message) == ("compile device", 2, "first")


def test_sampled_trials_hold_the_fastest_and_some_others():
    shown = select_representative_trials([record(1e-6 * i, i) for i in range(1000, 0, -1)], 30)
    costs = [round(each.cost * 1e6) for each in shown]
    assert len(costs) == 30
    assert costs[:10] == list(range(1, 11))
    assert costs[-1] > 900


def test_last_timings_count_for_more_than_trials():
    group = times_from_log("a log", [record(1e-5), record(2e-5, final=True)])
    assert [each.seconds for each in group.timings] == [2e-5]


def request_of(addresses, nbytes, takes):
    lanes = tuple(range(32))
    return CostliestRequest("shared", "load", "tile", 0, nbytes, lanes, tuple(map(addresses, lanes)), takes, takes)


@pytest.mark.parametrize(
    ("addresses", "nbytes", "takes"),
    [
        (lambda lane: 4 * lane, 4, 1),
        (lambda lane: 8 * lane, 4, 2),  # every other bank
        (lambda lane: 8 * lane, 8, 2),  # half a warp at a time
        (lambda lane: 16 * lane, 16, 4),  # a quarter at a time
        (lambda lane: 64, 16, 2),  # quarters of one address, two at a time
        (lambda lane: 512 * lane, 4, 32),
    ],
)
def test_rows_are_as_many_as_the_request_takes(addresses, nbytes, takes):
    picture = str(_render_banks(request_of(addresses, nbytes, takes), "description"))
    assert len(re.findall(r">wavefront \d+<", picture)) == takes
