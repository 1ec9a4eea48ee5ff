"""From a problem (M, K, N, how the weights are stored) to a plan: tiles, passes, descriptors, budgets.

    print(plan.gemm(Layout(k=4096, n=4096, bits=4, group=128), m=2048))

A plan is a value that prints. Making one checks every limit of the array that the problem meets, so what the compiler
or the hardware would refuse is refused here, in the problem's terms. Which tiles to take is decided by a model of what
each part of the array would need alone (`Plan.costs`): *modelled*, like everything that the emulator says of time.

Host buffers are words of 32 bits: ``x`` activations behind a head with the parameters, ``w`` the packed weights, ``y``
results, bfloat16 [rows][padded N]. docs/dataflow.md shows how they move.
"""

from tilefuse.plan.costs import Costs, Traffic
from tilefuse.plan.matrix import Outline, gemm, gemm_baseline, gemm_outline
from tilefuse.plan.score_tiles import AttentionPlan, Lengths, attention
from tilefuse.plan.stored import PlainLayout, Stored
from tilefuse.plan.value import MAX_BUFFER_BYTES, WINDOW, Plan
from tilefuse.plan.vector import gemv, gemv_baseline

__all__ = [
    "MAX_BUFFER_BYTES",
    "WINDOW",
    "AttentionPlan",
    "Costs",
    "Lengths",
    "Outline",
    "PlainLayout",
    "Plan",
    "Stored",
    "Traffic",
    "attention",
    "gemm",
    "gemm_baseline",
    "gemm_outline",
    "gemv",
    "gemv_baseline",
]
