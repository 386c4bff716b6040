"""The page in Chromium: it asks for nothing, breaks no policy, and everything can be reached with the keyboard."""

from pathlib import Path

import pytest
from pages import (
    H200,
    WORKLOAD,
    browser_missing,
    contents,
    hostile_page,
    linked_page,
    opened,
    render_page,
    requests,
    write,
)

import tvmconv as tc
from tvmconv.reports.timing_groups import NamedTiming, TimingGroup
from tvmconv.workloads import Layer

pytestmark = pytest.mark.skipif(bool(browser_missing()), reason=browser_missing() or "there is a browser")


@pytest.fixture(scope="module")
def linked(tmp_path_factory):
    path = write(tmp_path_factory.mktemp("pages") / "linked.html", linked_page())
    with opened(path) as driver:
        yield driver


@pytest.fixture
def fresh(linked):
    linked.refresh()
    return linked


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    with opened(write(tmp_path_factory.mktemp("pages") / "whole.html")) as driver:
        yield driver


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A page with the code and the memory of a kernel."""
    kernel = tc.build(WORKLOAD, "conflict_free", arch="sm_90")
    with opened(
        write(tmp_path_factory.mktemp("pages") / "built.html", render_page(contents(kernels=[kernel])))
    ) as driver:
        yield driver


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A page with the code of two kernels."""
    kernels = [tc.build(WORKLOAD, name, arch="sm_90") for name in ("tiling", "default")]
    path = write(tmp_path_factory.mktemp("pages") / "compared.html", render_page(contents(kernels=kernels)))
    with opened(path) as driver:
        yield driver


def lit(driver):
    return driver.execute_script("return [...document.querySelectorAll('.lit')].map(e => e.dataset.groups)")


def press(driver, *names):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    for name in names:
        ActionChains(driver).send_keys(getattr(Keys, name)).perform()


def focused(driver):
    return driver.execute_script("return document.activeElement.dataset.groups || document.activeElement.className")


def test_no_request_leaves_and_nothing_is_reported(whole):
    assert {address.partition(":")[0] for address in requests(whole)} <= {"file", "data"}
    assert whole.get_log("browser") == []
    assert not whole.execute_script("return window.violations")


def test_a_hostile_name_does_nothing(tmp_path):
    with opened(write(tmp_path / "hostile.html", hostile_page())) as driver:
        assert driver.execute_script("return [window.pwned, document.images.length, document.scripts.length]") == [
            None,
            0,
            1,
        ]
        assert "<script>window.pwned = 1</script>" in driver.execute_script("return document.body.innerText")


@pytest.mark.sample(1)
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_on_a_narrow_screen(tmp_path, width, dark):
    with opened(write(tmp_path / "page.html"), width=width, dark=dark) as driver:
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        assert contrasts(driver) >= 4.5


def contrasts(driver):
    """The least contrast of a text with the page (WCAG 2.2, 1.4.3 asks for 4.5)."""
    return driver.execute_script(
        """
        const light = (rgb) => rgb.match(/[0-9.]+/g).slice(0, 3)
          .map(c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
          .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
        const paper = light(getComputedStyle(document.body).backgroundColor);
        const of = (e) => light(getComputedStyle(e)[e instanceof SVGElement ? "fill" : "color"]);
        return Math.min(...[...document.querySelectorAll("h1,h2,h3,p,a,td,th,dd,.soft,summary,svg text")]
          .map(e => of(e)).map(ink => (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05)));
        """
    )


def test_a_click_lights_a_group_and_a_second_one_clears_it(fresh):
    line = fresh.find_element("css selector", ".column[aria-label=TIR] [data-groups^='k0s0n5 ']")
    line.click()
    assert lit(fresh) == ["k0s0n4 k0s0n5", "k0s0n5 k0s0n6", "k0s0n6 k0s0n7"] * 2
    line.click()
    assert lit(fresh) == []


def test_a_click_on_a_cell_scrolls_the_columns_to_its_lines(fresh):
    fresh.find_element("css selector", "svg [data-groups=k0s0n52]").click()
    assert "k0s0n52" in lit(fresh)
    for name in ("TIR", "SASS"):
        inside = fresh.execute_script(
            "const box = document.querySelector(`.column[aria-label=${arguments[0]}]`).getBoundingClientRect();"
            "const line = document.querySelector(`.column[aria-label=${arguments[0]}] .lit`).getBoundingClientRect();"
            "return line.top >= box.top && line.bottom <= box.bottom",
            name,
        )
        assert inside


def test_keys_alone_reach_light_and_clear(fresh):
    fresh.execute_script("document.querySelector('.column').focus()")
    press(fresh, "TAB")
    assert focused(fresh) == "k0s0n0 k0s0n1"
    press(fresh, "ARROW_DOWN", "ARROW_DOWN")
    assert focused(fresh) == "k0s0n2 k0s0n3"
    press(fresh, "ENTER")
    assert len(lit(fresh)) == 6
    press(fresh, "ESCAPE")
    assert lit(fresh) == []
    press(fresh, "END", "SPACE")
    assert "k0s0n59 k0s0n60" in lit(fresh)


USABLE = (
    "[...document.querySelectorAll('a[href], summary, .value, .scroll, pre[tabindex]')]"
    ".filter(e => e.checkVisibility())"
)


def test_tab_comes_by_everything_that_can_be_used(whole):
    whole.execute_script("document.activeElement.blur(); window.scrollTo(0, 0)")
    wanted = set(range(whole.execute_script(f"return {USABLE}.length")))
    met = set()
    for _ in range(2 * len(wanted)):
        press(whole, "TAB")
        met.add(whole.execute_script(f"return {USABLE}.indexOf(document.activeElement)"))
    assert wanted <= met


