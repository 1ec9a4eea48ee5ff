"""Text from a quantised model: loading it, streaming what it says, and what that took."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

import tilefuse.hf.quantizer  # noqa: F401 (registers the quantiser)
from tilefuse.errors import FormatError, ShapeError, TileFuseError
from tilefuse.hf import loop
from tilefuse.hf.blocks import BlockForward
from tilefuse.hf.linear import TileFuseLinear
from tilefuse.hf.options import options
from tilefuse.hf.routing import phases_of
from tilefuse.phases import CHUNK
from tilefuse.runtime import is_direct_cpu

DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}

MIN_TEMPERATURE = 1e-6
"""Logits divided by it are within float32, which transformers samples in, by a wide margin."""


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to run.

    Attributes:
        model: transformers' model.
        tokenizer: Its tokenizer.
        seconds: What loading took, without importing anything.
        packed: Whether its weights were packed just now, rather than mapped.
        packed_bytes: Packed tiles.
        other_bytes: All other parameters: embeddings, norms, the output head.
    """

    model: Any
    tokenizer: Any
    seconds: float
    packed: bool
    packed_bytes: int
    other_bytes: int


def load(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    progress: Callable[[str, int, int], None] | None = None,
    **choices: Any,
) -> Loaded:
    """Loads a quantised checkpoint with its tokenizer.

    Args:
        path: As ``from_pretrained`` takes it.
        dtype: Of activations and of what is not quantised.
        progress: See `tilefuse.packcache.Progress`.
        **choices: As in `tilefuse.hf.options`.

    Raises:
        TileFuseError: The checkpoint isn't quantised, lacks tensors of its model, or can't be read or packed.
        OSError: There is no such checkpoint.
    """
    stages: set[str] = set()

    def report(what: str, done: int, total: int) -> None:
        stages.add(what)
        if progress is not None:
            progress(what, done, total)

    with _quiet(), _refusals(path):  # imports the model's code, and with it a good deal of torch
        MODEL_FOR_CAUSAL_LM_MAPPING.get(type(AutoConfig.from_pretrained(path)), None)
    start = time.perf_counter()
    with _quiet(), options(progress=report, **choices), _refusals(path):
        model, found = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(path)
    layers = [module.layer for module in model.modules() if isinstance(module, TileFuseLinear)]
    if not layers:
        raise FormatError(f"{path} is not quantised, and only quantised layers run on tilefuse: tilefuse quantize it")
    _check_tensors(path, model, found)
    return Loaded(
        model,
        tokenizer,
        time.perf_counter() - start,
        "packing" in stages,
        sum(layer.nbytes for layer in layers),
        sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
    )


