"""`TileFuseLinear` as a torch module: against float64 products, state dicts, autocast, gradients, compiled graphs."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layers import Known, Scheme, make_layer

torch = pytest.importorskip("torch", reason="the [hf] extra is not installed")
pytest.importorskip("transformers", reason="the [hf] extra is not installed")

import tilefuse as tf  # noqa: E402
from tilefuse.errors import DeviceError, DtypeError, ShapeError, TileFuseError  # noqa: E402
from tilefuse.hf import FusedLinear, FusedPart, TileFuseLinear  # noqa: E402
from tilefuse.phases import Phases  # noqa: E402
from tilefuse.testing import assert_gemm_close  # noqa: E402

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore"),  # theirs
]

K, N = 192, 80
SCHEME = Scheme(4, 64)


@pytest.fixture
def known(rng: np.random.Generator) -> Known:
    return make_layer(rng, K, N, SCHEME, bias=True)


@pytest.fixture
def module(known: Known) -> TileFuseLinear:
    return TileFuseLinear(known.layer)


def random(rng: np.random.Generator, *shape: int, dtype: Any = torch.float32) -> Any:
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(dtype)


def check(y: Any, x: Any, known: Known) -> None:
    """The gate, on all rows."""
    rows = x.detach().float().reshape(-1, known.layer.k).numpy()
    y = y.detach()
    assert y.shape == (*x.shape[:-1], known.layer.n)
    narrow = {torch.float32: np.float32, torch.float16: np.float16}.get(y.dtype)
    if narrow is None:
        found = y.reshape(-1, known.layer.n).view(torch.uint16).numpy().view("bfloat16")
    else:
        found = y.reshape(-1, known.layer.n).numpy().astype(narrow)
    assert_gemm_close(found, rows, known.weights, bias=known.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(K,), (1, K), (5, K), (2, 3, K), (0, K), (2, 0, K)])
def test_shapes_and_dtypes(
    module: TileFuseLinear, known: Known, rng: np.random.Generator, shape: tuple[int, ...], dtype: Any
) -> None:
    x = random(rng, *shape, dtype=dtype)
    y = module(x)
    assert y.dtype == dtype
    assert y.shape == (*shape[:-1], N)
    if x.numel():
        check(y, x, known)


def test_strides(module: TileFuseLinear, known: Known, rng: np.random.Generator) -> None:
    x = random(rng, K, 6)
    check(module(x.T), x.T, known)
    wide = random(rng, 4, 2 * K)
    check(module(wide[:, ::2]), wide[:, ::2], known)
    check(module(wide[:, :K]), wide[:, :K], known)
    check(module(wide[:1, :K].expand(3, K)), wide[:1, :K].expand(3, K), known)


def test_refusals(module: TileFuseLinear, rng: np.random.Generator) -> None:
    with pytest.raises(ShapeError, match=rf"\[3, {K + 1}\].*{K}"):
        module(random(rng, 3, K + 1))
    with pytest.raises(DtypeError, match="float64"):
        module(random(rng, 3, K).double())
    with pytest.raises(DtypeError, match="int64"):
        module(torch.ones(3, K, dtype=torch.int64))


def test_autocast_is_that_of_torch(module: TileFuseLinear, known: Known, rng: np.random.Generator) -> None:
    x = random(rng, 4, K)
    linear = torch.nn.Linear(K, N)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert module(x).dtype == linear(x).dtype == dtype
            check(module(x), x.to(dtype), known)
    with torch.autocast("cpu", enabled=False):
        assert module(x).dtype == torch.float32


def test_gradient_goes_to_the_activations(module: TileFuseLinear, known: Known, rng: np.random.Generator) -> None:
    """dL/dx = dL/dy W^T in float64; the weights are bfloat16 and exact, sums are float32."""
    x = random(rng, 2, 3, K).requires_grad_()
    weights = random(rng, 2, 3, N)
    (module(x) * weights).sum().backward()
    expected = weights.numpy().astype(np.float64) @ known.weights.T
    np.testing.assert_allclose(x.grad.numpy(), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    with torch.no_grad():
        assert not module(x).requires_grad


def test_meta_and_fake(module: TileFuseLinear) -> None:
    y = module(torch.empty(2, 7, K, device="meta", dtype=torch.bfloat16))
    assert (y.shape, y.dtype, y.device.type) == ((2, 7, N), torch.bfloat16, "meta")


def test_operator_is_sound(module: TileFuseLinear, rng: np.random.Generator) -> None:
    """torch's own checks of a custom operator: schema, fake kernel, autograd registration."""
    x = random(rng, 3, K).requires_grad_()
    torch.library.opcheck(torch.ops.tilefuse.linear.default, (x, module._handle, N))


