"""From a full-precision checkpoint to a quantised one: what ``tilefuse quantize`` does (docs/quantize.md)."""

from tilefuse.awq.pipeline import Options, Quantized, quantize_checkpoint

__all__ = ["Options", "Quantized", "quantize_checkpoint"]