@contextlib.contextmanager
def _refusals(path: str | Path) -> Iterator[None]:
    """What transformers and tokenizers raise for files that they can't take is of any class."""
    try:
        yield
    except (TileFuseError, OSError, MemoryError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise FormatError(
            f"{path}: transformers can't load it ({reason}); check its config.json and its tokenizer's files, and "
            "whether this release of transformers knows the model"
        ) from error


def _check_tensors(path: str | Path, model: Any, found: Mapping[str, Any]) -> None:
    """Refuses what transformers only warns of: tensors drawn at random, and decoder blocks left out."""
    missing = sorted(found["missing_keys"])
    if missing:
        raise FormatError(
            f"{path}: {len(missing)} tensors that its config.json calls for are not in its files, {missing[0]!r} "
            "first; fetch them again, or correct config.json"
        )
    # Heads for other tasks and buffers of old releases are usual; one more decoder block is another model.
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    blocks = {name: re.search(r"\.layers\.(\d+)\.", name) for name in sorted(found["unexpected_keys"])}
    beyond = [name for name, block in blocks.items() if block and count is not None and int(block[1]) >= count]
    if beyond:
        raise FormatError(
            f"{path}: by its config.json it has num_hidden_layers = {count}, and its files go on with {beyond[0]!r}; "
            "correct config.json"
        )


class _quiet:
    """transformers' own progress bars and advice stay out of a program's output."""

    def __enter__(self) -> None:
        self._verbosity = transformers_logging.get_verbosity()
        self._bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()

    def __exit__(self, *error: object) -> None:
        transformers_logging.set_verbosity(self._verbosity)
        if self._bars:
            transformers_logging.enable_progress_bar()


@dataclass
class Generated:
    """What was said, and what it took.

    Attributes:
        text: The text.
        tokens: Its tokens.
        prompt: Tokens of the prompt.
        prefill_seconds: From the start to the first token.
        decode_seconds: From the first token to the last.
        calls: Products by (phase, device).
        interrupted: Whether the user stopped it.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    prompt: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    calls: dict[tuple[str, str], int] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def prefill_rate(self) -> float:
        """Tokens of the prompt a second."""
        return self.prompt / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the first."""
        return (len(self.tokens) - 1) / self.decode_seconds if len(self.tokens) > 1 else 0.0


_WINDOW = 64  # tokens decoded together at most, unless a shorter tail decodes otherwise


class _Stream(BaseStreamer):  # type: ignore[misc,unused-ignore]
    """Takes the time of each token, and hands on text as soon as it is whole characters."""

    def __init__(
        self, tokenizer: Any, on_text: Callable[[str], None], on_decode: Callable[[], None] = lambda: None
    ) -> None:
        self.tokenizer, self.on_text, self.on_decode = tokenizer, on_text, on_decode
        self.times: list[float] = []
        self.tokens: list[int] = []
        self.text = ""
        self._pending: list[int] = []
        self._shown = 0
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._prompt:  # the first is the prompt
            self._prompt = False
            return
        self.times.append(time.perf_counter())
        if len(self.times) == 1:
            self.on_decode()
        found = value.reshape(-1).tolist()
        self.tokens += found
        self._pending += found
        text = self._decoded(self._pending)
        if not text.endswith("�"):  # a character's bytes may be several tokens
            self._show(text)
            if text.endswith("\n"):  # what came before decodes alike whatever follows
                self._pending, self._shown = [], 0
            elif len(self._pending) >= _WINDOW:
                # A tail that decodes to the end of the same text stands for all of it.
                tail = self._pending[-_WINDOW // 4 :]
                kept = self._decoded(tail)
                if kept and text.endswith(kept):
                    self._pending, self._shown = tail, len(kept)

    def _decoded(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _show(self, text: str) -> None:
        new = text[self._shown :]
        self._shown = len(text)
        if new:
            self.text += new
            self.on_text(new)

    def end(self) -> None:
        if self._pending:
            self._show(self._decoded(self._pending))
            self._pending = []


def prompt_ids(tokenizer: Any, prompt: str, *, chat: bool = True) -> torch.Tensor:
    """Token ids [1, T] of a prompt, as the first turn of a conversation where the tokenizer has a template for one.

    Raises:
        FormatError: The prompt has lone surrogates, as Python makes of bytes that are no UTF-8.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise FormatError(f"the prompt is not a text in UTF-8 ({error.reason} at {error.start}): correct it") from None
    if chat and getattr(tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        given = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    else:
        given = tokenizer(prompt, return_tensors="pt")
    ids: torch.Tensor = given.input_ids
    return ids


def check_temperature(temperature: float) -> None:
    """Raises TileFuseError for one that can't be sampled at."""
    if temperature != 0 and not MIN_TEMPERATURE <= temperature < math.inf:
        raise TileFuseError(
            f"temperature is {temperature}: pass 0 for the likeliest token each time, or {MIN_TEMPERATURE:g} and above"
        )


def generate(
    loaded: Loaded,
    ids: torch.Tensor,
    *,
    max_new_tokens: int = 128,
    min_new_tokens: int = 0,
    temperature: float = 0.0,
    on_text: Callable[[str], None] = lambda text: None,
) -> Generated:
    """Continues a prompt, greedily at temperature 0; a keyboard interrupt ends it with what there is.

    Args:
        loaded: The model.
        ids: The prompt, [1, T].
        max_new_tokens: Tokens at most.
        min_new_tokens: Tokens at least: the end is not taken before.
        temperature: Divides the logits of what is drawn from; 0, or 1e-6 and above: with less they overflow.
        on_text: Called with each piece of text.

    Raises:
        ShapeError: The prompt is empty, or longer than the model's context.
        TileFuseError: ``temperature`` is outside its range.
    """
    check_temperature(temperature)
    model, prompt = loaded.model, ids.shape[-1]
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not prompt:
        raise ShapeError("the prompt has no tokens: give a longer one")
    if context is not None and prompt >= context:
        raise ShapeError(f"the prompt has {prompt} tokens, and the model's context {context}: shorten it")
    if context is not None:
        max_new_tokens = min(max_new_tokens, context - prompt)
    phases = phases_of(model)
    phases.calls.clear()
    threads = torch.get_num_threads()
    stream = _Stream(loaded.tokenizer, on_text, lambda: torch.set_num_threads(1) if _leaves_little(model) else None)
    # The checkpoint's own sampling settings are no concern of greedy decoding.
    greedy: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else greedy
    pad = loaded.tokenizer.pad_token_id
    # transformers hands a loop that isn't its own no streamer.
    own = functools.partial(loop.sample, streamer=stream) if loop.suits(model) else None
    interrupted = False
    start = time.perf_counter()
    with _quiet():
        try:
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                min_new_tokens=min_new_tokens or None,
                streamer=stream,
                pad_token_id=loaded.tokenizer.eos_token_id if pad is None else pad,
                prefill_chunk_size=CHUNK if prompt > CHUNK else None,
                custom_generate=own,
                **sampling,
            )
        except KeyboardInterrupt:
            stream.end()
            interrupted = True
        finally:
            torch.set_num_threads(threads)
    times = stream.times or [time.perf_counter()]
    return Generated(
        stream.text, stream.tokens, prompt, times[0] - start, times[-1] - times[0], dict(phases.calls), interrupted
    )


def _leaves_little(model: Any) -> bool:
    """Whether decoding leaves little to torch: then its threads, which wait spinning, cost more than they do."""
    return (
        isinstance(model.get_output_embeddings(), TileFuseLinear)
        and is_direct_cpu(phases_of(model).name(1))
        and any(isinstance(module.__dict__.get("forward"), BlockForward) for module in model.modules())
    )


def peak_memory() -> int:
    """Bytes that the process has had resident at most, mapped files included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
