"""The page's columns of code."""

import re
from html.parser import HTMLParser

import pytest

import tvmconv as tc
from tvmconv.analysis.sass.linked_sources import link_sources
from tvmconv.analysis.tir.scopes import iterate_statements
from tvmconv.compiler import nvrtc
from tvmconv.reports.page.code import MAX_COLUMN_LINES, render_code

pytestmark = pytest.mark.skipif(nvrtc.explain_unavailability() is not None, reason=str(nvrtc.explain_unavailability()))


@pytest.fixture(scope="module")
def kernel():
    return tc.build(tc.parse("conv2d:1x64x56x56,64x64x3x3,s1,p1"), "tiling", arch="sm_90")


@pytest.fixture(scope="module")
def columns(kernel):
    return dict(re.findall(r"<section [^>]*><h3>(.*?)</h3>(.*?)</section>", render_code(kernel, 2)))


def groups_of(column):
    return set(" ".join(re.findall(r'data-groups="(.*?)"', column)).split())


def test_every_store_of_the_kernel_is_in_the_columns_of_text(kernel, columns):
    stores = [
        n for n, (each, _) in enumerate(iterate_statements(kernel.lowered)) if type(each).__name__ == "BufferStore"
    ]
    for name in ("TE", "scheduled TIR", "CUDA"):
        assert {f"k2s0n{number}" for number in stores} <= groups_of(columns[name]), name


def test_every_statement_with_machine_code_is_in_its_column(kernel, columns):
    (own,) = link_sources(kernel)
    assert {f"k2s0n{number}" for number in own.instructions_by_statement if number is not None} == groups_of(
        columns["SASS"]
    )


def test_the_line_that_loads_x_tells_its_sectors(columns):
    (item,) = [each for each in columns["scheduled TIR"].split("<div") if " sectors</small>" in each and "X[" in each]
    assert "wavefronts" in item


def test_the_fragment_is_well_formed(kernel):
    class Open(HTMLParser):
        def __init__(self):
            super().__init__()
            self.tags = []

        def handle_starttag(self, tag, attrs):
            self.tags.append(tag)

        def handle_endtag(self, tag):
            assert self.tags.pop() == tag

    parser = Open()
    parser.feed(render_code(kernel, 0))
    assert parser.tags == []


def test_the_same_kernel_gives_the_same_bytes(kernel):
    assert render_code(kernel, 0) == render_code(kernel, 0)


def test_a_long_column_is_capped_and_says_what_it_leaves_out():
    built = tc.build(tc.parse("filter2d:4096x4096x3,5x5"), "register", arch="sm_90")
    sass = render_code(built, 0).split("<h3>SASS</h3>")[1]
    assert sass.count("<code>") == MAX_COLUMN_LINES
    assert "lines left out" in sass
