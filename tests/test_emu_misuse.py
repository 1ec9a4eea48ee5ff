"""What AIE2P does not have must not compile against the host aie_api either.

Each wrong line stands beside a right one that differs from it in one thing and compiles, so that a refusal can have no
other cause.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tilefuse import kernels_build

PROGRAM = """
#include <aie_api/aie.hpp>
using namespace aie;
"""
FUNCTION = """
void kernel_{number}(const bfloat16* a, const uint8* bytes, const int8* signed_bytes, const float* sums,
                     bfp16ebs8* stream) {{
  const vector<bfloat16, 64> v = load_v<64>(a);
  const vector<int8, 64> codes = load_v<64>(signed_bytes);
  const vector<uint8, 64> unsigned_codes = load_v<64>(bytes);
  const accum<accfloat, 64> acc(load_v<64>(sums));
  const block_vector<bfp16ebs8, 64> block = acc.to_vector<bfp16ebs8>();
  (void)v, (void)codes, (void)unsigned_codes, (void)block, (void)stream;
  {line}
}}
"""

CASES = {
    # Shapes and operand types that the multiplier lacks.
    "mmul shape": ("mmul<8, 8, 8, bfloat16, bfloat16> m;", "mmul<4, 16, 8, bfloat16, bfloat16> m;"),
    "mmul bf16 x int8": ("mmul<8, 8, 8, bfloat16, bfp16ebs8> m;", "mmul<8, 8, 8, bfloat16, int8> m;"),
    "mmul bf16 x int4": ("mmul<8, 8, 8, bfloat16, bfloat16> m;", "mmul<8, 8, 8, bfloat16, int4> m;"),
    "mmul bfp16 x bf16": ("mmul<8, 8, 8, bfp16ebs8, bfp16ebs8> m;", "mmul<8, 8, 8, bfp16ebs8, bfloat16> m;"),
    "mmul integer sums of bf16": (
        "mmul<8, 8, 8, bfloat16, bfloat16, accfloat> m;",
        "mmul<8, 8, 8, bfloat16, bfloat16, acc32> m;",
    ),
    "mmul float sums of int8": ("mmul<8, 8, 8, int8, int8, acc32> m;", "mmul<8, 8, 8, int8, int8, accfloat> m;"),
    "mmul int8 that starts from floats": (
        "mmul<8, 8, 8, int8, int8> m(acc.cast_to<acc32>());",
        "mmul<8, 8, 8, int8, int8> m(acc);",
    ),
    "bfp16 operand that is not transposed": (
        "mmul<8, 8, 8, bfp16ebs8, bfp16ebs8> m; m.mac(block, op_transpose(block));",
        "mmul<8, 8, 8, bfp16ebs8, bfp16ebs8> m; m.mac(block, block);",
    ),
    "operand of another type": (
        "mmul<8, 8, 8, bfloat16, bfp16ebs8> m; m.mac(v, op_transpose(block));",
        "mmul<8, 8, 8, bfloat16, bfp16ebs8> m; m.mac(codes, op_transpose(block));",
    ),
    "multiplier on a plain vector": ("(void)mul_8x8_8x8T(block, block);", "(void)mul_8x8_8x8T(block, codes);"),
    # Element-wise products of types that don't go together.
    "bf16 times int8": ("(void)mul(v, v);", "(void)mul(v, codes);"),
    "bf16 times float": (
        "(void)mul(v, v);",
        "(void)mul(v, acc.to_vector<float>());",
    ),
    "bf16 times float scalar": ("(void)mul(v, bfloat16(2.0f));", "(void)mul(v, 2.0f);"),
    "integer products into float": ("(void)mac(acc, v, v);", "(void)mac(acc, codes, codes);"),
    "sizes that differ": ("(void)add(v, v);", "(void)add(v, v.extract<32>(0));"),
    # Conversions: the device's library reinterprets bits without a word; nobody means that.
    "int8 into float accumulator": ("accum<accfloat, 64> x(v);", "accum<accfloat, 64> x(codes);"),
    "int8 assigned to float accumulator": (
        "accum<accfloat, 64> x; x = v;",
        "accum<accfloat, 64> x; x = codes;",
    ),
    "float accumulator to int8": ("(void)acc.to_vector<bfloat16>();", "(void)acc.to_vector<int8>();"),
    "implicit accumulator from vector": ("accum<accfloat, 64> x(v);", "accum<accfloat, 64> x = v;"),
    "bf16 to bf16": ("(void)to_float<bfloat16>(codes);", "(void)to_float<bfloat16>(v);"),
    "int8 to int": ("(void)to_float<float>(codes);", "(void)to_float<int8>(codes);"),
    "unpack two steps at once": (
        "vector<int8, 64> x = load_v<64>(reinterpret_cast<const int4*>(bytes)).unpack<int8>();",
        "vector<int16, 64> x = load_v<64>(reinterpret_cast<const int4*>(bytes)).unpack<int16>();",
    ),
    "unpack that changes the sign": (
        "vector<uint16, 64> x = unpack(unsigned_codes);",
        "vector<int16, 64> x = unpack(unsigned_codes);",
    ),
    "unpack bf16": ("(void)unpack(codes);", "(void)unpack(v);"),
    "bfp16 from half an accumulator": (
        "(void)acc.to_vector<bfp16ebs8>();",
        "(void)acc.extract<32>(0).to_vector<bfp16ebs8>();",
    ),
    # Vectors and memory.
    "vector of another size": ("vector<bfloat16, 64> x = load_v<64>(a);", "vector<bfloat16, 32> x = load_v<64>(a);"),
    "vector that is no register": ("(void)load_v<8>(a);", "(void)load_v<4>(a);"),
    "lanes that are no power of two": ("(void)load_v<32>(a);", "(void)load_v<48>(a);"),
    "vector of another type": ("vector<uint8, 64> x = load_v<64>(bytes);", "vector<int8, 64> x = load_v<64>(bytes);"),
    "vector of double": ("(void)zeros<float, 16>();", "(void)zeros<double, 16>();"),
    "store of another type": (
        "store_v(const_cast<int8*>(signed_bytes), codes);",
        "store_v(const_cast<uint8*>(bytes), codes);",
    ),
    "bfp16 loaded like a vector": (
        "block_vector_input_buffer_stream<bfp16ebs8, 64> s(stream); (void)s.pop();",
        "(void)load_v<64>(stream);",
    ),
    "extraction beyond the vector": ("(void)v.extract<32>(1);", "(void)v.extract<128>(0);"),
    "concatenation of unlike vectors": ("(void)concat(codes, codes);", "(void)concat(codes, unsigned_codes);"),
    "interleaving of unlike vectors": (
        "(void)interleave_zip(codes, codes, 1);",
        "(void)interleave_zip(codes, unsigned_codes, 1);",
    ),
    "arithmetic on nibbles": (
        "(void)add(codes, codes);",
        "const auto n = codes.cast_to<int4>(); (void)add(n, n);",
    ),
    # AIE2P has 2**x of fp32, as bfloat16; how its library compares floats is not emulated.
    "exp2 with a float result": (
        "(void)exp2<bfloat16>(acc.extract<32>(0).to_vector<float>());",
        "(void)exp2<float>(acc.extract<32>(0).to_vector<float>());",
    ),
    "exp2 of bf16": ("(void)exp2(acc.extract<32>(0).to_vector<float>());", "(void)exp2(v);"),
    "maximum of bf16": ("(void)max(codes, codes);", "(void)max(v, v);"),
    "selection by a mask of another size": (
        "(void)select(v, v, lt(codes, codes));",
        "(void)select(v, v, lt(codes, codes).extract<32>(0));",
    ),
    "transpose of 32-bit elements": ("(void)transpose(v, 8, 8);", "(void)transpose(acc.to_vector<float>(), 8, 8);"),
}


@pytest.fixture(scope="module")
def compiler(repository: Path) -> list[str]:
    """The command that checks a translation unit against the host aie_api."""
    path = shutil.which(os.environ.get("CXX", "g++"))
    if path is None:
        pytest.skip("no C++ compiler")
    flags = ["-std=c++20", "-fsyntax-only", "-Wno-psabi", "-DAIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16=1"]
    return [path, *flags, f"-I{repository / 'kernels' / 'emu'}"]


def compiles(compiler: list[str], lines: list[str]) -> tuple[bool, str]:
    program = PROGRAM + "".join(FUNCTION.format(number=number, line=line) for number, line in enumerate(lines))
    command = [*compiler, "-x", "c++", "-"]
    done = subprocess.run(command, input=program, capture_output=True, text=True, check=False)
    return done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def controls(compiler: list[str]) -> None:
    """All right lines compile: one program of them, each in a function of its own."""
    ok, errors = compiles(compiler, [right for right, _ in CASES.values()])
    assert ok, errors


@pytest.mark.usefixtures("controls")
@pytest.mark.parametrize("case", CASES)
def test_wrong_line_does_not_compile(case: str, compiler: list[str]) -> None:
    ok, errors = compiles(compiler, [CASES[case][1]])
    assert not ok
    assert "error:" in errors


KERNELS = {
    # A configuration that exists, and one that differs from it in one macro.
    "group 96": ("gemv_bf16_w4.cc", "TF_GROUP=64", "TF_GROUP=96"),
    "minima 2": ("gemv_bf16_w4.cc", "TF_MINIMA=1", "TF_MINIMA=2"),
    "rows 20": ("gemm_bf16_w4.cc", "TF_M=32", "TF_M=20"),
    "rows 128": ("gemm_bf16_w4.cc", "TF_M=64", "TF_M=128"),
    "path of the other operation": ("gemm_bf16_w8.cc", "TF_PATH=TF_PATH_BFP16", "TF_PATH=TF_PATH_ELEMENTWISE"),
    "mantissas with minima": ("gemm_bf16_w8.cc", "TF_MINIMA=0", "TF_MINIMA=1"),
}


@pytest.mark.parametrize("case", KERNELS)
def test_wrong_configuration_does_not_compile(case: str, compiler: list[str], repository: Path) -> None:
    source, right, wrong = KERNELS[case]
    for macro, expected in ((right, True), (wrong, False)):
        macros = {"TF_GROUP": "64", "TF_MINIMA": "0", "TF_M": "32", "TF_PATH": "TF_PATH_MANTISSA"}
        macros |= dict([macro.split("=")])
        defines = [f"-D{name}={value}" for name, value in macros.items()]
        command = [*compiler, *defines, str(repository / "kernels" / "aie" / source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) == expected, f"{macro}: {done.stderr}"


def test_macros_of_a_build_are_all_that_a_source_needs(compiler: list[str], repository: Path) -> None:
    # A host unit defines every macro; `make kernels` defines those of the configuration.
    chosen = {(c.source, c.macros.get("TF_PATH")): c for c in kernels_build.configurations()}
    assert {source for source, _ in chosen} == {path.name for path in (repository / "kernels" / "aie").glob("*.cc")}
    for configuration in chosen.values():
        defines = [f"-D{name}={value}" for name, value in configuration.macros.items()]
        command = [*compiler, *defines, str(repository / "kernels" / "aie" / configuration.source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{configuration.name}: {done.stderr}"
