"""What a kernel has to be for."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is missing")

from tvmconv.torch.layer import is_tf32_allowed, make_input_key  # noqa: E402


def test_a_key_is_shape_dtype_device_and_whether_tf32_is_allowed():
    x = torch.zeros(1, 2, 3, 4)
    assert make_input_key(x) == ((1, 2, 3, 4), torch.float32, torch.device("cpu"), False)
    with torch.autocast("cpu", torch.bfloat16):
        assert make_input_key(x)[1] is torch.bfloat16
        assert make_input_key(torch.zeros(1, dtype=torch.int64))[1] is torch.int64


def test_tf32_is_read_by_either_name():
    before = torch.backends.cudnn.allow_tf32
    try:
        for allowed in (False, True):
            torch.backends.cudnn.allow_tf32 = allowed
            assert is_tf32_allowed() is allowed
        if hasattr(torch.backends.cudnn, "conv"):
            torch.backends.cudnn.conv.fp32_precision = "ieee"
            assert not is_tf32_allowed()
            torch.backends.cudnn.conv.fp32_precision = "tf32"
            assert is_tf32_allowed()
    finally:
        torch.backends.cudnn.allow_tf32 = before
