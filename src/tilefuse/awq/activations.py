"""AWQ on a model: run the calibration text block by block, search, fold, clip, round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tilefuse.awq.blocks import Block, BlockStore
from tilefuse.awq.families import ATTENTION, BLOCKS, LINEARS, MLP, Family
from tilefuse.awq.fold import into_linear, into_norm, shared_heads
from tilefuse.awq.rounding import Rounding
from tilefuse.awq.search import clipped, find_scales
from tilefuse.awq.stream import StreamedModel, libraries
from tilefuse.awq.text import calibration_text, rows
from tilefuse.errors import QuantizationError
from tilefuse.formats.checkpoint import Checkpoint

if TYPE_CHECKING:
    from tilefuse.awq.pipeline import Options, Progress

_READERS = {
    "self_attn.q_proj": ATTENTION,
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_proj": MLP,
    "mlp.down_proj": ("mlp.down_proj",),
}
"""The layer whose inputs are recorded -> the layers that read the same."""

_UNCLIPPED = ("self_attn.q_proj", "self_attn.k_proj")
"""Their errors meet in a product and in a softmax, where those of a few large weights count most."""


def scale_blocks(checkpoint: Checkpoint, family: Family, options: Options, store: BlockStore, report: Progress) -> None:
    """Quantise the blocks that ``store`` lacks, and put them there.

    Every block is calibrated on what the unquantised blocks before it give.

    Raises:
        ImportError, FormatError, UnsupportedFormatError: As in `quantize_checkpoint`.
    """
    report("reading the text", 0, 0)
    model = StreamedModel(checkpoint.path, checkpoint.tensor, options.device)
    ids = rows(checkpoint.path, calibration_text() if options.calibration is None else options.calibration)
    count = len(model.blocks)
    inputs: dict[str, Any] = {}

    def record(block: Any) -> None:
        for name in _READERS:

            def hook(module: Any, given: Any, name: str = name) -> None:
                inputs[name] = given[0].reshape(-1, given[0].shape[-1])

            block.get_submodule(name).register_forward_pre_hook(hook)

    for index, block in enumerate(model.blocks):
        if index not in store:
            record(block)

    def on_block(index: int, block: Any) -> None:
        if index not in store:
            scaler = _Scaler(checkpoint, family, options, index, block, inputs, model.config.num_key_value_heads)
            store.write(index, scaler.run())
        inputs.clear()
        report("quantising", index + 1, count)

    report("quantising", 0, count)
    model.hidden(ids, on_block)


class _Scaler:
    """One block, its weights in memory, and the inputs of its linear layers."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        family: Family,
        options: Options,
        index: int,
        block: Any,
        inputs: dict[str, Any],
        kv_heads: int,
    ) -> None:
        from tilefuse.awq.pipeline import scale_dtype

        self._checkpoint, self._options, self._family = checkpoint, options, family
        self._prefix, self._block, self._inputs, self._kv_heads = f"{BLOCKS}.{index}", block, inputs, kv_heads
        self._scales = scale_dtype(checkpoint, options)
        symmetric = options.bits == 8
        self._group = options.group
        self._symmetric, self._half = symmetric, self._scales == "float16"

    def run(self) -> Block:
        """Search, fold, clip and round; returns the tensors of the block."""
        torch, _ = libraries()
        with torch.no_grad():
            for reader, x in self._inputs.items():
                if not torch.isfinite(x).all():
                    # Every comparison of errors would be false, and the searches would find nothing and not say so.
                    raise QuantizationError(
                        f"the inputs of '{self._prefix}.{reader}' are not finite on the calibration text: a weight "
                        "before it is damaged or overflows"
                    )
            tensors = self._fold()
            for reader, linears in _READERS.items():
                x = self._inputs[reader]
                for name in linears:
                    linear = self._block.get_submodule(name)
                    if name not in _UNCLIPPED:
                        linear.weight.copy_(clipped(x, linear.weight, self._rounding(linear)))
            for name in LINEARS:
                tensors |= self._rounded(name)
        return tensors

    def _rounding(self, linear: Any) -> Rounding:
        k = linear.weight.shape[1]
        return Rounding(self._options.bits, k if self._group == -1 else self._group, self._symmetric, self._half)

    def _find(self, reader: str, shared: Any = None) -> Any:
        """Scales for the layers that read one input: [K], or as many as ``shared`` has values."""
        torch, _ = libraries()
        x = self._inputs[reader]
        layers = [self._block.get_submodule(name) for name in _READERS[reader]]
        magnitude = x.abs().mean(0)
        if shared is not None:
            count = int(shared.max()) + 1
            sums = torch.zeros(count, device=x.device).index_add_(0, shared, magnitude)
            magnitude = sums / (shared.shape[0] // count)
        w = torch.cat([layer.weight for layer in layers])
        return find_scales(x, w, magnitude, self._rounding(layers[0]), shared)

    def _fold(self) -> Block:
        """Scale all inputs; the recorded ones become those of the scaled block. Returns the norms that changed."""
        torch, _ = libraries()
        tensors: Block = {}
        for reader, norm_name in (
            ("self_attn.q_proj", self._family.attention_norm),
            ("mlp.gate_proj", self._family.mlp_norm),
        ):
            norm = self._block.get_submodule(norm_name)
            name = f"{self._prefix}.{norm_name}.weight"
            source = self._checkpoint.tensor(name)
            dtype = torch.float32 if source.dtype == np.float32 else getattr(torch, source.dtype.name)
            linears = [self._block.get_submodule(linear) for linear in _READERS[reader]]
            self._inputs[reader] = self._inputs[reader] / into_norm(norm, linears, self._find(reader), dtype)
            tensors[name] = norm.weight.cpu().numpy().astype(source.dtype)
        v, o = (self._block.get_submodule(f"self_attn.{part}_proj") for part in "vo")
        shared = shared_heads(v, o, self._kv_heads)
        scales = into_linear(v, o, self._find("self_attn.o_proj", shared), shared)
        self._inputs["self_attn.o_proj"] = self._inputs["self_attn.o_proj"] / (
            scales if shared is None else scales[shared]
        )
        up, down = (self._block.get_submodule(f"mlp.{part}_proj") for part in ("up", "down"))
        scales = into_linear(up, down, self._find("mlp.down_proj"))
        self._inputs["mlp.down_proj"] = self._inputs["mlp.down_proj"] / scales
        return tensors

    def _rounded(self, linear: str) -> Block:
        """The tensors of a linear layer, rounded to nearest."""
        from tilefuse.awq.pipeline import encode, quantize

        name, module = f"{self._prefix}.{linear}", self._block.get_submodule(linear)
        bias = None
        if module.bias is not None:
            bias = module.bias.cpu().numpy().astype(self._checkpoint.tensor(f"{name}.bias").dtype)
        w = np.ascontiguousarray(module.weight.T.cpu().numpy())
        return encode(quantize(name, w, bias, self._options, self._scales))
