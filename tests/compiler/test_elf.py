"""The code of a cubin is found without a tool."""

import pytest

import tvmconv as tc
from tvmconv.compiler.sass import extract_code_sections
from tvmconv.errors import CompileError


def test_a_kernel_has_its_code_in_a_section_of_its_name():
    kernel = tc.build(tc.parse("conv2d:1x4x8x8,16x4x3x3,p1"), "tiling", arch="sm_90")
    (found,) = [name for name in extract_code_sections(kernel.cubin.image) if name.endswith(kernel.kernels[0].name)]
    instructions = kernel.listings[kernel.kernels[0].name]
    assert len(extract_code_sections(kernel.cubin.image)[found]) == 16 * len(instructions)


@pytest.mark.parametrize("image", [b"", b"\x7fELF\x02", b"no cubin", b"\x7fELF\x01" + bytes(100)])
def test_what_is_no_cubin_is_refused(image):
    with pytest.raises(CompileError, match=r"expected a [\w-]+ ELF file"):
        extract_code_sections(image)
