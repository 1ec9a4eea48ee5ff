"""IRON designs for the XDNA2 array, installed as ``tilefuse.designs``.

Each is a function of a namespace and a plan: `gemm`, `gemv`, and the baselines that they are compared with. Built with
`namespace.aie_namespace()` a design gives the MLIR that `make xclbins` compiles; built with `tilefuse.emulator.iron` it
gives a program that the emulator runs.
"""