def test_compiles_without_breaks(module: TileFuseLinear, known: Known, rng: np.random.Generator) -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(K), module, torch.nn.ReLU())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (1, 3, 8):
        x = random(rng, rows, K)
        with torch.no_grad():
            np.testing.assert_array_equal(compiled(x).numpy(), model(x).numpy())
    y = compiled(random(rng, 2, K).requires_grad_())
    y.sum().backward()


def test_graph_of_a_layer_that_is_gone(known: Known, rng: np.random.Generator) -> None:
    module = TileFuseLinear(known.layer)
    handle = module._handle
    del module
    with pytest.raises(TileFuseError, match="is gone"):
        torch.ops.tilefuse.linear(random(rng, 1, K), handle, N)


def test_moves_leave_it_alone(module: TileFuseLinear, known: Known, rng: np.random.Generator) -> None:
    x = random(rng, 3, K)
    before = module(x)
    for moved in (module.half(), module.to(torch.bfloat16), module.double(), module.to("meta")):
        np.testing.assert_array_equal(moved(x).numpy(), before.numpy())


@pytest.mark.parametrize("perm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_state_dict_comes_back(rng: np.random.Generator, bias: bool, perm: bool, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    known = make_layer(rng, K, N, SCHEME, bias=bias, perm=perm)
    other = make_layer(rng, K, N, Scheme(8, 32), bias=not bias)
    module, target = TileFuseLinear(known.layer), TileFuseLinear(other.layer)
    save_file(module.state_dict(), tmp_path / "state.safetensors")
    assert not any(target.load_state_dict(load_file(tmp_path / "state.safetensors")))
    x = random(rng, 3, K)
    np.testing.assert_array_equal(target(x).numpy(), module(x).numpy())
    assert target.layer.layout == known.layer.layout
    # Nothing is written through: the old tiles may be a mapping that others share.
    assert target.layer.data.ctypes.data not in (known.layer.data.ctypes.data, other.layer.data.ctypes.data)


def test_state_dicts_that_do_not_fit(module: TileFuseLinear, rng: np.random.Generator) -> None:
    other = TileFuseLinear(make_layer(rng, K, N + 64, SCHEME).layer)
    with pytest.raises(RuntimeError, match=rf"K x N is {K} x {N + 64}, and the module's is {K} x {N}"):
        module.load_state_dict(other.state_dict())
    state = module.state_dict()
    with pytest.raises(RuntimeError, match="packed"):
        module.load_state_dict({key: value for key, value in state.items() if key != "packed"})
    with pytest.raises(RuntimeError, match="surplus"):
        module.load_state_dict({**state, "surplus": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="bytes"):
        module.load_state_dict({**state, "packed": state["packed"][:-64]})
    with pytest.raises(RuntimeError, match="layout"):
        module.load_state_dict({**state, "layout": torch.zeros(3, dtype=torch.uint8)})


def test_copies_and_pickles(module: TileFuseLinear, rng: np.random.Generator) -> None:
    x = random(rng, 3, K)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), _saved(module)):
        assert other._handle != module._handle
        np.testing.assert_array_equal(other(x).numpy(), module(x).numpy())


