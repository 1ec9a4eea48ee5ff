"""A transformers model run with one decoder block in memory at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilefuse.awq.families import BLOCKS
from tilefuse.errors import FormatError, UnsupportedFormatError
from tilefuse.formats.config import CONFIG

Array = npt.NDArray[Any]

Weights = Callable[[str], Array]
"""A tensor of the model by its name in a Hugging Face checkpoint."""

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

_VOCABULARY_SLICE = 16384
"""Rows of the output head multiplied at a time."""


def libraries() -> tuple[Any, Any]:
    """torch and transformers.

    Raises:
        ImportError: One is not installed, or transformers is older than 5.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ImportError(
            f"{error.name} is not installed, and this needs it: pip install 'tilefuse[hf]' (rounding to nearest, "
            "--method rtn, needs neither torch nor transformers)"
        ) from None
    if int(transformers.__version__.split(".")[0]) < 5:
        raise ImportError(f"transformers {transformers.__version__} is too old: version 5 or later is needed")
    return torch, transformers


def said(error: Exception) -> str:
    """The type and the first words of another library's error."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


class StreamedModel:
    """A causal language model in float32 whose blocks are loaded before they run and dropped after.

    Attributes:
        config: transformers' configuration of the model.

    Args:
        folder: Folder of the checkpoint, for its configuration.
        weights: Gives its tensors; floats of any dtype.
        device: torch device that it runs on.

    Raises:
        ImportError: torch or transformers is not installed.
        FormatError: transformers can't make a model of its configuration.
        UnsupportedFormatError: The model is built otherwise than the families that are known.
    """

    def __init__(self, folder: Path, weights: Weights, device: str) -> None:
        torch, transformers = libraries()
        self._torch, self._weights = torch, weights
        try:
            self.device = torch.device(device)
            torch.empty(0, device=self.device)
        except Exception as error:
            raise UnsupportedFormatError(f"device = {device!r} is not one that torch can use here: {error}") from None
        try:
            config = transformers.AutoConfig.from_pretrained(folder)
            if hasattr(config, "quantization_config"):
                del config.quantization_config  # `weights` gives floats
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except Exception as error:  # of any type, by what is wrong
            raise FormatError(
                f"{folder / CONFIG}: transformers can't make a model of it ({said(error)}); --method rtn does without"
            ) from error
        model.eval()
        self.config, self._base = config, model.model
        base = self._base
        # All that the blocks' inputs are made of, for real. What is not persistent is in no checkpoint.
        base.rotary_emb = type(base.rotary_emb)(config=config).to(self.device)
        if isinstance(getattr(base.embed_tokens, "embed_scale", None), torch.Tensor):
            base.embed_tokens.embed_scale = torch.tensor(config.hidden_size**0.5, device=self.device)
        self._assign(base.norm, "model.norm")
        left = [
            name
            for name, value in (*base.named_parameters(), *base.named_buffers())
            if value.is_meta and not name.startswith(("layers.", "embed_tokens.weight"))
        ]
        if left:
            raise UnsupportedFormatError(
                f"{folder}: model_type {config.model_type!r} has {left[0]!r} outside of its blocks, which is not known "
                "here; quantise with --method rtn"
            )

    @property
    def blocks(self) -> Any:
        """The decoder blocks; their weights are on torch's meta device unless they run."""
        return self._base.layers

    def tensor(self, name: str) -> Any:
        """A tensor of the checkpoint in float32."""
        array = np.ascontiguousarray(self._weights(name)).astype(np.float32, copy=True)
        return self._torch.from_numpy(array).to(self.device)

    def hidden(self, ids: Any, on_block: Callable[[int, Any], None] | None = None) -> Any:
        """The last hidden states, after the last norm.

        Args:
            ids: Tokens, integers [B, T].
            on_block: Called as (index, block) after a block has run, while its weights are there.

        Returns:
            float32 [B, T, hidden size].

        Raises:
            FormatError: A token or a tensor is not there.
        """
        torch, embedding = self._torch, self._base.embed_tokens
        table = self._weights(EMBEDDING)
        if int(ids.max()) >= table.shape[0]:
            raise FormatError(f"token {int(ids.max())} is outside {EMBEDDING!r}, which has {table.shape[0]} rows")
        # Only the rows that occur: the table of a small model is a good part of it.
        used, places = torch.unique(ids, return_inverse=True)
        rows = np.ascontiguousarray(table[used.cpu().numpy()]).astype(np.float32)
        embedding.weight = torch.nn.Parameter(torch.from_numpy(rows).to(self.device), requires_grad=False)
        with torch.no_grad(), self._hooks(on_block):
            return self._base(input_ids=places.to(self.device), use_cache=False).last_hidden_state

    def log_likelihoods(self, hidden: Any, targets: Any) -> Any:
        """Natural logarithms of the probabilities of tokens.

        Args:
            hidden: float32 [M, hidden size], what `hidden` gave for the tokens before.
            targets: Integers [M].

        Returns:
            float64 [M], on the CPU.
        """
        torch = self._torch
        try:
            head = self._weights(HEAD)
        except FormatError:
            head = self._weights(EMBEDDING)  # tied
        cap = getattr(self.config, "final_logit_softcapping", None)
        total = torch.full((hidden.shape[0],), -float("inf"), dtype=torch.float64)
        chosen = torch.zeros(hidden.shape[0], dtype=torch.float64)
        targets = targets.cpu()
        for start in range(0, head.shape[0], _VOCABULARY_SLICE):
            rows = np.ascontiguousarray(head[start : start + _VOCABULARY_SLICE]).astype(np.float32)
            logits = hidden @ torch.from_numpy(rows).to(self.device).T
            if cap is not None:
                logits = torch.tanh(logits / cap) * cap
            logits = logits.cpu().double()
            total = torch.logaddexp(total, torch.logsumexp(logits, dim=1))
            inside = (targets >= start) & (targets < start + rows.shape[0])
            chosen[inside] = logits[inside, targets[inside] - start]
        return chosen - total

    def _assign(self, module: Any, prefix: str) -> None:
        state = {}
        for name, value in module.state_dict().items():
            state[name] = self.tensor(f"{prefix}.{name}")
            if state[name].shape != value.shape:
                raise FormatError(
                    f"tensor '{prefix}.{name}' has shape {list(state[name].shape)}, and by config.json it has "
                    f"{list(value.shape)}: they are not of one model"
                )
        module.load_state_dict(state, assign=True)
        module.requires_grad_(False)

    @contextlib.contextmanager
    def _hooks(self, on_block: Callable[[int, Any], None] | None) -> Iterator[None]:
        handles = []
        for index, block in enumerate(self.blocks):

            def before(block: Any, inputs: Any, index: int = index) -> None:
                self._assign(block, f"{BLOCKS}.{index}")

            def after(block: Any, inputs: Any, output: Any, index: int = index) -> None:
                if on_block is not None:
                    on_block(index, block)
                block.to("meta")

            handles += [block.register_forward_pre_hook(before), block.register_forward_hook(after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
