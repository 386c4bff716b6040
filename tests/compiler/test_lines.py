"""Lines of statements in all texts, and the scheduled and declared statements that lowered ones come from."""

import functools
import re

import pytest
from library_kernels import LADDER, every_kernel, named

import tvmconv as tc
from tvmconv.compiler.source_lines import map_source_lines, map_tir_lines
from tvmconv.compiler.source_map import list_statements, map_to_declared, map_to_scheduled

in_cuda = functools.cache(lambda kernel: map_source_lines(kernel.lowered_module))
in_tir = functools.cache(lambda kernel: [map_tir_lines(step.function) for step in kernel.kernels])


def numbered(text, lines):
    """The text of some lines."""
    return text.split("\n")[lines.start - 1 : lines.stop - 1]


@pytest.mark.slow
def test_every_statement_of_every_schedule_is_found_in_tirs_text():
    for kernel in every_kernel():
        for step, lines in zip(kernel.kernels, in_tir(kernel), strict=True):
            assert lines is not None, named(kernel)
            assert [len(each) for each in lines] == [1] * len(list_statements(step.function)), named(kernel)


@pytest.mark.slow
def test_every_statement_of_every_schedule_is_in_the_cuda_text():
    for kernel in every_kernel():
        lines = in_cuda(kernel)
        assert lines is not None, named(kernel)
        assert all(len(each) for of_step in lines for each in of_step), named(kernel)


@pytest.mark.slow
def test_lines_of_tir_store_to_the_statements_buffer():
    for kernel in every_kernel():
        text = kernel.lowered.script()
        for leaf, lines in zip(list_statements(kernel.lowered), in_tir(kernel)[0], strict=True):
            if leaf.key and leaf.key[0] == "store" and "cp_async" not in numbered(text, lines)[0]:
                assert re.match(rf" *{leaf.stored_buffer}(_\d+)?\[", numbered(text, lines)[0]), named(kernel)


@pytest.mark.slow
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


NO_ORIGIN = "storage_sync"  # lowering adds these barriers


@functools.cache
def shares():
    """The share of each kernel's stores and calls whose scheduled statement is known, by the kernel."""
    found = {}
    for kernel in every_kernel():
        functions = [step.function for step in kernel.kernels]
        told = total = 0
        for function, origins in zip(functions, map_to_scheduled(kernel.tir["main"], functions), strict=True):
            asked = [leaf.index for leaf in list_statements(function) if leaf.key and NO_ORIGIN not in str(leaf.key)]
            told, total = told + sum(number in origins for number in asked), total + len(asked)
        found[kernel] = told / total
    return found


def test_the_ladder_has_all_its_origins():
    assert {share for kernel, share in shares().items() if kernel.schedule.name in LADDER} == {1.0}


def test_seven_schedules_in_eight_have_95_percent_of_their_origins():
    enough = [share >= 0.95 for share in shares().values()]
    assert sum(enough) >= 7 / 8 * len(enough)


def test_origins_store_to_the_same_buffer():
    for kernel in every_kernel():
        functions = [step.function for step in kernel.kernels]
        scheduled = list_statements(kernel.tir["main"])
        for function, origins in zip(functions, map_to_scheduled(kernel.tir["main"], functions), strict=True):
            lowered = list_statements(function)
            assert all(lowered[a].stored_buffer == scheduled[b].stored_buffer for a, b in origins.items()), named(
                kernel
            )


def declared_lines(text, schedule):
    """The lines of the declaration that each lowered store is for, by the name of its buffer."""
    kernel = tc.build(tc.parse(text), schedule, arch="sm_90")
    declaration = kernel.workload.prim_func()
    lines, shown = map_tir_lines(declaration), declaration.script().split("\n")
    (origins,) = map_to_scheduled(kernel.tir["main"], [kernel.lowered])
    declared = map_to_declared(declaration, kernel.tir["main"])
    found = {}
    for leaf in list_statements(kernel.lowered):
        if leaf.stored_buffer and leaf.index in origins and origins[leaf.index] in declared:
            for number in declared[origins[leaf.index]]:
                line = shown[lines[number].start - 1].strip()
                found.setdefault((leaf.stored_buffer, leaf.is_update), set()).add(
                    line.split(" = ")[0].split("[")[0] + line[-4:]
                )
    return found


@pytest.fixture(scope="module")
def of_tiling():
    return declared_lines("conv2d:1x64x56x56,64x64x3x3,s1,p1", "tiling")


def test_copy_in_shared_memory_is_for_the_padding_that_it_copies(of_tiling):
    assert {name[:6] for name in of_tiling["padded_shared", False]} == {"padded"}


def test_what_begins_a_sum_is_for_its_initial_value_alone(of_tiling):
    assert of_tiling["sum_local", False] == {"sum0.0)"}


def test_a_stage_that_was_inlined_is_what_its_reader_is_for():
    found = declared_lines("conv2d:1x64x56x56,64x64x3x3,s1,p1", "default")
    assert {name[:3] for name in found["sum_local", True]} == {"sum", "pad", "wei"}


def test_reused_shared_memory_is_not_taken_for_the_array_before():
    kernel = next(k for k in every_kernel() if k.schedule.name == "tensor_core" and k.workload.dtype == "float16")
    (origins,) = map_to_scheduled(kernel.tir["main"], [kernel.lowered])
    reused = [
        e.index
        for e in list_statements(kernel.lowered)
        if e.stored_buffer in ("weight_reindex_shared_dyn", "padded_reindex_pad_shared_dyn")
        and "warp" in str(e.read_buffers)
    ]
    assert reused
    assert not set(reused) & origins.keys()
