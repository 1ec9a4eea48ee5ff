"""The short way from Python to the CPU kernels: what it takes, what it leaves to the long way, and that both agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layers import BF16, F16, F32, Known, Scheme, make_layer

import tilefuse as tf
from tilefuse import runtime
from tilefuse.testing import assert_gemm_close

K, N = 96, 40


@pytest.fixture
def known(rng: np.random.Generator) -> Known:
    """A layer that has been used, so that it has its native state."""
    made = make_layer(rng, K, N, Scheme(4, 32), bias=True, perm=True)
    tf.gemv(np.zeros(K, F32), made.layer)
    return made


def direct(known: Known, x: Any, axes: int = 0, out: Any = None) -> Any:
    return known.layer.__dict__["_cpu_direct"](x, axes, out)


def values(rng: np.random.Generator, *shape: int) -> Any:
    return rng.normal(size=shape).astype(F32)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("shape", [(K,), (1, K), (5, K), (2, 3, K), (2, 1, 3, K), (1, 1, K)], ids=str)
def test_plain_arrays(rng: np.random.Generator, known: Known, shape: tuple[int, ...], dtype: Any) -> None:
    x = values(rng, *shape).astype(dtype)
    y = direct(known, x)
    assert y.shape == (*shape[:-1], N)
    assert y.dtype == dtype
    assert_gemm_close(y.reshape(-1, N), x.reshape(-1, K), known.weights, known.bias)
    out = np.empty(y.shape, F32)
    assert direct(known, x, len(shape), out) is out
    np.testing.assert_array_equal(out.astype(dtype), y)
    np.testing.assert_array_equal(tf.linear(x, known.layer), y)


def test_strides(rng: np.random.Generator, known: Known) -> None:
    base = values(rng, 12, 2 * K)
    room = np.zeros((12, 100), F32)
    for x in (base[::-1, :K], base[::3, 50 : 50 + K], base[:1, :K], base[:, None, :K], base.reshape(12, 2, K)[:, 1]):
        out = room[: len(x), 7 : 7 + N].reshape(*x.shape[:-1], N) if x.ndim == 2 else None
        y = direct(known, x, 0, out)
        assert y is not None
        assert_gemm_close(y.reshape(-1, N), x.reshape(-1, K), known.weights, known.bias)
    assert not room[:, :7].any()
    assert not room[:, 7 + N :].any()


def declined(rng: np.random.Generator) -> list[tuple[str, Any, int, Any]]:
    x = values(rng, 3, K)
    both = np.zeros(3 * K + 3 * N, F32)
    overlapping = np.lib.stride_tricks.as_strided(np.zeros(N + 2, F32), (3, N), (4, 4))
    unaligned = np.zeros(3 * K * 4 + 1, np.uint8)[1:].view(F32).reshape(3, K)
    frozen = np.zeros((3, N), F32)
    frozen.flags.writeable = False
    return [
        ("K", x[:, 1:], 0, None),
        ("axes", x, 1, None),
        ("no axis", np.float32(1).reshape(()), 0, None),
        ("number", 1.0, 0, None),
        ("list", x.tolist(), 0, None),
        ("float64", x.astype(np.float64), 0, None),
        ("big-endian", x.astype(">f4"), 0, None),
        ("masked", np.ma.masked_less(x, 0), 0, None),
        ("columns apart", np.zeros((3, 2 * K), F32)[:, ::2], 0, None),
        ("transposed", np.zeros((K, 3), F32).T, 0, None),
        ("uneven rows", np.zeros((2, 5, K), F32)[:, :3], 0, None),
        ("unaligned", unaligned, 0, None),
        ("seven axes", np.zeros((1, 1, 1, 1, 1, 1, K), F32), 0, None),
        ("out list", x, 0, [1.0]),
        ("out N", x, 0, np.zeros((3, N + 1), F32)),
        ("out M", x, 0, np.zeros((2, N), F32)),
        ("out axes", x, 0, np.zeros((1, 3, N), F32)),
        ("out float64", x, 0, np.zeros((3, N))),
        ("out frozen", x, 0, frozen),
        ("out transposed", x, 0, np.zeros((N, 3), F32).T),
        ("out overlapping itself", x, 0, overlapping),
        ("out over x", both[: 3 * K].reshape(3, K), 0, both[2 * K : 2 * K + 3 * N].reshape(3, N)),
    ]


def test_what_is_declined(rng: np.random.Generator, known: Known) -> None:
    for what, x, axes, out in declined(rng):
        before = None if not isinstance(out, np.ndarray) else out.copy()
        assert direct(known, x, axes, out) is None, what
        if before is not None:
            np.testing.assert_array_equal(out, before, err_msg=what)


def test_devices(rng: np.random.Generator, known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another device is never passed by, however it is chosen."""
    x = values(rng, 3, K)
    exact = (x.astype(BF16).astype(np.float64) @ known.weights + known.bias).astype(F32)
    assert runtime.is_direct_cpu("cpu")
    assert runtime.is_direct_cpu(None)
    assert not runtime.is_direct_cpu("reference")
    assert not runtime.is_direct_cpu(["cpu"])  # type: ignore[arg-type]
    np.testing.assert_array_equal(tf.gemm(x, known.layer, device="reference"), exact)
    monkeypatch.setenv("TILEFUSE_DEVICE", "reference")
    assert not runtime.is_direct_cpu(None)
    np.testing.assert_array_equal(tf.gemm(x, known.layer), exact)
    np.testing.assert_array_equal(tf.linear_many([(x, known.layer)])[0], exact)
    monkeypatch.delenv("TILEFUSE_DEVICE")
    assert runtime.is_direct_cpu(None)


