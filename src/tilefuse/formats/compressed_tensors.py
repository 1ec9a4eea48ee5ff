"""compressed-tensors checkpoints: `pack-quantized` (4 and 8 bits), `int-quantized` and `naive-quantized` (8 bits)."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from tilefuse.codes import Codes, unpack_first, words
from tilefuse.errors import FormatError, QuantizationError, UnsupportedFormatError
from tilefuse.formats.config import Settings
from tilefuse.formats.store import INT32, Facts, LinearInfo, Store, build, input_permutation, midpoint, resolve_group
from tilefuse.quantized import CodeOrder, QuantizedLinear
from tilefuse.validation import FLOATS

Array = npt.NDArray[Any]

PACKED = "pack-quantized"
BYTES = ("int-quantized", "naive-quantized")
MIXED = "mixed-precision"
STRATEGIES = ("group", "channel", "tensor")

INT8 = (np.dtype(np.int8),)
SHAPE_DTYPES = (np.dtype(np.int64), np.dtype(np.int32))


def _unsupported(what: str, where: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"{where}: compressed-tensors {what} is not read; quantise with scheme W4A16, W4A16_ASYM or W8A16 "
        f"({PACKED}), or convert"
    )


def refuse(settings: Settings) -> None:
    """Raise UnsupportedFormatError if the configuration names something that would be misread."""
    form = settings.text("format")
    if form is not None and form not in (PACKED, *BYTES, MIXED, "dense"):
        raise _unsupported(f"format {form!r}", settings.source)
    sparsity = settings.table("sparsity_config")
    if sparsity and sparsity.get("format", "dense") != "dense":
        raise _unsupported(f"sparsity format {sparsity.get('format')!r}", settings.source)
    if settings.table("transform_config").get("config_groups"):
        raise _unsupported("transform_config (rotated activations)", settings.source)


def _scheme(settings: Settings, name: str) -> tuple[Settings, str | None]:
    """The weight settings of the group that targets a layer, and the format of that group (or of the whole file).

    A name or "re:" pattern beats a class name, of which only "Linear" can be this layer's. Where no target matches, a
    sole group is taken: the tensors say that the layer is quantised.
    """
    groups = settings.table("config_groups")
    named, by_class = None, None
    for key, group in groups.items():
        if not isinstance(group, dict) or not isinstance(group.get("targets", []), list):
            raise FormatError(f"{settings.source}: config_groups[{key!r}] is not an object with a list of targets")
        for target in group.get("targets", []):
            if not isinstance(target, str):
                raise FormatError(f"{settings.source}: target {target!r} of {key!r} is not a string")
            if named is None and _matches(target, name, settings.source):
                named = group
            if by_class is None and target == "Linear":
                by_class = group
    sole = next(iter(groups.values())) if len(groups) == 1 else None
    chosen = Settings(named or by_class or sole or {}, settings.source)
    form = chosen.text("format") or settings.text("format")
    return Settings(chosen.table("weights"), settings.source), form


def _matches(target: str, name: str, source: str) -> bool:
    if not target.startswith("re:"):
        return target == name
    try:
        return re.match(target[3:], name) is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise FormatError(f"{source}: target {target!r} is not a regular expression ({error})") from None


def describe(store: Store, name: str, settings: Settings) -> Facts:
    """The facts about a layer from its headers and its ``weight_shape``."""
    refuse(settings)
    weights, form = _scheme(settings, name)
    packed = f"{name}.weight_packed" in store
    _refuse_layer(store, name, weights, form)
    bits = weights.integer("num_bits")
    if packed:
        k, n, bits = _describe_packed(store, name, bits)
        order, form = CodeOrder.ROWS_N, PACKED
    else:
        n, k = store.expect(f"{name}.weight", INT8, ndim=2).shape
        if bits not in (None, 8):
            raise UnsupportedFormatError(f"layer {name!r}: {bits}-bit codes in int8 are not read; save as {PACKED}")
        order, bits = CodeOrder.ROWS_N_INT8, 8
        form = form if form in BYTES else BYTES[0]

    group = _group(store, name, weights, k, n)
    groups = -(-k // group)
    zero_point = f"{name}.weight_zero_point"
    setting = weights.flag("symmetric")
    symmetric = zero_point not in store if setting is None else setting
    if not symmetric:
        store.entry(zero_point)  # must exist
    if zero_point in store:
        _expect_zeros(store, zero_point, n, groups, bits, packed=packed)
    if f"{name}.weight_g_idx" in store:
        store.expect(f"{name}.weight_g_idx", INT32, shape=(k,))
    suffixes = ("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "bias")
    nbytes = store.nbytes(name, *suffixes)
    return Facts(LinearInfo(name, k, n, bits, group, form, symmetric, store.has_bias(name, n), nbytes), order)


def _refuse_layer(store: Store, name: str, weights: Settings, form: str | None) -> None:
    """Refuse by name the formats that a mixed-precision file may hold beside those that are read."""
    where = f"layer {name!r}"
    if form not in (None, PACKED, *BYTES, MIXED):
        raise _unsupported(f"format {form!r}", where)
    if f"{name}.meta" in store or f"{name}.scale_packed" in store:
        raise _unsupported("format 'marlin-24'", where)
    packed, plain = f"{name}.weight_packed", f"{name}.weight"
    if packed in store and store.entry(packed).dtype == np.uint8:
        raise _unsupported("4-bit float format (nvfp4 or mxfp4)", where)
    if plain in store and store.entry(plain).dtype.name.startswith("float8"):
        raise _unsupported("format 'float-quantized'", where)
    kind = weights.text("type")
    if kind not in (None, "int"):
        raise _unsupported(f"type {kind!r}", where)
    strategy = weights.text("strategy")
    if strategy not in (None, *STRATEGIES):
        raise _unsupported(f"strategy {strategy!r}", where)
    bits = weights.integer("num_bits")
    if bits not in (None, 4, 8):
        raise UnsupportedFormatError(f"{where}: {bits} bits are not read; requantise with 4 or 8 bits")


def _describe_packed(store: Store, name: str, bits: int | None) -> tuple[int, int, int]:
    """K, N and bits of a packed layer."""
    packed, shape = f"{name}.weight_packed", f"{name}.weight_shape"
    n, columns = store.expect(packed, INT32, ndim=2).shape
    if shape in store:
        store.expect(shape, SHAPE_DTYPES, shape=(2,))
        rows, k = (int(size) for size in store.get(shape))
        if rows != n or not 1 <= k <= columns * 8:
            raise FormatError(
                f"{store.where(shape)} says {[rows, k]}, which contradicts {packed!r} of shape {[n, columns]}"
            )
        fitting = [width for width in (4, 8) if words(k, width) == columns]
    elif bits is None:
        store.entry(shape)  # raises: nothing else tells K
    else:
        k, fitting = columns * 32 // bits, [bits]
    if bits is None and len(fitting) == 1:
        bits = fitting[0]
    if bits is None or bits not in fitting:
        raise FormatError(
            f"{store.where(packed)}: {columns} words an output channel contradict K = {k} with "
            f"{'4 or 8' if bits is None else bits} bits"
        )
    return k, n, bits


def _group(store: Store, name: str, weights: Settings, k: int, n: int) -> int:
    """The group size from the strategy and the shape of the scales, which must agree."""
    scale = f"{name}.weight_scale"
    shape = store.expect(scale, FLOATS).shape
    strategy = weights.text("strategy")
    if strategy == "tensor" or (strategy is None and shape in ((1,), ())):
        if int(np.prod(shape)) != 1:
            raise FormatError(f"{store.where(scale)} has shape {list(shape)}; strategy 'tensor' needs one scale")
        return k
    if shape not in ((n,), (n, 1)) if strategy == "channel" else len(shape) != 2 or shape[0] != n or not shape[1]:
        raise FormatError(
            f"{store.where(scale)} has shape {list(shape)}, which contradicts N = {n}"
            + (f" and strategy {strategy!r}" if strategy else "")
        )
    groups = shape[1] if len(shape) == 2 else 1
    setting = weights.integer("group_size") if strategy != "channel" else None
    return resolve_group(k, groups, setting, store.where(scale), short=True)


def _expect_zeros(store: Store, name: str, n: int, groups: int, bits: int, *, packed: bool) -> None:
    """Check the zero points' header: packed along N in int32, or one signed byte each."""
    entry = store.expect(name, INT32 + INT8)
    if entry.dtype == np.int32:
        if not packed:
            raise FormatError(f"{store.where(name)} has dtype int32; zero points of int8 weights are int8")
        store.expect(name, INT32, shape=(words(n, bits), groups))
    elif entry.shape not in ((n, groups), *(((n,), (1,), ()) if groups == 1 else ())):
        store.expect(name, INT8, shape=(n, groups))