def _saved(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_extra_repr(module: TileFuseLinear) -> None:
    text = repr(module)
    assert f"in_features={K}, out_features={N}, bias=True, bits=4, group=64" in text


def test_phases_choose_by_rows(known: Known, rng: np.random.Generator) -> None:
    module = TileFuseLinear(known.layer, Phases("reference", "cpu", 3))
    for rows in (1, 2, 3, 5):
        module(random(rng, rows, K))
    assert module.phases.calls == {("decode", "cpu"): 1, ("prefill", "cpu"): 1, ("prefill", "reference"): 2}
    with pytest.raises(DeviceError, match="nonesuch"):
        TileFuseLinear(known.layer, Phases("nonesuch", "nonesuch"))(random(rng, 1, K))


# --- fused layers -----------------------------------------------------------------------------------------------------

SPLITS = (48, 16, 16)


class Block(torch.nn.Module):  # type: ignore[misc]
    """Three layers with the same input, as an attention calls them."""

    def __init__(self, fused: FusedLinear) -> None:
        super().__init__()
        self.qkv = fused
        self.q, self.k, self.v = (FusedPart(fused, index) for index in range(3))

    def forward(self, x: Any) -> Any:
        return self.q(x), self.k(x), self.v(x)


@pytest.fixture
def block(known: Known) -> Block:
    return Block(FusedLinear(known.layer, SPLITS))


def count(block: Block) -> int:
    return sum(block.qkv.phases.calls.values())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_parts_share_one_product(block: Block, known: Known, rng: np.random.Generator, mode: Any) -> None:
    with mode():
        x = random(rng, 2, 3, K)
        parts = block(x)
        assert count(block) == 1
        assert [part.shape[-1] for part in parts] == list(SPLITS)
        check(torch.cat(parts, dim=-1), x, known)
        assert block.qkv._held is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parts_are_computed_anew_for_other_activations(block: Block, rng: np.random.Generator, mode: Any) -> None:
    with mode():
        x, other = random(rng, 2, K), random(rng, 2, K)
        expected = block.qkv(other).split(SPLITS, dim=-1)
        block.q(x)
        np.testing.assert_array_equal(block.k(other).numpy(), expected[1].numpy())
        block.q(x)
        x.copy_(other)  # the same tensor, written to in between
        np.testing.assert_array_equal(block.v(x).numpy(), expected[2].numpy())
        np.testing.assert_array_equal(block.v(x).numpy(), expected[2].numpy())


def test_fused_gradient(block: Block, known: Known, rng: np.random.Generator) -> None:
    x = random(rng, 3, K).requires_grad_()
    torch.cat(block(x), dim=-1).sum().backward()
    expected = np.ones((3, N)) @ known.weights.T
    np.testing.assert_allclose(x.grad.numpy(), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_fused_compiles_to_one_product(block: Block, rng: np.random.Generator) -> None:
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    x = random(rng, 2, K)
    with torch.no_grad():
        expected = [part.numpy() for part in block(x)]
        before = count(block)
        for part, wanted in zip(compiled(x), expected, strict=True):
            np.testing.assert_array_equal(part.numpy(), wanted)
    assert count(block) == before + 1


def test_fused_state_dict_and_copy(block: Block, rng: np.random.Generator) -> None:
    assert {key.split(".")[0] for key in block.state_dict()} == {"qkv"}
    other = copy.deepcopy(block)
    x = random(rng, 2, K)
    block.q(x)
    for a, b in zip(other(x), block.qkv(x).split(SPLITS, dim=-1), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert count(other) == 1
    assert other.q.fused is other.qkv


def test_splits_must_add_up(known: Known) -> None:
    with pytest.raises(ShapeError, match="add up to 72, and N = 80"):
        FusedLinear(known.layer, (40, 32))


def test_default_device_is_followed(module: TileFuseLinear, rng: np.random.Generator) -> None:
    tf.set_default_device("reference")
    try:
        module(random(rng, 2, K))
    finally:
        tf.set_default_device(None)
    assert set(module.phases.calls) == {("prefill", "reference")}