def test_many_with_one_that_is_refused(rng: np.random.Generator, known: Known) -> None:
    x = values(rng, 2, K)
    results = tf.linear_many(iter([(x, known.layer), (x[:, ::-1], known.layer)]))
    np.testing.assert_array_equal(results[0], tf.gemm(x, known.layer))
    np.testing.assert_array_equal(results[1], tf.gemm(np.ascontiguousarray(x[:, ::-1]), known.layer))
    with pytest.raises(tf.errors.ShapeError, match=f"K = {K}"):
        tf.linear_many([(x, known.layer), (x[:, 1:], known.layer)])


@pytest.mark.peers
@pytest.mark.parametrize("shape", [(K,), (1, K), (2, 3, K)], ids=str)
def test_torch(rng: np.random.Generator, known: Known, shape: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(values(rng, *shape))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        y = direct(known, x.to(dtype))
        assert y.dtype == dtype
        assert tuple(y.shape) == (*shape[:-1], N)
        assert_gemm_close(y.reshape(-1, N), x.to(dtype).reshape(-1, K), known.weights, known.bias)
    out = torch.empty((*shape[:-1], N), dtype=torch.bfloat16)
    assert direct(known, x, 0, out) is out
    assert torch.equal(out, direct(known, x).to(torch.bfloat16))
    for other in (x.double(), x.to("meta"), x.to_sparse(), torch.nn.Parameter(x), torch.complex(x, -x).conj().imag):
        assert direct(known, other) is None


@pytest.mark.peers
def test_torch_without_memory(rng: np.random.Generator, known: Known) -> None:
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(values(rng, 2, K))
    for transformed in (torch.func.functionalize, torch.func.vmap):
        with pytest.raises(tf.errors.DtypeError, match="without memory"):
            transformed(lambda part: tf.linear(part, known.layer))(x)
    freed, out = x.clone(), torch.empty(2, N)
    for each in (freed, out):
        each.untyped_storage().resize_(0)
    assert direct(known, freed) is None
    with pytest.raises(tf.errors.DtypeError, match="without memory"):
        tf.gemm(freed, known.layer)
    with pytest.raises(tf.errors.DtypeError, match="without memory"):
        tf.gemm(x, known.layer, out=out)
