"""SmolLM2-135M-Instruct on tilefuse: what `examples/run_smollm2.py` is made of."""
