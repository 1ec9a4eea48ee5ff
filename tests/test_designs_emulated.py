"""The designs on the emulated array, against the float64 reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from layers import SCHEMES, Known, Scheme, make_layer
from oracle_gemm import Weights, error_bound

from tilefuse import host_buffers
from tilefuse import plan as planning
from tilefuse.emulator import iron
from tilefuse.emulator.session import Session, program
from tilefuse.errors import ArrayLimitError, DataflowError, DeviceError, DtypeError, LayoutError, ShapeError
from tilefuse.layout import Layout
from tilefuse.packed import PackedLinear
from tilefuse.plan import PlainLayout, Plan
from tilefuse.testing import gemm_error

Rng = np.random.Generator

BF16_ROUNDOFF = 2.0**-8


def activations(rng: Rng, m: int, k: int) -> Any:
    return rng.normal(0, 1, (m, k)).astype(np.float32)


def check_gemm(y: Any, x: Any, layer: PackedLinear) -> None:
    """Within the kernels' derived bound (`oracle_gemm.error_bound`), and that of rounding to bfloat16: once, and once
    more when a bias is added."""
    x64 = x.astype(ml_dtypes.bfloat16).astype(np.float64)
    if layer.perm is not None:
        x64 = x64[:, layer.perm]
    weights = Weights.of(layer)
    exact = x64 @ weights.exact()
    bound = error_bound(x64, weights, "mantissa" if weights.m is None else "bfp16")
    bound += BF16_ROUNDOFF * (np.abs(exact) + bound)
    if layer.bias is not None:
        exact = exact + layer.bias
        bound += BF16_ROUNDOFF * (np.abs(exact) + bound)
    assert (np.abs(y.astype(np.float64) - exact) <= bound).all()


def run_gemm(rng: Rng, known: Known, m: int, **options: Any) -> Plan:
    plan = planning.gemm(known.layer.layout, m, **options)
    x = activations(rng, m, known.layer.k)
    y, report = Session(plan).run(plan, x, known.layer)
    assert report.cycles > 0
    assert y.shape == (m, known.layer.n)
    check_gemm(y, x, known.layer)
    return plan


def run_gemv(rng: Rng, known: Known, streams: int) -> Any:
    plan = planning.gemv(known.layer.layout, streams=streams)
    x = activations(rng, 1, known.layer.k)[0]
    y, _ = Session(plan).run(plan, x, known.layer)
    return gemm_error(y[0], x, known.layer)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_gemm_of_every_scheme(rng: Rng, scheme: Scheme) -> None:
    """Odd M, K no multiple of a tile, N no multiple of 64, several passes and row blocks of one band."""
    known = make_layer(rng, 576 if scheme.group == 192 else 640, 1100, scheme, bias=True, perm=not scheme.mins)
    run_gemm(rng, known, 77)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("streams", [1, 2])
def test_gemv_of_every_scheme(rng: Rng, scheme: Scheme, streams: int) -> None:
    known = make_layer(rng, 576 if scheme.group == 192 else 1184, 700, scheme, bias=True, perm=not scheme.mins)
    assert run_gemv(rng, known, streams).ok


@pytest.mark.parametrize("columns", [8, 7, 5, 4])
@pytest.mark.parametrize("op", ["gemm", "gemv", "gemv2"])
def test_columns(rng: Rng, columns: int, op: str) -> None:
    known = make_layer(rng, 300, 64 * columns + 10, Scheme(4, 64), columns=columns)
    if op == "gemm":
        run_gemm(rng, known, 33)
    else:
        assert run_gemv(rng, known, 2 if op == "gemv2" else 1).ok


@pytest.mark.parametrize("columns", [1, 3])
def test_a_gemv_on_few_columns(rng: Rng, columns: int) -> None:
    known = make_layer(rng, 200, 100, Scheme(8, 128), columns=columns)
    assert run_gemv(rng, known, 1).ok


@pytest.mark.parametrize("m", [1, 64, 65])
def test_the_smallest_gemm(rng: Rng, m: int) -> None:
    known = make_layer(rng, 32, 1, Scheme(4, 32))
    run_gemm(rng, known, m)


@pytest.mark.parametrize("streams", [1, 2])
def test_the_smallest_gemv(rng: Rng, streams: int) -> None:
    assert run_gemv(rng, make_layer(rng, 32, 1, Scheme(4, 32)), streams).ok


@pytest.mark.parametrize(
    ("tiles", "bands"), [(1, 1), (1, 2), (1, 3), (1, 4), (1, 8), (2, 2), (2, 4)], ids=lambda value: str(value)
)
def test_gemm_of_every_tile(rng: Rng, tiles: int, bands: int) -> None:
    """Three output tiles a column: one beside its neighbour once more, where two are computed side by side."""
    known = make_layer(rng, 512, 1536, Scheme(4, 128))
    plan = run_gemm(rng, known, 64 * bands + 1, tiles=tiles, bands=bands)
    assert plan.bands == bands
    assert plan.row_blocks == 2


@pytest.mark.parametrize("scheme", [Scheme(4, 128), Scheme(8, 128)], ids=str)
@pytest.mark.parametrize(("k", "n"), [(32768, 64), (128, 32768)], ids=["K", "N"])
@pytest.mark.parametrize("op", ["gemm", "gemv", "gemv2"])
def test_the_largest_k_and_n(rng: Rng, scheme: Scheme, k: int, n: int, op: str) -> None:
    known = make_layer(rng, k, n, scheme)
    if op == "gemm":
        run_gemm(rng, known, 5)
    else:
        assert run_gemv(rng, known, 2 if op == "gemv2" else 1).ok


def test_an_n_beyond_one_pass_of_the_activations(rng: Rng) -> None:
    """A repeat has 64 turns, so that the 66 tiles of a column take two segments; two at a time, 33."""
    known = make_layer(rng, 128, 66 * 512, Scheme(8, 128))
    assert len(run_gemm(rng, known, 3).segments) == 2
    assert run_gemv(rng, known, 1).ok


def test_one_configuration_runs_many_shapes(rng: Rng) -> None:
    """What one xclbin is for: three problems on the same emulated array, and the first once more."""
    shapes = [(300, 256, 600), (250, 640, 1030), (400, 32, 520)]
    problems = [(make_layer(rng, k, n, Scheme(4, 128)).layer, m) for m, k, n in shapes]
    session = Session(planning.gemm(problems[0][0].layout, 300, tiles=2, bands=4))
    for layer, m in (*problems, problems[0]):
        x = activations(rng, m, layer.k)
        y, _ = session.run(planning.gemm(layer.layout, m, tiles=2, bands=4), x, layer)
        check_gemm(y, x, layer)


@pytest.mark.parametrize("streams", [1, 2])
def test_one_gemv_configuration_runs_many_shapes(rng: Rng, streams: int) -> None:
    session = None
    for k, n in [(2200, 100), (128, 1100), (640, 520)]:
        known = make_layer(rng, k, n, Scheme(4, 64))
        plan = planning.gemv(known.layer.layout, streams=streams)
        session = session or Session(plan)
        x = activations(rng, 1, k)
        y, _ = session.run(plan, x, known.layer)
        assert gemm_error(y, x, known.layer).ok


def test_a_session_is_of_one_configuration(rng: Rng) -> None:
    known = make_layer(rng, 128, 64, Scheme(4, 128))
    session = Session(planning.gemv(known.layer.layout))
    other = planning.gemv(known.layer.layout, streams=2)
    with pytest.raises(DeviceError, match="this session has gemv_bf16_w4g128_mantissa_128x64_1s_8c: start another"):
        session.run(other, np.zeros(128, np.float32), known.layer)


def test_what_a_run_is_given_is_checked(rng: Rng) -> None:
    known = make_layer(rng, 128, 64, Scheme(4, 128))
    plan = planning.gemv(known.layer.layout)
    session = Session(plan)
    with pytest.raises(ShapeError, match=r"x has shape \[127\]; the plan is for 1 rows of K = 128"):
        session.run(plan, np.zeros(127, np.float32), known.layer)
    other = make_layer(rng, 256, 64, Scheme(4, 128)).layer
    with pytest.raises(ShapeError, match="the plan is for"):
        session.run(plan, np.zeros(128, np.float32), other)
    baseline = planning.gemv_baseline(PlainLayout(128, 64))
    with pytest.raises(DtypeError, match="W is float32: pass a bfloat16 array"):
        Session(baseline).run(baseline, np.zeros(128, np.float32), np.zeros((128, 64), np.float32))


def test_the_hosts_buffers_are_checked(rng: Rng) -> None:
    layout = Layout(200, 100, 4, 64)
    for plan in (planning.gemm(layout, 1), planning.gemv(layout), planning.gemv(layout, streams=2)):
        x = activations(rng, 1, 200)
        for perm, error, message in (
            (np.arange(5, dtype=np.int32), ShapeError, r"perm has shape \[5\]; x has 200 channels"),
            (np.arange(200), DtypeError, "perm is int64"),
            (-np.arange(200, dtype=np.int32), LayoutError, "perm has values from -199 to 0"),
            (np.arange(1, 201, dtype=np.int32), LayoutError, "perm has values from 1 to 200"),
        ):
            with pytest.raises(error, match=message):
                host_buffers.stage(plan, x, perm)
        with pytest.raises(DtypeError, match="out is list; pass a NumPy array of int32"):
            host_buffers.stage(plan, x, out=[0])  # type: ignore[arg-type]
        with pytest.raises(ShapeError, match=r"out has shape \[3\]; the plan takes"):
            host_buffers.stage(plan, x, out=np.zeros(3, np.int32))
        read_only = np.zeros(plan.x_words, np.int32)
        read_only.setflags(write=False)
        with pytest.raises(LayoutError, match="out is read-only"):
            host_buffers.stage(plan, x, out=read_only)
        with pytest.raises(ShapeError, match=r"y has shape \[3\]"):
            host_buffers.results(plan, np.zeros(3, np.int32))
        with pytest.raises(DtypeError, match="y is float32"):
            host_buffers.results(plan, np.zeros(plan.y_words, np.float32))  # type: ignore[arg-type]


@pytest.mark.parametrize("op", ["gemm", "gemv"])
def test_the_same_run_takes_the_same_time(rng: Rng, op: str) -> None:
    known = make_layer(rng, 513, 210, Scheme(4, 96), columns=7)
    plan = planning.gemv(known.layer.layout) if op == "gemv" else planning.gemm(known.layer.layout, 63, bands=2)
    x = activations(rng, plan.m, 513)
    session = Session(plan)
    reports = [session.run(plan, x, known.layer)[1], session.time(plan), session.run(plan, x, known.layer)[1]]
    reports += [Session(plan).run(plan, x, known.layer)[1], session.time(plan)]
    assert len({report.cycles for report in reports}) == 1


# --- baselines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [8, 4])
def test_gemm_baseline(rng: Rng, columns: int) -> None:
    weights = rng.normal(0, 0.1, (300, 650)).astype(ml_dtypes.bfloat16)
    plan = planning.gemm_baseline(PlainLayout(300, 650, columns), 133)
    x = activations(rng, 133, 300)
    y, _ = Session(plan).run(plan, x, weights)
    x64, w64 = x.astype(ml_dtypes.bfloat16).astype(np.float64), weights.astype(np.float64)
    exact, bound = x64 @ w64, error_bound(x64, w64, "emulated")
    assert (np.abs(y.astype(np.float64) - exact) <= bound + BF16_ROUNDOFF * (np.abs(exact) + bound)).all()


def test_gemv_baseline(rng: Rng) -> None:
    weights = rng.normal(0, 0.1, (300, 1100)).astype(ml_dtypes.bfloat16)
    plan = planning.gemv_baseline(PlainLayout(300, 1100))
    x = activations(rng, 1, 300)
    y, _ = Session(plan).run(plan, x, weights)
    assert gemm_error(y, x, weights).ok


def test_gemv_on_one_row_of_packed_weights(rng: Rng) -> None:
    known = make_layer(rng, 300, 1100, Scheme(4, 32))
    plan = planning.gemv_baseline(known.layer.layout)
    x = activations(rng, 1, 300)
    y, _ = Session(plan).run(plan, x, known.layer)
    assert gemm_error(y, x, known.layer).ok


# --- mutations -------------------------------------------------------------------------------------------------------


def changed(**names: Any) -> Any:
    """The emulator's namespace with some names replaced."""
    return SimpleNamespace(**{name: getattr(iron, name) for name in iron.__all__} | names)