def _per_channel(values: Array, info: LinearInfo) -> Array:
    """Scales or zero points, stored [N, G], [N] or as one number -> [G, N], a view."""
    if values.ndim == 2:
        values = values.T
    return np.broadcast_to(values, (-(-info.k // info.group), info.n))


def _zeros(store: Store, info: LinearInfo) -> Codes:
    """Zero points [G, N] as unsigned codes: a packed one is stored so, an int8 one is signed."""
    name = f"{info.name}.weight_zero_point"
    middle = 1 << (info.bits - 1)
    stored = store.get(name)
    if stored.dtype == np.int32:
        return unpack_first(stored, info.n, info.bits).T
    outside = (stored < -middle) | (stored >= middle)
    if outside.any():
        at = np.unravel_index(int(np.argmax(outside)), stored.shape)
        raise QuantizationError(
            f"{store.where(name)}: zero point {int(stored[at])} at {[int(i) for i in at]} is outside {-middle} to "
            f"{middle - 1} ({info.bits} bits)"
        )
    return _per_channel((stored.astype(np.int16) + middle).astype(np.uint8), info)


def read(store: Store, facts: Facts) -> QuantizedLinear:
    """The layer that ``facts`` describe."""
    info, name = facts.info, facts.info.name
    codes, scale, zero_point = f"{name}.weight_packed", f"{name}.weight_scale", f"{name}.weight_zero_point"
    g_idx = f"{name}.weight_g_idx"
    zeros = midpoint(info)
    if zero_point in store:
        zeros = _zeros(store, info)
        # Symmetric layers were once saved with their zero points.
        if info.symmetric and (zeros != 1 << (info.bits - 1)).any():
            raise FormatError(f"{store.where(zero_point)} is not zero, and the configuration says symmetric")
    return build(
        store,
        facts,
        codes=codes if info.format == PACKED else f"{name}.weight",
        scales=(scale, _per_channel(store.get(scale), info)),
        zeros=(zero_point, zeros),
        perm=input_permutation(store, g_idx, info.k, info.group) if g_idx in store else None,
    )
