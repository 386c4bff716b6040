"""Where statements are in the texts: told for every schedule of the library, and right."""

import functools
import re

from library_kernels import every_kernel, named

import tvmconv as tc
from tvmconv.compiler.source_lines import map_source_lines, map_tir_lines
from tvmconv.compiler.source_map import list_statements

in_cuda = functools.cache(lambda kernel: map_source_lines(kernel.lowered_module))
in_tir = functools.cache(lambda kernel: [map_tir_lines(step.function) for step in kernel.kernels])


def numbered(text, lines):
    """The text of some lines."""
    return text.split("\n")[lines.start - 1 : lines.stop - 1]


def test_every_statement_of_every_schedule_is_found_in_tirs_text():
    for kernel in every_kernel():
        for step, lines in zip(kernel.kernels, in_tir(kernel), strict=True):
            assert lines is not None, named(kernel)
            assert [len(each) for each in lines] == [1] * len(list_statements(step.function)), named(kernel)


def test_every_statement_of_every_schedule_is_in_the_cuda_text():
    for kernel in every_kernel():
        lines = in_cuda(kernel)
        assert lines is not None, named(kernel)
        assert all(len(each) for of_step in lines for each in of_step), named(kernel)


def test_lines_of_tir_store_to_the_statements_buffer():
    for kernel in every_kernel():
        text = kernel.lowered.script()
        for leaf, lines in zip(list_statements(kernel.lowered), in_tir(kernel)[0], strict=True):
            if leaf.key and leaf.key[0] == "store" and "cp_async" not in numbered(text, lines)[0]:
                assert re.match(rf" *{leaf.stored_buffer}(_\d+)?\[", numbered(text, lines)[0]), named(kernel)


def test_lines_of_cuda_name_the_statements_buffer():
    for kernel in every_kernel():
        for step, found in zip(kernel.kernels, in_cuda(kernel), strict=True):
            merged = "buf_dyn_shmem" in kernel.source  # where TVM keeps all dynamic shared arrays in one
            for leaf, lines in zip(list_statements(step.function), found, strict=True):
                text = "\n".join(numbered(kernel.source, lines))
                assert not leaf.stored_buffer or leaf.stored_buffer in text or (merged and "buf_dyn_shmem" in text), (
                    named(kernel)
                )


def test_the_lines_are_those_that_the_stage_shows():
    kernel = tc.build(tc.parse("conv2d:1x64x56x56,64x64x3x3,s1,p1"), "tiling", arch="sm_90")
    shown = kernel.format_ir_level("lowered").split("\n")
    last = map_tir_lines(kernel.lowered)[-1]
    assert shown[last.start - 1].lstrip().startswith("Y[")