def run_changed(rng: Rng, namespace: Any, op: str = "gemm") -> None:
    known = make_layer(rng, 512, 1024, Scheme(4, 128))
    m = 1 if op == "gemv" else 300
    plan = planning.gemv(known.layer.layout) if op == "gemv" else planning.gemm(known.layer.layout, m, tiles=2)
    arrays = (
        host_buffers.stage(plan, activations(rng, m, 512)),
        known.layer.data.view(np.int32),
        host_buffers.empty_results(plan),
    )
    loaded = program(plan, namespace)
    iron.load(loaded).run(loaded, *arrays)


@pytest.mark.parametrize("op", ["gemm", "gemv"])
def test_unchanged_designs_run(rng: Rng, op: str) -> None:
    run_changed(rng, changed(), op)


@pytest.mark.parametrize("dimension", [1, 2, 3])
def test_a_stride_off_by_one(rng: Rng, dimension: int) -> None:
    """The last of the weights then lie beyond the buffer's end."""

    class Tap(iron.TensorAccessPattern):
        def __init__(self, dims: Any, offset: int, sizes: list[int], strides: list[int]) -> None:
            strides = list(strides)
            if sizes[dimension] > 1:
                strides[dimension] += 1
            super().__init__(dims, offset, sizes, strides)

    with pytest.raises(DataflowError, match=r"fill 0 of fifo 'w7': .* of a buffer of 68608"):
        run_changed(rng, changed(TensorAccessPattern=Tap))


def test_a_missing_wait(rng: Rng) -> None:
    """Drains that are not waited for are freed while they run. (A depth of one where two are needed is beside the
    emulator's own tests: these designs get by with one of each, and are only slower.)"""

    class Fifo(iron.ObjectFifo):
        def cons(self, *arguments: Any, **options: Any) -> Any:
            handle = super().cons(*arguments, **options)
            drain = handle.drain
            handle.drain = lambda host, wait, **more: drain(host, wait=False, **more)
            return handle

    with pytest.raises(DataflowError, match="too early"):
        run_changed(rng, changed(ObjectFifo=Fifo))


def test_a_buffer_too_many(rng: Rng) -> None:
    class Worker(iron.Worker):
        def __init__(self, core: Any, arguments: list[Any], **options: Any) -> None:
            spare = iron.Buffer(np.ndarray[(1024,), np.dtype[np.int32]], name=f"spare{id(self)}")
            super().__init__(lambda *given: core(*given[1:]), [spare, *arguments], **options)

    with pytest.raises(ArrayLimitError, match=r"core \(0, 2\) has 65536 bytes; the design needs 68352(?s:.*)'spare"):
        run_changed(rng, changed(Worker=Worker))
