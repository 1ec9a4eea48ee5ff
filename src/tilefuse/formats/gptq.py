"""GPTQ checkpoints (AutoGPTQ, gptqmodel): codes packed along K, zero points along N, activation order in ``g_idx``."""

from __future__ import annotations

import re

import numpy as np

from tilefuse.codes import Codes, unpack_last, words
from tilefuse.errors import FormatError, UnsupportedFormatError
from tilefuse.formats.config import Settings
from tilefuse.formats.store import INT32, Facts, LinearInfo, Store, build, input_permutation, midpoint, resolve_group
from tilefuse.quantized import CodeOrder, QuantizedLinear
from tilefuse.validation import FLOATS

VERSIONS = ("gptq", "gptq_v2", "gptq_p")


def refuse(settings: Settings) -> None:
    """Raise UnsupportedFormatError if the configuration names a layout that is not read."""
    version = settings.text("checkpoint_format", "format") or "gptq"
    if version not in VERSIONS or settings.flag("is_marlin_format"):
        version = "marlin" if settings.flag("is_marlin_format") else version
        raise UnsupportedFormatError(
            f"{settings.source}: GPTQ checkpoint_format {version!r} is not read; save with 'gptq' or 'gptq_v2'"
        )
    pack_dtype = settings.text("pack_dtype") or "int32"
    if pack_dtype != "int32":
        raise UnsupportedFormatError(f"{settings.source}: pack_dtype {pack_dtype!r} is not read; save with 'int32'")


def _layer_settings(settings: Settings, name: str) -> Settings:
    """The settings with the ``dynamic`` override of this layer, if there is one.

    Keys are regular expressions matched at the start of the name, with an optional prefix: "+:" for an override, "-:"
    for a layer left unquantised. The first match counts. A "-:" match on a layer that the file holds quantised all the
    same is no override: the tensors decide.
    """
    for key, values in settings.table("dynamic").items():
        pattern = key.removeprefix("+:").removeprefix("-:")
        try:
            matches = re.match(pattern, name) is not None
        except (re.error, RecursionError, OverflowError) as error:
            raise FormatError(f"{settings.source}: dynamic key {key!r} is not a regular expression ({error})") from None
        if matches:
            if key.startswith("-:"):
                return settings
            if not isinstance(values, dict):
                raise FormatError(f"{settings.source}: dynamic override {key!r} is not an object")
            return settings.override(values)
    return settings


def describe(store: Store, name: str, settings: Settings) -> Facts:
    """The facts about a layer from its headers (and, without a configuration, its small tensors)."""
    refuse(settings)
    settings = _layer_settings(settings, name)
    rows, n = store.expect(f"{name}.qweight", INT32, ndim=2).shape
    groups = store.expect(f"{name}.scales", FLOATS, ndim=2).shape[0]
    store.expect(f"{name}.scales", FLOATS, shape=(groups, n))
    g_idx = f"{name}.g_idx"
    indexed = store.expect(g_idx, INT32, ndim=1).shape[0] if g_idx in store else None

    bits = settings.integer("bits")
    if bits is None:
        bits = _infer_bits(store, name, rows, n, indexed)
    if bits not in (4, 8):
        raise UnsupportedFormatError(
            f"layer {name!r}: GPTQ with {bits} bits is not read; requantise with 4 or 8 bits ({settings.source})"
        )
    k = rows * (32 // bits) if indexed is None else indexed
    store.expect(f"{name}.qweight", INT32, shape=(words(k, bits), n))

    configured = settings.integer("group_size")
    if configured is None and indexed is not None and groups > 1:
        configured = int((store.get(g_idx) == 0).sum()) or None
    group = resolve_group(k, groups, configured, store.where(f"{name}.scales"), short=True)
    if settings.flag("desc_act") and groups > 1:
        store.entry(g_idx)  # raises: activation order needs it

    qzeros = f"{name}.qzeros"
    if qzeros in store:
        store.expect(qzeros, INT32, shape=(groups, words(n, bits)))
    symmetric = _symmetric(store, name, settings, bits, n)
    v2 = settings.text("checkpoint_format", "format") == "gptq_v2"
    nbytes = store.nbytes(name, "qweight", "qzeros", "scales", "g_idx", "bias")
    bias = store.has_bias(name, n)
    form = "gptq_v2" if v2 else "gptq"
    return Facts(LinearInfo(name, k, n, bits, group, form, symmetric, bias, nbytes), CodeOrder.WORDS_K)


def _infer_bits(store: Store, name: str, rows: int, n: int, indexed: int | None) -> int:
    """Bits of a layer without a configuration: 32 ``rows`` = K bits, or else the width of the zero points."""
    if indexed is not None:
        fitting = [bits for bits in (4, 8) if words(indexed, bits) == rows]
    else:
        width = store.expect(f"{name}.qzeros", INT32, ndim=2).shape[1]
        fitting = [bits for bits in (4, 8) if words(n, bits) == width]
    if len(fitting) != 1:
        raise FormatError(
            f"{store.where(f'{name}.qweight')}: the shapes do not tell whether it has 4 or 8 bits; put the "
            "checkpoint's configuration (config.json or quantize_config.json) beside it"
        )
    return fitting[0]


def _symmetric(store: Store, name: str, settings: Settings, bits: int, n: int) -> bool:
    """Whether the scheme is symmetric: what the configuration says, or else what the zero points are."""
    setting = settings.flag("sym")
    qzeros = f"{name}.qzeros"
    if setting is True or (setting is None and qzeros not in store):
        return True
    store.entry(qzeros)  # must exist
    if setting is None:
        zeros = unpack_last(store.get(qzeros), n, bits)
        middle = 1 << (bits - 1)
        first = int(zeros[0, 0])
        if first in (middle - 1, middle) and (zeros == first).all():
            return True
    if not settings.raw:
        # v1 and v2 zero points differ by one and look alike.
        raise FormatError(
            f"{store.where(qzeros)}: without a configuration it is not known whether zero points are stored as they "
            "are (gptq_v2) or less one (gptq); put config.json or quantize_config.json beside the file"
        )
    if settings.text("checkpoint_format", "format") == "gptq_p":
        raise UnsupportedFormatError(
            f"{settings.source}: checkpoint_format 'gptq_p' with zero points is not read; save with 'gptq_v2'"
        )
    return False


def _zeros(store: Store, facts: Facts) -> Codes:
    """Zero points [G, N]: version 1 stores z - 1 modulo 2^bits, so that a true 0 is stored as all ones.

    The 1 is added code by code: added to the words, it would carry into the neighbour of an all-ones code.
    """
    info = facts.info
    stored = unpack_last(store.get(f"{info.name}.qzeros"), info.n, info.bits)
    if info.format == "gptq_v2":
        return stored
    return (stored + np.uint8(1)) & np.uint8((1 << info.bits) - 1)


def read(store: Store, facts: Facts) -> QuantizedLinear:
    """The layer that ``facts`` describe. A symmetric one ignores ``qzeros``: their version label is often wrong."""
    info, name = facts.info, facts.info.name
    g_idx = f"{name}.g_idx"
    return build(
        store,
        facts,
        codes=f"{name}.qweight",
        scales=(f"{name}.scales", store.get(f"{name}.scales")),
        zeros=(f"{name}.qzeros", midpoint(info) if info.symmetric else _zeros(store, facts)),
        perm=input_permutation(store, g_idx, info.k, info.group) if g_idx in store else None,
    )
