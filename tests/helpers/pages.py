"""Pages to look at: contents made by hand, and a browser that says what it met."""

import contextlib
import json
import shutil
from dataclasses import replace

import tvmconv as tc
from tvmconv.analysis.waterfall import WaterfallStep
from tvmconv.logs.record import Record
from tvmconv.measure.results import ErrorKind
from tvmconv.reports.page.contents import Contents, render_page
from tvmconv.reports.page.markup import Section, make_element, make_paragraph, render_document
from tvmconv.reports.timing_groups import NamedTiming, TimingGroup
from tvmconv.target import Target
from tvmconv.workloads import Layer

WORKLOAD = tc.parse("conv2d:1x16x16x16,16x16x3x3,s1,p1")
H200 = Target("NVIDIA H200", "sm_90", 132, 66.9e12, 4.8e12)
HOSTILE = "\"'><script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'>]]>-->\ud800\x00"


def record(seconds, number=0, **changes):
    """A record of a search over three knobs."""
    config = {"tile_f": (-1, 1 + number % 4, 2), "sliced_k": 1 + number % 2, "pipeline": ("none", "async")[number % 2]}
    told = Record(
        WORKLOAD,
        "direct",
        config,
        H200.name,
        "cuda -arch=sm_90",
        times=(seconds,),
        timestamp=1.79e9,
        elapsed=1.0 + number,
    )
    return replace(told, **changes)


def failed(message):
    """A record of what failed."""
    return record(0, times=(), error=ErrorKind.COMPILE_DEVICE, message=message)


def contents(**changes):
    """What a page on one workload shows, without kernels."""
    way = [
        WaterfallStep((), "L1", 4e-5, None, 0.5, 64, 1000, 2000),
        WaterfallStep((("sliced_k", 2),), "L1", 5e-5, None, 0.5, 64, 1000, 2000),
        WaterfallStep((("tile_f", (-1, 4, 2)), ("pipeline", "async")), "memory", 2e-5, 2.5e-5, 0.25, 64, 1000, 2000),
    ]
    times = (NamedTiming("direct", 1e-5), NamedTiming("cudnn", 2e-5, is_library=True), NamedTiming("default", 1e-3))
    told = Contents(
        name=WORKLOAD.text,
        layers=[Layer(WORKLOAD.text, WORKLOAD, 1)],
        target_text="Compiled for sm_90.",
        device_spec=H200,
        timing_groups={WORKLOAD: [TimingGroup("a run", H200.name, times, (("vthread", "it failed"),))]},
        focus_workload=WORKLOAD,
        kernels=[],
        searches=[("a log", [*(record(1e-5 * (1 + i % 7), i) for i in range(40)), failed("too many registers")])],
        waterfall=way,
        no_waterfall_reason="",
        counters=[],
        invalid_lines=[],
        provenance=[("this page", "made by a test")],
    )
    return replace(told, **changes)


def hostile_page():
    """A page all of whose texts would like to be markup."""
    groups = {
        WORKLOAD: [TimingGroup(HOSTILE, H200.name, (NamedTiming(HOSTILE, 1e-5, HOSTILE),), ((HOSTILE, HOSTILE),))]
    }
    records = [record(1e-5, i, config={"sliced_k": i, HOSTILE: HOSTILE * (1 + i)}, schedule=HOSTILE) for i in range(3)]
    layers = [Layer(HOSTILE, WORKLOAD, 2), Layer("other", WORKLOAD, 1)]
    return render_page(
        contents(
            name=HOSTILE,
            timing_groups=groups,
            layers=layers,
            searches=[(HOSTILE, [*records, failed(HOSTILE)])],
            provenance=[(HOSTILE, HOSTILE)],
        )
    )


def linked_page():
    """A page with elements that share groups: lines of two columns, and the cells of a grid."""
    column = [
        [make_element("span", f"{name} {i}", class_="line", data_groups=f"k0s0n{i} k0s0n{i + 1}") for i in range(60)]
        for name in ("tir", "sass")
    ]
    columns = [
        make_element("div", *lines, class_="column", tabindex="0", role="group", aria_label=name)
        for name, lines in zip(("TIR", "SASS"), column, strict=True)
    ]
    cells = [
        make_element("rect", x=20 * i, y=0, width=18, height=18, class_="cell", data_groups=f"k0s0n{50 + i}")
        for i in range(4)
    ]
    grid = make_element("svg", *cells, viewBox="0 0 80 20", width=80, height=20, role="group", aria_label="banks")
    return render_document(
        "linked",
        make_paragraph("Two columns and a grid."),
        [
            Section("code", "Code", make_element("div", *columns, class_="columns")),
            Section("memory", "Memory", make_element("div", grid, class_="grids")),
        ],
    )


def browser_missing():
    """Why there is no browser to test in; "" if there is one."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    return "" if shutil.which("chromium") and shutil.which("chromedriver") else "no chromium and chromedriver"


@contextlib.contextmanager
def opened(path, *, width=1280, dark=False, script=True):
    """A page in Chromium, which notes violations of the page's policy in `window.violations`."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not script})
        note = (
            "document.addEventListener('securitypolicyviolation', e => (window.violations ??= []).push(e.blockedURI))"
        )
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": note})
        driver.get(path.as_uri())
        yield driver
    finally:
        driver.quit()


def requests(driver):
    """The addresses that a browser asked for."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]


def write(path, text=None):
    """A page in a file."""
    path.write_text(render_page(contents()) if text is None else text, encoding="utf-8")
    return path
