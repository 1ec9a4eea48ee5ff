"""The shapes that `make xclbins` builds for (designs/shapes.toml), and the plans that they need.

A layer named ``lm_head`` gets GEMVs only: a model computes it for one token at a time.
"""

from __future__ import annotations

import importlib.resources
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilefuse import arch, plan
from tilefuse.attention_configurations import AttentionConfiguration
from tilefuse.configurations import Configuration, Op
from tilefuse.errors import LayoutError, PlanError, RoutingError
from tilefuse.layout import Layout, ZeroKind
from tilefuse.manifest import stream_name
from tilefuse.tilemix import npu_streams
from tilefuse.tilemix.template import named

HEAD = "lm_head"

_SCHEME = re.compile(r"w([48])g(\d+)(m?)")

_SCHEME_FORM = "write bits, group and m for minima, as in w4g128 or w8g32m"


@dataclass(frozen=True)
class Layer:
    """A linear layer of a model."""

    name: str
    """Model and layer, for listings."""
    k: int
    n: int
    head: bool
    """Whether it's the projection to the vocabulary."""


@dataclass(frozen=True)
class Attention:
    """The attention layers of a model, on prompts: causal, as many queries as keys."""

    name: str
    heads: int
    kv_heads: int
    d: int
    lengths: tuple[int, ...]
    routings: tuple[str, ...]
    """Names, as `tilefuse.attention` takes them."""

    def plans(self, columns: int) -> Iterator[tuple[str, plan.AttentionPlan]]:
        """What it is called and the plan, of each length and routing.

        Raises:
            PlanError: The array can't run one of them, or there is no such routing.
        """
        for length in self.lengths:
            for routing in self.routings:
                sizes = self.heads, self.kv_heads, self.d
                yield (
                    f"{self.name} {length} {routing}",
                    attention_plan(length, length, *sizes, routing, columns=columns),
                )


@dataclass(frozen=True)
class Shapes:
    """The contents of a file of shapes."""

    columns: int
    designs: tuple[Op, ...]
    schemes: tuple[str, ...]
    rows: tuple[int, ...]
    gemv_streams: tuple[int, ...]
    layers: tuple[Layer, ...]
    attention: tuple[Attention, ...] = ()


@dataclass(frozen=True)
class Wanted:
    """An instruction stream to build: what several problems that pad alike share."""

    plan: plan.Plan | plan.AttentionPlan
    """The plan of the first of them."""
    problems: tuple[tuple[int, int, int], ...]
    """(M, K, N) of all; none for attention."""
    layers: tuple[str, ...]

    @property
    def name(self) -> str:
        """See `tilefuse.manifest.stream_name`."""
        return stream_name(self.plan)


def default_file() -> Path:
    """The file of the installed package, or of the checkout that an editable install serves."""
    designs = Path(str(importlib.resources.files("tilefuse.designs") / "emit.py")).resolve().parent
    installed = designs / "shapes.toml"
    return installed if installed.is_file() else designs.parent / "shapes.toml"


