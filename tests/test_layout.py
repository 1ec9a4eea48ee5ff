"""The layout's numbers: worked out by hand from design.md, and the same on the C++ side."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle_layout import tile_group

from tilefuse import Layout, ZeroKind, _core, layout
from tilefuse.errors import LayoutError
from tilefuse.packed import native_layout


def test_constants_are_the_same_in_cpp() -> None:
    assert {name: getattr(layout, name) for name in _core.LAYOUT_CONSTANTS} == _core.LAYOUT_CONSTANTS
    assert len(_core.LAYOUT_CONSTANTS) == 5


def test_llama_down_projection() -> None:
    lay = Layout(k=14336, n=4096, bits=4, group=128)
    assert (lay.scale_offset, lay.zero_offset, lay.tile_bytes) == (4096, 4224, 4288)
    assert (lay.k_tiles, lay.n_tiles, lay.tiles_per_column, lay.groups_per_tile) == (112, 64, 8, 1)
    assert lay.column_bytes == 8 * 112 * 4288
    assert lay.nbytes == 64 * 112 * 4288
    assert lay.bits_per_weight == 4.1875
    assert lay.tile_offset(0, 0) == 0
    assert lay.tile_offset(0, 5) == 5 * 4288
    assert lay.tile_offset(3, 0) == 3 * lay.column_bytes
    assert lay.tile_offset(19, 2) == 3 * lay.column_bytes + (2 * 112 + 2) * 4288  # column 3, its third tile


def test_tile_sizes() -> None:
    # bits, group, kind -> codes + scales + zeros, up to a multiple of 64
    for bits, group, zero, expected in (
        (4, 32, "z8", 4096 + 512 + 256),
        (4, 64, "z8", 4096 + 256 + 128),
        (8, 128, "z8", 8192 + 128 + 64),
        (8, 32, "z8", 8192 + 512 + 256),
        (4, 32, "m16", 4096 + 512 + 512),
        (4, 128, "m16", 4096 + 128 + 128),
        (4, 192, "z8", 4096 + 256 + 128),
        (4, 4096, "z8", 4096 + 128 + 64),
    ):
        assert Layout(k=4096, n=64, bits=bits, group=group, zero=ZeroKind(zero)).tile_bytes == expected


def test_padding() -> None:
    lay = Layout(k=576, n=192, bits=4, group=64)
    assert (lay.k_padded, lay.n_padded, lay.k_tiles, lay.n_tiles) == (1024, 512, 8, 8)
    assert (lay.k_tiles_used, lay.n_tiles_used, lay.source_groups) == (5, 3, 9)
    assert Layout(k=576, n=192, bits=4, group=64, columns=3).n_tiles == 3


@given(
    k=st.integers(1, 4096),
    n=st.integers(1, 2048),
    bits=st.sampled_from([4, 8]),
    group=st.integers(1, 512),
    zero=st.sampled_from(ZeroKind),
    columns=st.integers(1, 8),
)
def test_offsets_are_the_same_in_cpp(k: int, n: int, bits: int, group: int, zero: ZeroKind, columns: int) -> None:
    try:
        expected_group = tile_group(k, group, zero is ZeroKind.M16)
    except ValueError:
        k_is_to_blame = zero is ZeroKind.M16 and (group >= k or math.gcd(group, 128) >= 32)
        with pytest.raises(LayoutError, match="K must be" if k_is_to_blame else "largest common group"):
            Layout(k=k, n=n, bits=bits, group=group, zero=zero, columns=columns)
        return
    lay = Layout(k=k, n=n, bits=bits, group=group, zero=zero, columns=columns)
    assert lay.tile_group == expected_group
    native = native_layout(lay)
    assert native.nbytes == lay.nbytes
    for name in ("groups_per_tile", "k_tiles_used", "n_tiles_used"):
        assert getattr(native, name) == getattr(lay, name)
    offsets = [lay.tile_offset(t, i) for t in range(lay.n_tiles) for i in range(lay.k_tiles)]
    assert offsets == [native.tile_offset(t, i) for t in range(lay.n_tiles) for i in range(lay.k_tiles)]
    assert sorted(offsets) == list(range(0, lay.nbytes, lay.tile_bytes))
    # The stream of a column is one run.
    column = [lay.tile_offset(t, i) for t in range(0, lay.n_tiles, columns) for i in range(lay.k_tiles)]
    assert column == list(range(0, lay.column_bytes, lay.tile_bytes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 0}, "K = 0"),
        ({"k": 32769}, "K = 32769"),
        ({"n": 0}, "N = 0"),
        ({"n": (1 << 20) + 1}, "N = 1048577"),
        ({"bits": 3}, "bits = 3"),
        ({"columns": 0}, "columns = 0"),
        ({"columns": 9}, "columns = 9"),
        ({"group": 0}, "group = 0"),
        ({"zero": "z9"}, "zero = 'z9': pass a ZeroKind, z8 or m16"),
        ({"group": 48}, "largest common group with a tile of 128 is 16"),
    ],
)
def test_limits(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout(**{"k": 256, "n": 64, "bits": 4, "group": 64} | changes)
    lay = Layout(k=256, n=64, bits=4, group=64)
    # Numbers of NumPy and names of kinds are what they mean.
    large = {"k": 32000, "n": 32000, "bits": 4, "group": 64}
    given: dict[str, Any] = {name: np.int16(value) for name, value in large.items()} | {"zero": "m16"}
    assert Layout(**given) == Layout(**large, zero=ZeroKind.M16)
    assert Layout(**given).nbytes == Layout(**large, zero=ZeroKind.M16).nbytes
    with pytest.raises(LayoutError, match="outside"):
        lay.tile_offset(lay.n_tiles, 0)