def test_a_link_keeps_what_is_lit(linked):
    linked.refresh()
    linked.find_element("css selector", "svg [data-groups=k0s0n52]").click()
    before = lit(linked)
    address = linked.current_url
    assert address.endswith("#lit=k0s0n52")
    linked.refresh()
    assert lit(linked) == before
    press(linked, "ESCAPE")
    assert lit(linked) == []
    assert linked.current_url.endswith("#")


def test_layers_of_a_network_are_searched(tmp_path):
    layers = [Layer("conv1.7x7", WORKLOAD, 1), Layer("conv2.3x3", tc.parse("conv2d:1x8x8x8,8x8x3x3,s1,p1"), 2)]
    timing = NamedTiming("direct", 1e-5), NamedTiming("cudnn", 2e-5, is_library=True)
    groups = {layer.workload: [TimingGroup("a run", H200.name, timing, ())] for layer in layers}
    page = render_page(contents(name="a network", layers=layers, timing_groups=groups))
    shown = "return [...document.querySelectorAll('.layers tbody tr')].map(row => row.checkVisibility())"
    with opened(write(tmp_path / "network.html", page)) as driver:
        driver.find_element("css selector", "input[type=search]").send_keys("3X3")
        assert driver.execute_script(shown) == [False, False, True, True]
        assert driver.current_url.endswith("#layers=3X3")
        driver.refresh()
        assert driver.execute_script(shown) == [False, False, True, True]
        assert not driver.execute_script("return window.violations")


def test_a_value_of_a_knob_leaves_its_trials(whole):
    whole.refresh()
    value = whole.find_element("css selector", ".value[aria-label='sliced_k=1']")
    whole.execute_script("arguments[0].focus()", value)
    press(whole, "SPACE")
    off, all_of_them = whole.execute_script(
        "return [document.querySelectorAll('.trial.off').length, document.querySelectorAll('.trial').length]"
    )
    assert (off, all_of_them) == (20, 40)
    assert whole.find_element("css selector", "[role=status]").text.startswith("20 of 40 trials shown; the fastest: ")
    press(whole, "ESCAPE")
    assert whole.execute_script("return document.querySelectorAll('.trial.off').length") == 0


def test_without_scripts_all_can_be_read(tmp_path):
    with opened(write(tmp_path / "page.html", render_page(contents())), script=False) as driver:
        text = driver.find_element("css selector", "main").text
    for word in (
        "Results",
        "10.0 µs",
        "0.0100 ×",
        "The knob waterfall",
        "sliced_k=2",
        "too many registers",
        "Provenance",
    ):
        assert word in text


COLUMNS = ("TE", "scheduled TIR", "CUDA", "SASS")


def test_a_click_on_a_request_lights_its_lines_of_code(built):
    request = built.find_element("css selector", ".request[aria-label^='load of weight_shared']")
    groups = set(request.get_attribute("data-groups").split())
    built.execute_script("arguments[0].click()", request)
    names = built.execute_script(
        "return [...document.querySelectorAll('.columns.code section')]"
        ".filter(e => e.querySelector('.lit')).map(e => e.querySelector('h3').textContent)"
    )
    assert names == list(COLUMNS)
    assert all(groups & set(each.split()) for each in lit(built))
    press(built, "ESCAPE")


def test_a_line_lights_those_of_its_statements(built):
    """Every line with a statement in common is lit, and no other."""
    line = built.find_element("css selector", ".columns.code .lines [data-groups]")
    built.execute_script("arguments[0].click()", line)
    groups = set(line.get_attribute("data-groups").split())
    everything = built.execute_script(
        "return [...document.querySelectorAll('[data-groups]')].map(e => e.dataset.groups)"
    )
    assert sorted(lit(built)) == sorted(each for each in everything if groups & set(each.split()))
    press(built, "ESCAPE")


def test_a_page_with_code_fits_the_screen_and_the_policy(built):
    assert built.get_log("browser") == []
    assert not built.execute_script("return window.violations")
    size = {"width": 360, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    built.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    assert built.execute_script("return document.documentElement.scrollWidth") <= 360


@pytest.mark.slow
def test_two_schedules_are_compared_by_the_keyboard_and_the_link_keeps_it(compared):
    compared.execute_script("document.querySelector('.compare input').focus()")
    press(compared, "SPACE", "TAB", "TAB", "TAB", "TAB", "ARROW_RIGHT")
    shown = """return [...document.querySelectorAll('.kernel')].map(kernel => [kernel.dataset.side,
        [...kernel.querySelectorAll('[data-level]')].filter(e => e.checkVisibility()).map(e => e.dataset.level)])"""
    assert compared.execute_script(shown) == [["left", ["CUDA"]], ["right", ["CUDA"]]]
    assert compared.current_url.endswith("#compare=tiling%2Cdefault%2CCUDA%2C55")
    widths = "return [...document.querySelectorAll('.kernel')].map(e => e.getBoundingClientRect().width)"
    before = compared.execute_script(widths)
    assert before[0] > before[1]
    compared.refresh()
    assert compared.execute_script(widths) == before
    assert not compared.execute_script("return window.violations")


@pytest.mark.sample(1)
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing(compared, dark):
    axe = pytest.importorskip("axe_core_python")
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    compared.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    compared.execute_script("document.querySelectorAll('details').forEach(each => { each.open = true })")
    compared.execute_script(Path(axe.__file__).with_name("axe.min.js").read_text(encoding="utf-8"))
    found = compared.execute_async_script(
        "axe.run({resultTypes: ['violations']}).then(arguments[arguments.length - 1])"
    )["violations"]
    told = [(each["id"], each["impact"], len(each["nodes"]), each["nodes"][0]["html"][:200]) for each in found]
    assert told == []