def read(path: Path) -> Shapes:
    """Reads a file of shapes.

    Raises:
        PlanError: It can't be read, or says something else than shapes; the message says where.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"can't read {path}: {error.strerror}; pass another file with --shapes") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} is not TOML: {error}") from None
    unknown = document.keys() - {"columns", "designs", "schemes", "rows", "gemv_streams", "models", "attention"}
    if unknown:
        raise PlanError(f"{path}: unknown key {min(unknown)!r}")
    designs = _listed(path, document, "designs", str)
    known = [op.value for op in Op]
    for name in designs:
        if name not in known:
            raise PlanError(f"{path}: designs has {name!r}; there are {', '.join(known)}")
    schemes = _listed(path, document, "schemes", str)
    for scheme in schemes:
        if not _SCHEME.fullmatch(scheme):
            raise PlanError(f"{path}: schemes has {scheme!r}; {_SCHEME_FORM}")
    return Shapes(
        columns=_integer(path, "columns", document.get("columns", arch.COLUMNS)),
        designs=tuple(Op(name) for name in designs),
        schemes=tuple(schemes),
        rows=tuple(_listed(path, document, "rows", int)),
        gemv_streams=tuple(_listed(path, document, "gemv_streams", int)),
        layers=tuple(_layers(path, document.get("models"))),
        attention=tuple(_attention(path, document["attention"])) if "attention" in document else (),
    )


def attention_plan(
    query_len: int,
    key_len: int,
    heads: int,
    kv_heads: int,
    d: int,
    routing: str,
    *,
    causal: bool = True,
    window: int | None = None,
    columns: int = arch.COLUMNS,
    share: int | None = None,
) -> plan.AttentionPlan:
    """The plan of one sequence, of a routing by its name; the other arguments are `tilefuse.plan.attention`'s.

    Raises:
        PlanError: The array can't run it, or there is no such routing.
    """
    try:
        routed = named(routing).build(query_len, key_len, causal=causal, window=window)
    except RoutingError as error:
        raise PlanError(str(error)) from None
    lengths = npu_streams.lengths(routed.grid, routed)
    return plan.attention([lengths], heads=heads, kv_heads=kv_heads, d=d, columns=columns, share=share)


def wanted(shapes: Shapes) -> dict[Configuration | AttentionConfiguration, list[Wanted]]:
    """The instruction streams of each configuration that the plans of all shapes choose.

    Raises:
        PlanError: The array can't run one of them.
    """
    found: dict[Configuration | AttentionConfiguration, dict[str, Wanted]] = {}
    for layer in shapes.layers:
        for chosen in _plans(shapes, layer):
            streams = found.setdefault(chosen.configuration, {})
            problem = chosen.m, chosen.k, chosen.n
            name = stream_name(chosen)
            before = streams.get(name)
            if before is None:
                streams[name] = Wanted(chosen, (problem,), (layer.name,))
            else:
                problems = tuple(dict.fromkeys((*before.problems, problem)))
                streams[name] = Wanted(before.plan, problems, (*before.layers, layer.name))
    for model in shapes.attention:
        for title, routed in model.plans(shapes.columns):
            streams = found.setdefault(routed.configuration, {})
            name = stream_name(routed)
            before = streams.get(name)
            streams[name] = Wanted(routed, (), (title,) if before is None else (*before.layers, title))
    return {configuration: list(streams.values()) for configuration, streams in found.items()}


def wanted_for(m: int, layout: Layout, streams: int = 1) -> Wanted:
    """What a product of ``m`` rows takes: of one row a GEMV's instruction stream, of more a GEMM's.

    Raises:
        PlanError: The array can't run it.
    """
    chosen = plan.gemv(layout, streams=streams) if m == 1 else plan.gemm(layout, m)
    return Wanted(chosen, ((m, layout.k, layout.n),), ("one shape",))


def layout_of(k: int, n: int, scheme: str, columns: int = arch.COLUMNS) -> Layout:
    """The packed layout of a layer of that scheme ("w4g128", "w8g32m", ...).

    Raises:
        PlanError: There is no such scheme, or the format does not hold the layer.
    """
    matched = _SCHEME.fullmatch(scheme)
    if matched is None:
        raise PlanError(f"scheme {scheme!r}: {_SCHEME_FORM}")
    zero = ZeroKind.M16 if matched[3] else ZeroKind.Z8
    try:
        return Layout(k, n, int(matched[1]), int(matched[2]), zero, columns)
    except LayoutError as error:
        raise PlanError(f"{scheme}: {error}") from None


def _plans(shapes: Shapes, layer: Layer) -> Iterator[plan.Plan]:
    plain = plan.PlainLayout(layer.k, layer.n, shapes.columns)
    rows = () if layer.head else shapes.rows
    for scheme in shapes.schemes:
        layout = _layout(shapes, layer, scheme)
        if Op.GEMM in shapes.designs:
            yield from (plan.gemm(layout, m) for m in rows)
        if Op.GEMV in shapes.designs:
            yield from (plan.gemv(layout, streams=streams) for streams in shapes.gemv_streams)
        if Op.GEMV_BASELINE in shapes.designs:
            yield plan.gemv_baseline(layout)
    if Op.GEMM_BASELINE in shapes.designs:
        yield from (plan.gemm_baseline(plain, m) for m in rows)
    if Op.GEMV_BASELINE in shapes.designs:
        yield plan.gemv_baseline(plain)


def _layout(shapes: Shapes, layer: Layer, scheme: str) -> Layout:
    try:
        return layout_of(layer.k, layer.n, scheme, shapes.columns)
    except PlanError as error:
        raise PlanError(f"{layer.name} in {error}") from None


def _listed(path: Path, document: dict[str, Any], key: str, kind: type) -> list[Any]:
    values = document.get(key)
    fits = isinstance(values, list) and values and all(type(value) is kind for value in values)
    if not fits:
        what = "names" if kind is str else "integers"
        raise PlanError(f"{path}: {key} = {values!r}; a list of {what} is needed")
    assert isinstance(values, list)
    return values


def _attention(path: Path, document: object) -> Iterator[Attention]:
    if not isinstance(document, dict) or document.keys() != {"lengths", "routings", "models"}:
        raise PlanError(f"{path}: attention = {document!r}; lengths, routings and models are needed")
    lengths = tuple(_listed(path, document, "lengths", int))
    routings = tuple(_listed(path, document, "routings", str))
    models = document["models"]
    if not isinstance(models, dict) or not models:
        raise PlanError(f"{path}: attention.models = {models!r}; needed are models, as in Llama-3-8B = [32, 8, 128]")
    for name, shape in models.items():
        if not isinstance(shape, list) or [type(size) for size in shape] != [int, int, int]:
            raise PlanError(
                f"{path}: attention of {name} = {shape!r}; heads, heads of keys and their size are needed, as in "
                "[32, 8, 128]"
            )
        heads, kv_heads, d = shape
        yield Attention(name, heads, kv_heads, d, lengths, routings)


def _integer(path: Path, key: str, value: object) -> int:
    if type(value) is not int:
        raise PlanError(f"{path}: {key} = {value!r}; an integer is needed")
    return value


def _layers(path: Path, models: object) -> Iterator[Layer]:
    if not isinstance(models, dict) or not models:
        raise PlanError(f"{path}: no [models.NAME] with layers, as in q_proj = [4096, 4096]")
    for model, layers in models.items():
        if not isinstance(layers, dict):
            raise PlanError(f"{path}: models.{model} = {layers!r}; layers are needed, as in q_proj = [4096, 4096]")
        for name, shape in layers.items():
            if not isinstance(shape, list) or [type(size) for size in shape] != [int, int]:
                raise PlanError(f"{path}: {name} of {model} = {shape!r}; K and N are needed, as in [4096, 4096]")
            yield Layer(f"{model} {name}", shape[0], shape[1], name == HEAD)
