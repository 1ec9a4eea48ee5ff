"""AutoAWQ checkpoints: `gemm`, `gemv` and `gemv_fast` (the same as `llm-awq`), and the writer of `gemm`."""

from __future__ import annotations

import numpy as np

from tilefuse.codes import unpack_awq, unpack_last, words
from tilefuse.errors import FormatError, UnsupportedFormatError
from tilefuse.formats.autoawq_writer import write
from tilefuse.formats.config import Settings
from tilefuse.formats.store import INT32, Facts, LinearInfo, Store, build, midpoint, resolve_group
from tilefuse.quantized import CodeOrder, QuantizedLinear
from tilefuse.validation import FLOATS

__all__ = ["describe", "read", "refuse", "write"]

VERSIONS = {"gemm": "gemm", "exllama": "gemm", "gemv": "gemv", "gemv_fast": "gemv_fast", "llm-awq": "gemv_fast"}
"""Names in use, and the layout that each stands for."""

INT16 = (np.dtype(np.int16),)


def _version(settings: Settings) -> str | None:
    return settings.text("version", "format", "checkpoint_format")


def refuse(settings: Settings) -> None:
    """Raise UnsupportedFormatError if the configuration names a layout that is not read."""
    version = _version(settings)
    if version == "marlin":
        raise UnsupportedFormatError(
            f"{settings.source}: AWQ version 'marlin' is the tile order of one GPU kernel; quantise again, or convert, "
            "with version 'gemm'"
        )
    if version is not None and version not in VERSIONS:
        raise UnsupportedFormatError(f"{settings.source}: AWQ version {version!r} is not one of {', '.join(VERSIONS)}")


def describe(store: Store, name: str, settings: Settings) -> Facts:
    """The facts about a layer from its headers."""
    refuse(settings)
    qweight = store.expect(f"{name}.qweight", INT32 + INT16, ndim=2)
    scales = store.expect(f"{name}.scales", FLOATS, ndim=2)
    version = _version(settings)
    named = None if version is None else VERSIONS[version]
    if qweight.dtype == np.int16:
        found = "gemv_fast"
    elif qweight.shape[0] == scales.shape[0]:
        found = "gemv"
    else:
        found = "gemm"
    if named not in (None, found):
        raise FormatError(
            f"{store.where(f'{name}.qweight')}: {qweight.dtype} {list(qweight.shape)} with scales {list(scales.shape)} "
            f"is the shape of AWQ version {found!r}, and {settings.source} says {named!r}; correct the configuration"
        )
    bits = settings.integer("bits", "w_bit")
    if bits is not None and bits not in (4, 8):
        raise UnsupportedFormatError(f"{settings.source}: bits = {bits}; AWQ layers of 4 and 8 bits are read")
    if found == "gemm":
        return _describe_gemm(store, name, settings, bits)
    if bits == 8:
        raise UnsupportedFormatError(
            f"{settings.source}: bits = 8 with version {found!r}; only 'gemm' is read with 8 bits"
        )
    return _describe_gemv(store, name, settings) if found == "gemv" else _describe_fast(store, name, settings)


def _group_setting(settings: Settings) -> int | None:
    return settings.integer("group_size", "q_group_size")


def _describe_gemm(store: Store, name: str, settings: Settings, bits: int | None) -> Facts:
    k, columns = store.entry(f"{name}.qweight").shape
    groups, n = store.entry(f"{name}.scales").shape
    if bits is None:
        bits = 4 if columns == words(n, 4) else 8
    if bits == 4 and n % 8:
        raise FormatError(f"{store.where(f'{name}.scales')}: N = {n} is not a multiple of 8, as 4-bit AWQ words need")
    store.expect(f"{name}.qweight", INT32, shape=(k, words(n, bits)))
    qzeros = f"{name}.qzeros"
    symmetric = qzeros not in store
    if symmetric and settings.flag("zero_point"):
        store.entry(qzeros)  # raises: the configuration promises zero points
    if not symmetric:
        store.expect(qzeros, INT32, shape=(groups, words(n, bits)))
    setting = _group_setting(settings)
    # A quantised head may have a group size of its own, which the configuration does not give.
    head = name.rpartition(".")[2] == "lm_head" and k % groups == 0
    group = resolve_group(k, groups, None if head else setting, store.where(f"{name}.scales"), short=False)
    pack_method = settings.text("pack_method") or "reorder"
    if pack_method not in ("order", "reorder"):
        raise UnsupportedFormatError(f"{settings.source}: pack_method {pack_method!r} is neither 'order' nor 'reorder'")
    if bits == 4 and not settings.raw:
        # Both orders are in use and look alike.
        raise FormatError(
            f"{store.where(f'{name}.qweight')}: without a configuration it is not known whether its words are in "
            "AutoAWQ's order or in natural order (Quark); put config.json beside the file, or pass "
            "open_checkpoint(..., quantization={'quant_method': 'awq', 'pack_method': 'reorder' or 'order'})"
        )
    order = CodeOrder.WORDS_N_AWQ if bits == 4 and pack_method == "reorder" else CodeOrder.WORDS_N
    return _facts(store, name, k, n, bits, group, "awq-gemm", symmetric, order)


