"""The libraries that `benchmarks/cpu.py` compares: an adapter for each, and the process that it runs in."""
