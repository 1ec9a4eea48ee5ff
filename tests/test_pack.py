"""The packer against the NumPy model of the layout, and unpacking against the packer."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle_layout import BITS_OF, pack_oracle, random_layer

import tilefuse as tf
from tilefuse.errors import DtypeError, LayoutError, QuantizationError, ShapeError, TileFuseError
from tilefuse.quantized import CodeOrder

SCHEMES = [(order, bits) for order in CodeOrder for bits in BITS_OF[order]]


def bf16(values: Any) -> Any:
    return None if values is None else np.asarray(values).astype(np.float32).astype(ml_dtypes.bfloat16)


def check(layer: tf.QuantizedLinear, codes: Any, columns: int = 8) -> None:
    """Packed bytes are the model's, and unpacking returns the layer."""
    packed = tf.pack(layer, columns)
    assert packed.nbytes == tf.packed_nbytes(layer, columns) == packed.data.nbytes
    rows = codes if layer.perm is None else codes[layer.perm]
    scales, mins = bf16(layer.scales), bf16(layer.mins)
    expected = pack_oracle(rows, scales, layer.zeros, mins, layer.bits, layer.group, columns)
    np.testing.assert_array_equal(packed.data, expected)

    again = tf.unpack(packed)
    np.testing.assert_array_equal(again.codes, codes)
    np.testing.assert_array_equal(again.scales.view(np.uint16), scales.view(np.uint16))
    for found, wanted in ((again.zeros, layer.zeros), (again.bias, layer.bias), (again.perm, layer.perm)):
        np.testing.assert_array_equal(found, wanted)
    if mins is not None:
        assert again.mins is not None
        np.testing.assert_array_equal(again.mins.view(np.uint16), mins.view(np.uint16))
    np.testing.assert_array_equal(tf.pack(again, columns).data, packed.data)


