"""SmolLM2-135M-Instruct on tilefuse: what `examples/check_smollm2.py` is made of."""
