"""The command line of the designs: ``python -m tilefuse.designs.gemm [--emit-mlir] M K N``.

It prints the plan of a problem, or with ``--emit-mlir`` what mlir-aie makes of the design. Exit code: 0; 1 when the
output can't be written; 2 when mlir-aie is missing or the array can't run the problem.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tilefuse import arch, plan
from tilefuse.attention_configurations import AttentionConfiguration
from tilefuse.configurations import Op
from tilefuse.designs.namespace import aie_namespace
from tilefuse.errors import LayoutError, PlanError, ToolchainError
from tilefuse.files import print_text, write_atomically
from tilefuse.layout import Layout, ZeroKind

Design = Callable[[Any, Any], Any]


def design_of(op: str) -> Design:
    """The design that a configuration's ``op`` names."""
    from tilefuse.designs.attention import attention
    from tilefuse.designs.gemm import gemm
    from tilefuse.designs.gemm_baseline import gemm_baseline
    from tilefuse.designs.gemv import gemv
    from tilefuse.designs.gemv_baseline import gemv_baseline

    designs: dict[str, Design] = {
        Op.GEMM: gemm,
        Op.GEMV: gemv,
        Op.GEMM_BASELINE: gemm_baseline,
        Op.GEMV_BASELINE: gemv_baseline,
        AttentionConfiguration.op: attention,
    }
    return designs[op]


def mlir(chosen: plan.Plan | plan.AttentionPlan) -> str:
    """The MLIR of a plan.

    Raises:
        ToolchainError: mlir-aie is not installed.
    """
    return str(design_of(chosen.configuration.op)(aie_namespace(), chosen)) + "\n"


def main(op: Op, arguments: Sequence[str] | None = None) -> int:
    """The command of one design; returns its exit code."""
    options = _parser(op).parse_args(arguments)
    return write(lambda: _plan(op, options), options)


def write(make: Callable[[], plan.Plan | plan.AttentionPlan], options: argparse.Namespace) -> int:
    """Writes a plan, or its MLIR, where the options say; returns the exit code."""
    try:
        chosen = make()
        text = mlir(chosen) if options.emit_mlir else f"{chosen}\n"
        if options.output is None:
            print_text(text)
        else:
            write_atomically(options.output, text.encode())
    except (PlanError, LayoutError, ToolchainError) as error:
        print(f"tilefuse: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"tilefuse: can't write {options.output or 'to standard output'}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """What all designs take."""
    parser.add_argument("--emit-mlir", action="store_true", help="print the MLIR instead (takes mlir-aie)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write there, not to the terminal")
    parser.add_argument(
        "--columns", type=int, default=arch.COLUMNS, help=f"columns of the array ({arch.COLUMNS} unless said)"
    )


def _parser(op: Op) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m tilefuse.designs.{op}", description=f"Prints the plan of a problem for the {op} design."
    )
    if op in (Op.GEMM, Op.GEMM_BASELINE):
        parser.add_argument("m", type=int, metavar="M", help="rows of activations")
    parser.add_argument("k", type=int, metavar="K", help="input channels")
    parser.add_argument("n", type=int, metavar="N", help="output channels")
    add_options(parser)
    if op is not Op.GEMM_BASELINE:
        plain = op is Op.GEMV_BASELINE
        parser.add_argument(
            "--bits",
            type=int,
            choices=(4, 8, 16) if plain else (4, 8),
            default=16 if plain else 4,
            help="bits of a weight" + (", 16 for bfloat16" if plain else ""),
        )
        parser.add_argument("--group", type=int, default=128, help="inputs that share a scale (128 unless said)")
        parser.add_argument(
            "--zero",
            choices=[kind.value for kind in ZeroKind],
            default=ZeroKind.Z8.value,
            help="zero points or minima (z8 unless said)",
        )
    if op is Op.GEMM:
        parser.add_argument("--tiles", type=int, choices=(1, 2), help="packed tiles side by side in a core")
        parser.add_argument("--bands", type=int, help="bands of 16 rows that a core computes at a time")
    if op is Op.GEMV:
        parser.add_argument("--streams", type=int, choices=(1, 2), default=1, help="weight streams of a column")
    return parser


def _plan(op: Op, options: argparse.Namespace) -> plan.Plan:
    if op is Op.GEMM_BASELINE:
        return plan.gemm_baseline(plan.PlainLayout(options.k, options.n, options.columns), options.m)
    if op is Op.GEMV_BASELINE and options.bits == 16:
        return plan.gemv_baseline(plan.PlainLayout(options.k, options.n, options.columns))
    layout = Layout(
        k=options.k,
        n=options.n,
        bits=options.bits,
        group=options.group,
        zero=ZeroKind(options.zero),
        columns=options.columns,
    )
    if op is Op.GEMM:
        return plan.gemm(layout, options.m, tiles=options.tiles, bands=options.bands)
    return plan.gemv(layout, streams=options.streams) if op is Op.GEMV else plan.gemv_baseline(layout)
