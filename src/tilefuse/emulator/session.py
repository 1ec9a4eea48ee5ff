"""Plans on the emulated array, from x to y.

>>> from tilefuse import plan
>>> from tilefuse.emulator.session import Session
>>> chosen = plan.gemm(layer.layout, m=300)   # doctest: +SKIP
>>> session = Session(chosen)                 # doctest: +SKIP
>>> y, report = session.run(chosen, x, layer) # doctest: +SKIP

A session is one xclbin on an array of its own. Any plan of the same configuration runs on it, one after another.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tilefuse import host_buffers
from tilefuse._buffers import aligned_empty
from tilefuse.configurations import Configuration
from tilefuse.designs.emit import design_of
from tilefuse.emulator import iron
from tilefuse.emulator.timing import Report
from tilefuse.errors import DeviceError, DtypeError, ShapeError
from tilefuse.layout import BLOCK, KT, NT
from tilefuse.packed import PackedLinear
from tilefuse.plan import PlainLayout, Plan

Array = npt.NDArray[Any]


def program(plan: Plan, namespace: Any = iron) -> iron.Design:
    """The plan's design, built with the emulator's names.

    Args:
        plan: Any.
        namespace: In the place of `tilefuse.emulator.iron`, for designs that are changed on the way.
    """
    design = design_of(plan.configuration.op)(namespace, plan)
    assert isinstance(design, iron.Design)
    return design


class Session:
    """An emulated array with one configuration on it.

    Args:
        plan: Any plan of that configuration.

    Raises:
        ArrayLimitError: The array can't hold it.
    """

    def __init__(self, plan: Plan) -> None:
        self.configuration: Configuration = plan.configuration
        self._array = iron.load(program(plan))

    def run(self, plan: Plan, x: Any, weights: PackedLinear | Array, *, trace: bool = False) -> tuple[Array, Report]:
        """Computes y = x W + bias, and times it (*modelled*).

        The array rounds x W to bfloat16; a bias is added to that on the host, and the sum rounded once more.

        Args:
            plan: A plan of this session's configuration.
            x: As for `tilefuse.host_buffers.stage`.
            weights: The packed layer that the plan is for, or for a baseline W, bfloat16 [K, N].
            trace: Keeps what `Report.write_trace` writes.

        Returns:
            y: bfloat16 [M, N].
            report: What the run took.

        Raises:
            ShapeError, DtypeError, QuantizationError: x or the weights are not what the plan is for.
            DeviceError: The plan is of another configuration, or the design misuses the array.
        """
        self._check(plan)
        if isinstance(weights, PackedLinear):
            if weights.layout != plan.layout:
                raise ShapeError(f"the plan is for {plan.layout}; the layer is {weights.layout}")
            words, perm, bias = weights.data.view(np.int32), weights.perm, weights.bias
        else:
            words, perm, bias = plain_tiles(weights, plan), None, None
        staged = host_buffers.stage(plan, x, perm)
        y = host_buffers.empty_results(plan)
        report = self._array.run(program(plan), staged, words, y, trace=trace)
        results: Array = host_buffers.results(plan, y)
        if bias is not None:
            results = (results.astype(np.float32) + bias).astype(results.dtype)
        return results, report

    def time(self, plan: Plan, *, trace: bool = False) -> Report:
        """What a run of ``plan`` takes, *modelled*, without computing it.

        Raises:
            DeviceError: See `run`.
        """
        self._check(plan)
        head = host_buffers.stage_parameters(plan)
        return self._array.run(program(plan), head, None, None, timing_only=True, trace=trace)

    def _check(self, plan: Plan) -> None:
        if plan.configuration != self.configuration:
            raise DeviceError(
                f"the plan is for {plan.configuration.name}; this session has {self.configuration.name}: start another"
            )


def plain_tiles(weights: Array, plan: Plan) -> npt.NDArray[np.int32]:
    """W, bfloat16 [K, N], as a baseline's weights: tiles of 128 x 64 in blocks of 8 x 8, in the packed format's order.

    Raises:
        DtypeError: ``weights`` is not bfloat16.
        ShapeError: It is of another shape than the plan's.
    """
    layout = plan.layout
    if not isinstance(weights, np.ndarray) or weights.dtype != ml_dtypes.bfloat16:
        raise DtypeError(f"W is {getattr(weights, 'dtype', type(weights).__name__)}: pass a bfloat16 array")
    if not isinstance(layout, PlainLayout) or weights.shape != (layout.k, layout.n):
        raise ShapeError(f"W has shape {list(weights.shape)}; the plan is for {layout}")
    padded = np.zeros((layout.k_tiles * KT, layout.n_padded), ml_dtypes.bfloat16)
    padded[: layout.k, : layout.n] = weights
    blocks = padded.reshape(
        layout.k_tiles, KT // BLOCK, BLOCK, layout.tiles_per_column, layout.columns, NT // BLOCK, BLOCK
    )
    out = aligned_empty(layout.nbytes)
    out.view(ml_dtypes.bfloat16)[:] = blocks.transpose(4, 3, 0, 1, 5, 6, 2).reshape(-1)
    return out.view(np.int32)
