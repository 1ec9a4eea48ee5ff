"""The suite for devices on the array, on hardware: ``pytest -m npu``. Skipped, with the reason, where there is none."""

from __future__ import annotations

import pytest
from npu_suite import (  # noqa: F401
    test_a_gemv_on_few_columns,
    test_activations_that_are_not_finite,
    test_columns,
    test_gemm_of_every_scheme,
    test_gemv_of_every_scheme,
    test_linear_many,
    test_many,
    test_more_axes,
    test_no_rows,
    test_several_row_blocks,
    test_strides,
    test_the_largest_k_and_n,
    test_the_same_call_gives_the_same_bits,
    test_the_smallest_gemm,
    test_the_smallest_gemv,
    test_types,
)

from tilefuse.errors import NpuUnavailable
from tilefuse.runtime import resolve_device
from tilefuse.runtime.npu import NpuDevice

pytestmark = pytest.mark.npu


@pytest.fixture(scope="session")
def npu() -> str:
    """Opens the NPU once."""
    try:
        found = resolve_device("npu")
        assert isinstance(found, NpuDevice)
        print("device:", found.open())
    except NpuUnavailable as error:
        return str(error)
    return ""


@pytest.fixture
def device(npu: str) -> str:
    """The device's name."""
    if npu:
        pytest.skip(npu)
    return "npu"