def fit(order: CodeOrder, k: int, n: int) -> tuple[int, int]:
    """The nearest shape that ``order`` can store."""
    if order is CodeOrder.WORDS_N_AWQ:
        return k, -(-n // 8) * 8
    if order is CodeOrder.ROWS_N_FAST:
        return -(-k // 64) * 64, -(-n // 4) * 4
    return k, n


@pytest.mark.parametrize("perm", [False, True], ids=["sorted", "perm"])
@pytest.mark.parametrize(("order", "bits"), SCHEMES)
@pytest.mark.parametrize(
    ("k", "n", "group"),
    [(256, 128, 128), (576, 192, 64), (320, 72, 32), (384, 64, 192), (100, 70, 128), (700, 520, 96), (1, 1, 64)],
)
def test_bytes_are_the_models(order: CodeOrder, bits: int, k: int, n: int, group: int, perm: bool) -> None:
    k, n = fit(order, k, n)
    rng = np.random.default_rng([k, n, group])
    check(*random_layer(rng, k, n, bits, min(k, group), order, perm=perm, bias=True))


@pytest.mark.parametrize(("order", "bits"), SCHEMES)
@pytest.mark.parametrize(("k", "n", "group"), [(256, 128, 32), (576, 192, 576), (320, 70, 320), (640, 130, 128)])
def test_minima(order: CodeOrder, bits: int, k: int, n: int, group: int) -> None:
    k, n = fit(order, k, n)
    check(*random_layer(np.random.default_rng(k), k, n, bits, group, order, floating=True, scale_dtype=np.float16))


@given(st.data())
def test_any_layer(data: st.DataObject) -> None:
    order, bits = data.draw(st.sampled_from(SCHEMES))
    k, n = fit(order, data.draw(st.integers(1, 400)), data.draw(st.integers(1, 300)))
    floating = data.draw(st.booleans())
    if floating:
        k = -(-k // 64) * 64
    group = data.draw(st.sampled_from([32, 64, 96, 128, 192, 256, k]))
    group = min(group, k)
    dtype = data.draw(st.sampled_from([np.float16, np.float32, ml_dtypes.bfloat16]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    perm, columns = data.draw(st.booleans()), data.draw(st.integers(1, 8))
    check(
        *random_layer(rng, k, n, bits, group, order, floating=floating, perm=perm, scale_dtype=dtype),
        columns=columns,
    )


def check_round_trip(layer: tf.QuantizedLinear, codes: Any) -> None:
    """Unpacking returns the layer; for shapes whose model in NumPy would take seconds."""
    again = tf.unpack(tf.pack(layer))
    np.testing.assert_array_equal(again.codes, codes)
    np.testing.assert_array_equal(again.scales.view(np.uint16), bf16(layer.scales).view(np.uint16))
    np.testing.assert_array_equal(again.zeros, layer.zeros)


@pytest.mark.parametrize(("order", "bits"), SCHEMES)
@pytest.mark.parametrize(("k", "n"), [(32768, 3), (32767, 1), (8191, 9), (2, 4097), (1, 8192)])
def test_extreme_shapes(order: CodeOrder, bits: int, k: int, n: int) -> None:
    k, n = fit(order, k, n)
    check(*random_layer(np.random.default_rng(k + n), k, n, bits, min(k, 128), order))


@pytest.mark.parametrize(("order", "bits"), SCHEMES)
@pytest.mark.parametrize(("k", "n"), [(2, 32768), (1, 32767), (1, 128256), (3, 151936)])
def test_wide_shapes(order: CodeOrder, bits: int, k: int, n: int) -> None:
    k, n = fit(order, k, n)
    check_round_trip(*random_layer(np.random.default_rng(k + n), k, n, bits, min(k, 128), order))


@pytest.mark.parametrize(("order", "bits"), SCHEMES)
def test_every_edge(order: CodeOrder, bits: int) -> None:
    for size in (*range(1, 70), 127, 128, 129, 255, 511, 513, 1000, 2047, 4095, 5000, 16384):
        for k, n in (fit(order, size, 5), fit(order, 5, size)):
            check_round_trip(*random_layer(np.random.default_rng(size), k, n, bits, min(k, 32), order))


def test_first_bytes_worked_out_by_hand() -> None:
    # Input channel k of output channel n holds code (k + 3 n) mod 16.
    codes = ((np.arange(128)[:, None] + 3 * np.arange(64)[None, :]) % 16).astype(np.uint8)
    layer = tf.QuantizedLinear(
        name="hand",
        format="test",
        k=128,
        n=64,
        bits=4,
        group=128,
        codes=codes,
        order=CodeOrder.KN,
        scales=np.full((1, 64), 1.5, np.float16),
        zeros=np.full((1, 64), 7, np.uint8),
    )
    data = tf.pack(layer, 1).data
    assert data[:8].tolist() == [0x10, 0x32, 0x54, 0x76, 0x43, 0x65, 0x87, 0xA9]  # channels 0 and 1, inputs 0 to 7
    assert data[32:36].tolist() == [0x98, 0xBA, 0xDC, 0xFE]  # block 1: channel 8, whose input 0 holds 24 mod 16
    assert data[256:260].tolist() == [0x98, 0xBA, 0xDC, 0xFE]  # block row 1: channel 0, inputs 8 to 15
    assert data[4096:4100].tolist() == [0xC0, 0x3F, 0xC0, 0x3F]  # 1.5 in bfloat16 is 0x3fc0
    assert data[4224:4288].tolist() == [7] * 64
    assert data.size == 4 * 4288
    assert not data[4288:].any()


def test_dequantize_matches_float64() -> None:
    rng = np.random.default_rng(5)
    for floating, perm in ((False, False), (False, True), (True, True)):
        layer, codes = random_layer(rng, 320, 70, 4, 64, floating=floating, perm=perm, scale_dtype=np.float16)
        rows = codes[layer.perm] if layer.perm is not None else codes
        scales = np.repeat(bf16(layer.scales).astype(np.float64), 64, axis=0)
        if floating:
            # Float32 holds q s exactly; the sum is rounded to float32 and then to bfloat16.
            mins = np.repeat(bf16(layer.mins).astype(np.float64), 64, axis=0)
            sorted_weights = (rows * scales + mins).astype(np.float32)
        else:
            sorted_weights = (rows - np.repeat(layer.zeros, 64, axis=0).astype(np.float64)) * scales
        expected = np.empty((320, 70), ml_dtypes.bfloat16)
        expected[layer.perm if layer.perm is not None else slice(None)] = sorted_weights.astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(tf.pack(layer).dequantize().view(np.uint16), expected.view(np.uint16))


def test_padding_dequantises_to_zero() -> None:
    layer, _ = random_layer(np.random.default_rng(6), 100, 70, 4, 64)
    packed = tf.pack(layer)
    whole = dataclasses.replace(packed.layout, k=packed.layout.k_padded, n=packed.layout.n_padded)
    assert whole.nbytes == packed.nbytes
    weights = tf.PackedLinear("padded", whole, packed.data).dequantize().astype(np.float32)
    assert not weights[100:].any()
    assert not weights[:, 70:].any()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_every_float16_and_rounding_of_scales(dtype: Any) -> None:
    if dtype is np.float32:
        # Ties, both sides of ties, denormals, the largest value that does not overflow, and signed zeros.
        patterns = np.array(
            [
                0x3F808000,
                0x3F818000,
                0x3F807FFF,
                0x3F808001,
                0x00000001,
                0x00008000,
                0x00008001,
                0x807FFFFF,
                0x7F7F7FFF,
                0xFF7F7FFF,
                0x00000000,
                0x80000000,
                0x00018000,
                0x007FFFFF,
            ],
            np.uint32,
        )
        expected = [0x3F80, 0x3F82, 0x3F80, 0x3F81, 0, 0, 1, 0x8080, 0x7F7F, 0xFF7F, 0, 0x8000, 2, 0x0080]
        values = patterns.view(np.float32)
    else:
        values = np.arange(2**16, dtype=np.uint16).view(dtype)
        values = values[np.isfinite(values.astype(np.float32))]
        expected = values.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16).tolist()
    n = values.size
    layer, _ = random_layer(np.random.default_rng(0), 1, n, 8, 1)
    layer = dataclasses.replace(layer, scales=values.reshape(1, n))
    assert tf.unpack(tf.pack(layer)).scales.view(np.uint16)[0].tolist() == list(expected)


def test_scales_of_any_strides() -> None:
    layer, codes = random_layer(np.random.default_rng(8), 256, 96, 4, 64, CodeOrder.ROWS_N)
    assert layer.zeros is not None
    transposed = dataclasses.replace(
        layer, scales=np.ascontiguousarray(layer.scales.T).T, zeros=np.asfortranarray(layer.zeros)
    )
    check(transposed, codes)
    # A field of a record: its stride is no multiple of its size.
    records = np.zeros(layer.scales.shape, [("scale", np.float16), ("other", np.uint8)])
    records["scale"] = layer.scales
    check(dataclasses.replace(layer, scales=records["scale"]), codes)


def test_pack_into_a_given_buffer() -> None:
    layer, _ = random_layer(np.random.default_rng(9), 200, 100, 4, 32)
    expected = tf.pack(layer).data
    dirty = tf.pack(layer).data
    dirty[:] = 0xFF
    assert tf.pack(layer, out=dirty).data is dirty
    np.testing.assert_array_equal(dirty, expected)
    with pytest.raises(LayoutError, match="bytes"):
        tf.pack(layer, out=dirty[:-64])
    with pytest.raises(LayoutError, match="multiple of 64"):
        tf.pack(layer, out=np.concatenate([dirty, dirty])[1 : dirty.size + 1])
    dirty.flags.writeable = False
    with pytest.raises(LayoutError, match="read-only"):
        tf.pack(layer, out=dirty)
    for other in (bytearray(dirty.size), "out", dirty.size):
        with pytest.raises(DtypeError, match=rf"out is a {type(other).__name__}: pass a NumPy array"):
            tf.pack(layer, out=other)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3.4e38, -3.4e38])
@pytest.mark.parametrize("what", ["scales", "mins"])
def test_unrepresentable_scale(value: float, what: str) -> None:
    layer, _ = random_layer(np.random.default_rng(1), 256, 200, 4, 64, floating=True, scale_dtype=np.float32)
    grid = getattr(layer, what).copy()
    grid[3, 150] = grid[2, 177] = value
    with pytest.raises(QuantizationError, match=rf"layer 'layer\.kn': {what[:-1]} .* of group 2, output channel 177"):
        tf.pack(dataclasses.replace(layer, **{what: grid}))


def test_float16_infinity_is_an_error() -> None:
    layer, _ = random_layer(np.random.default_rng(1), 64, 64, 8, 64, scale_dtype=np.float16)
    layer.scales[0, 5] = np.inf
    with pytest.raises(QuantizationError, match="scale inf of group 0, output channel 5 is not finite"):
        tf.pack(layer)


def test_zero_point_and_code_out_of_range() -> None:
    layer, _ = random_layer(np.random.default_rng(2), 256, 80, 4, 64, perm=True)
    zeros = layer.zeros.copy() if layer.zeros is not None else np.empty(0)
    zeros[1, 70] = 16
    with pytest.raises(QuantizationError, match="zero point 16 of group 1, output channel 70 is above 15"):
        tf.pack(dataclasses.replace(layer, zeros=zeros))
    codes = layer.codes.copy()
    codes[201, 77] = 200
    with pytest.raises(QuantizationError, match="code 200 of input channel 201, output channel 77 is above 15"):
        tf.pack(dataclasses.replace(layer, codes=codes))


BAD: list[tuple[dict[str, Any], type[TileFuseError], str]] = [
    ({"k": 128}, ShapeError, "codes has shape"),
    ({"n": 65}, ShapeError, "codes has shape"),
    ({"bits": 3}, LayoutError, "bits = 3"),
    ({"group": 16}, LayoutError, "multiple of 32"),
    ({"group": 0}, LayoutError, "group = 0"),
    ({"codes": np.zeros((256, 64), np.int8)}, DtypeError, "codes has dtype int8"),
    ({"codes": np.zeros((256, 64), ">u8")}, DtypeError, "codes has dtype"),
    ({"scales": np.zeros((3, 64), np.float16)}, ShapeError, "scales has shape"),
    ({"scales": np.zeros((4, 64), np.float64)}, DtypeError, "scales has dtype float64"),
    ({"scales": np.zeros((4, 64), ">f2")}, DtypeError, "scales has dtype >f2"),
    ({"zeros": np.zeros((4, 64), np.int32)}, DtypeError, "zeros has dtype int32"),
    ({"zeros": np.zeros((64, 4), np.uint8)}, ShapeError, "zeros has shape"),
    ({"zeros": None}, QuantizationError, "exactly one"),
    ({"mins": np.zeros((4, 64), np.float16)}, QuantizationError, "exactly one"),
    ({"bias": np.zeros(63, np.float32)}, ShapeError, "bias has shape"),
    ({"perm": np.zeros(256, np.int32)}, QuantizationError, "each input channel"),
    ({"perm": np.arange(256, dtype=np.int64)}, DtypeError, "perm has dtype int64"),
    ({"perm": np.arange(1, 257, dtype=np.int32)}, QuantizationError, "each input channel"),
    ({"perm": np.arange(255, dtype=np.int32)}, ShapeError, "perm has shape"),
    ({"order": CodeOrder.WORDS_N_AWQ, "bits": 8}, QuantizationError, "4-bit codes only"),
    ({"order": CodeOrder.ROWS_N_INT8}, QuantizationError, "8-bit codes only"),
    ({"order": CodeOrder.ROWS_N_FAST, "n": 62}, ShapeError, "must be a multiple of 64"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD, ids=[f"{m}-{i}" for i, (_, _, m) in enumerate(BAD)])
def test_bad_layers(changes: dict[str, Any], error: type[TileFuseError], message: str) -> None:
    layer, _ = random_layer(np.random.default_rng(3), 256, 64, 4, 64)
    with pytest.raises(error, match=message) as caught:
        tf.pack(dataclasses.replace(layer, **changes))
    assert "layer.kn" in str(caught.value)


def test_packed_linear_checks_its_buffers() -> None:
    layer, _ = random_layer(np.random.default_rng(4), 64, 64, 4, 64, bias=True, perm=True)
    packed = tf.pack(layer)
    assert packed.data.ctypes.data % 64 == 0
    for changes, message in (
        ({"data": packed.data.view(np.int8)}, "int8"),
        ({"data": packed.data[:-1]}, "bytes"),
        ({"data": np.concatenate([packed.data] * 2)[::2]}, "contiguous"),
        ({"bias": np.zeros(64)}, "bias is float64"),
        ({"perm": np.zeros(64, np.int32)}, "each input channel"),
        ({"perm": np.arange(64)}, "perm is int64"),
    ):
        with pytest.raises(LayoutError, match=message):
            dataclasses.replace(packed, **changes)
    assert "64 x 64, w4 g=channel z8, 8 columns, bias, perm" in repr(packed)


@pytest.mark.parametrize("name", ["bias", "perm", "scales", "zeros", "codes"])
def test_arrays_between_the_words_of_memory(name: str) -> None:
    """As a mapped file may have them: each array a byte past an element; packing copies what C++ reads by pointers."""
    rng = np.random.default_rng(1)
    layer = tf.quantize_linear(rng.standard_normal((64, 32)).astype(np.float32), group=32)
    layer = dataclasses.replace(
        layer, bias=rng.standard_normal(32).astype(np.float32), perm=rng.permutation(64).astype(np.int32)
    )
    array = getattr(layer, name)
    shifted = np.frombuffer(b"\0" + array.tobytes(), array.dtype, offset=1).reshape(array.shape)
    moved = tf.pack(dataclasses.replace(layer, **{name: shifted}))
    want = tf.pack(layer)
    np.testing.assert_array_equal(moved.data, want.data)
    assert moved.bias is not None
    assert moved.perm is not None
    assert moved.bias.flags.aligned
    assert moved.perm.flags.aligned
    x = rng.standard_normal((2, 64)).astype(np.float32)
    np.testing.assert_array_equal(tf.gemm(x, moved), tf.gemm(x, want))
    if name in ("bias", "perm"):
        with pytest.raises(LayoutError, match="aligned"):
            dataclasses.replace(want, **{name: shifted})


def test_threads_pack_at_the_same_time() -> None:
    layer, _ = random_layer(np.random.default_rng(10), 1024, 512, 4, 128, CodeOrder.WORDS_N_AWQ)
    expected = tf.pack(layer).data
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(5):
            if not np.array_equal(tf.pack(layer).data, expected):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_arguments_of_another_kind(tmp_path: Path) -> None:
    layer, _ = random_layer(np.random.default_rng(1), 64, 64, 4, 64, CodeOrder.KN)
    packed = tf.pack(layer)
    for call, message in (
        (lambda: tf.pack(packed), "q is a PackedLinear: pass a QuantizedLinear"),  # type: ignore[arg-type]
        (lambda: tf.unpack(layer), "packed is a QuantizedLinear: pass a PackedLinear"),  # type: ignore[arg-type]
        (lambda: tf.save(tmp_path / "a", [layer]), "layers holds a QuantizedLinear"),  # type: ignore[list-item]
        (lambda: tf.save(tmp_path / "a", {layer.name: layer}), "layers holds a QuantizedLinear"),  # type: ignore[dict-item]
    ):
        with pytest.raises(DtypeError, match=message):
            call()
    tf.save(tmp_path / "a", packed)
    np.testing.assert_array_equal(tf.load(tmp_path / "a")[packed.name].data, packed.data)
