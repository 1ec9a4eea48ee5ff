#pragma once
#include <pybind11/pybind11.h>

namespace tilefuse {

void bind_attention(pybind11::module_& m);  // attention
void bind_block(pybind11::module_& m);      // decoder blocks, one token at a time
void bind_call(pybind11::module_& m);       // matmul on plain arrays, in one call
void bind_layout(pybind11::module_& m);     // pack, unpack
void bind_matmul(pybind11::module_& m);     // matmul on packed tiles, CPU features, threads
void bind_probe(pybind11::module_& m);      // what the machine can do at most, for benchmarks
void bind_staging(pybind11::module_& m);    // activations for the array

}  // namespace tilefuse