def _describe_gemv(store: Store, name: str, settings: Settings) -> Facts:
    n, columns = store.entry(f"{name}.qweight").shape
    k = columns * 8
    width = store.expect(f"{name}.scales", FLOATS, ndim=2).shape[1]
    store.expect(f"{name}.qzeros", INT32, shape=(n, words(width, 4)))
    group = _padded_group(store, f"{name}.scales", k, width, _group_setting(settings))
    return _facts(store, name, k, n, 4, group, "awq-gemv", False, CodeOrder.ROWS_N)


def _zeros_name(store: Store, name: str) -> str:
    """The float zeros of `gemv_fast`: llm-awq calls them ``scaled_zeros``."""
    return f"{name}.scaled_zeros" if f"{name}.scaled_zeros" in store else f"{name}.qzeros"


def _describe_fast(store: Store, name: str, settings: Settings) -> Facts:
    quarter, k = store.expect(f"{name}.qweight", INT16, ndim=2).shape
    if k % 64:
        raise FormatError(f"{store.where(f'{name}.qweight')}: K = {k} is not a multiple of 64, as gemv_fast requires")
    n = quarter * 4
    width = store.entry(f"{name}.scales").shape[0]
    store.expect(f"{name}.scales", FLOATS, shape=(width, n))
    store.expect(_zeros_name(store, name), FLOATS, shape=(width, n))
    group = _padded_group(store, f"{name}.scales", k, width, _group_setting(settings))
    return _facts(store, name, k, n, 4, group, "awq-gemv_fast", False, CodeOrder.ROWS_N_FAST)


def _padded_width(k: int, group: int) -> int:
    """Scales a channel that AutoAWQ allocates: 8 for each word of zero points, the words rounded up by group size."""
    multiple = 1 if group >= 128 else 2 if group == 64 else 4
    zero_words = -(-(k // group) // 8)
    return 8 * (-(-zero_words // multiple) * multiple)


def _padded_group(store: Store, scales: str, k: int, width: int, setting: int | None) -> int:
    """The group size of a layer whose rows of scales are padded to ``width``."""
    candidates = [32, 64, 128] if setting is None else [k if setting == -1 else setting]
    fitting = [
        group
        for group in candidates
        if 0 < group <= k and k % group == 0 and width in (k // group, _padded_width(k, group))
    ]
    if len(fitting) != 1:
        raise FormatError(
            f"{store.where(scales)} has {width} scales an output channel, which does not fit K = {k} with group size "
            f"{' or '.join(map(str, candidates))}"
            + ("; put the checkpoint's configuration beside it" if setting is None else "")
        )
    return fitting[0]


def _facts(
    store: Store, name: str, k: int, n: int, bits: int, group: int, form: str, symmetric: bool, order: CodeOrder
) -> Facts:
    nbytes = store.nbytes(name, "qweight", "qzeros", "scaled_zeros", "scales", "bias")
    bias = store.has_bias(name, n)
    return Facts(LinearInfo(name, k, n, bits, group, form, symmetric, bias, nbytes), order)


def read(store: Store, facts: Facts) -> QuantizedLinear:
    """The layer that ``facts`` describe."""
    info, name = facts.info, facts.info.name
    qweight, scales, qzeros = f"{name}.qweight", f"{name}.scales", f"{name}.qzeros"
    groups = info.k // info.group
    match info.format:
        case "awq-gemm":
            if info.symmetric:
                zeros = midpoint(info)
            elif facts.order is CodeOrder.WORDS_N_AWQ:
                zeros = unpack_awq(store.get(qzeros), info.n)
            else:
                zeros = unpack_last(store.get(qzeros), info.n, info.bits)
            return build(store, facts, codes=qweight, scales=(scales, store.get(scales)), zeros=(qzeros, zeros))
        case "awq-gemv":
            zeros = unpack_last(store.get(qzeros), groups, 4).T
            real = store.get(scales)[:, :groups].T  # the rest is padding
            return build(store, facts, codes=qweight, scales=(scales, real), zeros=(qzeros, zeros))
        case _:
            float_zeros = _zeros_name(store, name)
            return build(
                store,
                facts,
                codes=qweight,
                scales=(scales, store.get(scales)[:groups]),
                mins=(float_zeros, store.get(float_zeros)[:groups]),
            )
