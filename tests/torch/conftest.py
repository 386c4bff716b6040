"""PyTorch is an extra: without it these tests are skipped."""

import pytest

pytest.importorskip("torch", reason='PyTorch is missing: pip install "tvmconv[torch]"')
