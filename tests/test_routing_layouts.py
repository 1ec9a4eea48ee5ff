"""Layouts: golden vectors, their definitions applied one bit at a time, and the properties that they promise."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction

import numpy as np
import oracle_routing
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilefuse import routing
from tilefuse.errors import RoutingError
from tilefuse.tilemix import layouts
from tilefuse.tilemix.grid import Grid, auto_group

LAYOUTS = {
    "band": routing.band,
    "global": routing.global_,
    "row_random": routing.row_random,
    "aligned": routing.aligned,
    "bigbird": routing.bigbird,
    "sptrans": routing.sptrans,
}

# 1000 keys, one tile of 128 x 64 a group, seed 0: the words of the eight row tiles, in hexadecimal, at 1/4, 1/2, 3/4.
GOLDEN = {
    "band": ("0 0 0 0 1 f 3f 7f", "0 0 1 7 1f 7f 1ff 7ff", "0 3 f 3f ff 1ff 7ff 3fff"),
    "global": ("0 0 0 0 300 e00 3e00 ff00", "0 0 20 e0 3e0 fe0 3fe0 ffe0", "0 c 3c f8 3fc ff8 3ffc fffc"),
    "row_random": (
        "1 2 28 48 a e0 1044 891",
        "1 a 2c 5c 18e 5e4 3a45 8cd3",
        "3 e 3d dd 1cf 5f7 3acf dfd3",
    ),
    "aligned": (
        "0 8 8 88 88 888 2888 a888",
        "2 a 2a aa 2aa aaa 2aaa aaaa",
        "2 e 2e ee 2ee eee 3eee feee",
    ),
    "bigbird": ("0 0 0 8 8 f0 2cc fd0", "0 2 c 1c cc 1fc bdc 3fd6", "2 6 1c 7c 1fe 7ff 1fde 7ff6"),
    "sptrans": ("0 0 3 1 31 11 331 133", "0 0 7 7 77 77 777 777", "0 3 f 3f ff 1ff fff 1fff"),
}
QUARTERS = (Fraction(1, 4), Fraction(1, 2), Fraction(3, 4))


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_vectors(name: str) -> None:
    for coverage, text in zip(QUARTERS, GOLDEN[name], strict=True):
        words = LAYOUTS[name](coverage, seq_len=1000).words
        assert words.shape == (8, 1)
        assert [f"{word:x}" for word in words[:, 0].tolist()] == text.split()


def test_golden_vector_of_two_tiles_a_group() -> None:
    found = routing.bigbird(0.5, seq_len=8192)
    assert found.grid.group == 2
    assert f"{int(found.words[63, 0]):016x}" == "00f7fbff6fff79c0"
    assert found.grid.weights().sum() == 4160
    assert (found.bits() * found.grid.weights()).sum() == 2080


def test_hashes() -> None:
    for state, want in ((0, 0xE220A8397B1DCDAF), (1, 0x910A2DEC89025CC1)):
        assert int(layouts.splitmix64(np.array([state], np.uint64))[0]) == want
    assert int(layouts.hashes(4, 6, 0)[3, 5]) == 0x46B3D496A8FC2FB5
    found = layouts.hashes(3, 4, 2**63 - 1)
    assert [[int(h) for h in row] for row in found] == [
        [oracle_routing.cell_hash(m, j, 2**63 - 1) for j in range(4)] for m in range(3)
    ]


RAGGED = [
    1,
    63,
    64,
    65,
    127,
    128,
    129,
    191,
    193,
    255,
    257,
    1000,
    2047,
    2049,
    4095,
    4096,
    4097,
    8191,
    8193,
    12289,
    32769,
]


@pytest.mark.parametrize("key_len", RAGGED)
def test_maps_are_what_their_definitions_say(key_len: int) -> None:
    group = auto_group(key_len)
    for name, make in LAYOUTS.items():
        for coverage in (Fraction(1, 10), Fraction(1, 2), Fraction(5, 7)):
            want = oracle_routing.causal_bits(name, coverage, key_len, key_len, group)
            np.testing.assert_array_equal(make(coverage, seq_len=key_len).bits(), want, f"{name} {coverage}")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_maps_of_any_causal_grid(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(LAYOUTS)))
    key_len = data.draw(st.integers(0, 5000))
    query_len = data.draw(st.one_of(st.integers(0, 300), st.integers(0, key_len + 200)))
    group = data.draw(st.integers(1, 9))
    coverage = data.draw(st.fractions(0, 1, max_denominator=50))
    seed = data.draw(st.sampled_from([0, 1, 12345, 2**40]))
    protect = data.draw(st.sampled_from([(), ("diag",), ("sink",), ("diag", "sink")]))
    found = LAYOUTS[name](
        coverage, seq_len=key_len, query_len=query_len, group=group, seed=seed, protect=protect, words="auto"
    )
    want = oracle_routing.causal_bits(name, coverage, query_len, key_len, group, seed=seed, protect=protect)
    np.testing.assert_array_equal(found.bits(), want)


GRIDS = st.tuples(
    st.integers(0, 6000),  # keys
    st.integers(0, 2000),  # queries
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 3000)),
    st.one_of(st.just("auto"), st.integers(1, 7)),
)


@settings(max_examples=60, deadline=None)
@given(grid=GRIDS, name=st.sampled_from(list(LAYOUTS)), protect=st.sets(st.sampled_from(["diag", "sink"])))
def test_coverage_is_met_and_nested(
    grid: tuple[int, int, bool, int | None, int | str], name: str, protect: set[str]
) -> None:
    keys, queries, causal, window, group = grid
    before = None
    for percent in (0, 10, 25, 50, 75, 90, 100):
        made = LAYOUTS[name](
            Fraction(percent, 100),
            seq_len=keys,
            query_len=queries,
            causal=causal,
            window=window,
            group=group,
            protect=protect,
        )
        bits, weights = made.bits(), made.grid.weights()
        assert not bits[weights == 0].any()
        covered, total = int((bits * weights).sum()), int(weights.sum())
        # The target is the nearest whole number of tiles, and a group at most g/2 tiles away from it.
        assert abs(2 * covered - 2 * Fraction(total * percent, 100)) <= made.grid.group + 1
        assert covered == {0: 0, 100: total}.get(percent, covered)
        if before is not None:
            assert not (before & ~bits).any()
        before = bits


@pytest.mark.parametrize("name", LAYOUTS)
def test_target_is_met_to_half_a_group(name: str) -> None:
    for key_len in (256, 1000, 2048, 4096, 8192, 16384, 65536, 69999):
        for coverage in (Fraction(1, 10), *QUARTERS, Fraction(9, 10)):
            made = LAYOUTS[name](coverage, seq_len=key_len)
            total = int(made.grid.weights().sum())
            target = (2 * total * coverage.numerator + coverage.denominator) // (2 * coverage.denominator)
            assert abs(int((made.bits() * made.grid.weights()).sum()) - target) * 2 <= made.grid.group


def test_bit_63_is_set_and_read() -> None:
    made = routing.one(seq_len=4096)
    assert made.grid.groups == 64
    assert int(made.words[31, 0]) == 2**64 - 1
    assert made.bits()[31, 63]
    assert [int(word).bit_count() for word in made.words[:, 0]] == [2 * (m + 1) for m in range(32)]


def test_automatic_groups() -> None:
    table = {0: 1, 1: 1, 4096: 1, 4097: 2, 8192: 2, 8193: 3, 16384: 4, 32768: 8, 65536: 16, 131072: 32}
    assert {keys: auto_group(keys) for keys in table} == table
    for keys, group in table.items():
        if keys <= 65536:
            made = routing.band(seq_len=keys)
            assert made.grid.group == group
            assert made.words.shape == (-(-keys // 128), 1)


def test_several_words_a_row() -> None:
    made = routing.bigbird(0.5, seq_len=65536, words=16)
    assert made.grid.group == 1
    assert made.words.shape == (512, 16)
    assert made.words.nbytes == 64 << 10
    grid = made.grid
    want = np.zeros(grid.groups, bool)
    for word in range(16):
        value = int(made.words[300, word])
        want[word * 64 : (word + 1) * 64] = [value >> bit & 1 for bit in range(64)]
    np.testing.assert_array_equal(made.bits()[300], want)
    # The same map whether asked for by its words or by its group; more words than it takes are zeros.
    assert np.array_equal(made.words, routing.bigbird(0.5, seq_len=65536, group=1).words)
    wide = routing.bigbird(0.5, seq_len=65536, group=1, words=20)
    assert np.array_equal(wide.words[:, :16], made.words)
    assert not wide.words[:, 16:].any()
    assert routing.band(seq_len=65536, words=4).grid.group == 4


def test_seeds() -> None:
    def words(name: str, seed: int) -> bytes:
        return LAYOUTS[name](0.5, seq_len=3000, seed=seed).words.tobytes()

    for name in ("row_random", "bigbird"):
        assert len({words(name, seed) for seed in range(8)}) == 8
    # The others draw only ties.
    for name in ("band", "global", "sptrans"):
        bits = [LAYOUTS[name](0.5, seq_len=3000, seed=seed).bits() for seed in (0, 1)]
        assert bits[0].sum() == bits[1].sum()
        assert (bits[0] != bits[1]).mean() < 0.1


def test_the_same_in_other_threads_and_processes() -> None:
    want = routing.bigbird(0.37, seq_len=9000, seed=5, protect="sink").words.tobytes().hex()
    script = (
        "from tilefuse import routing; "
        "print(routing.bigbird(0.37, seq_len=9000, seed=5, protect='sink').words.tobytes().hex())"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == want
    with ThreadPoolExecutor(4) as pool:
        made = pool.map(lambda i: routing.bigbird(0.37, seq_len=9000 + i % 2, seed=5, protect="sink"), range(8))
        assert {m.words.tobytes().hex() for m in list(made)[::2]} == {want}


@pytest.mark.parametrize("name", LAYOUTS)
def test_protected_groups_go_last(name: str) -> None:
    for query_len, key_len in ((1000, 1000), (5000, 5000), (300, 2000)):
        for percent in (50, 75, 95, 99):
            made = LAYOUTS[name](Fraction(percent, 100), seq_len=key_len, query_len=query_len, protect=("diag", "sink"))
            grid = made.grid
            kept = np.zeros_like(made.bits())
            kept[:, 0] = True
            for m in range(grid.row_tiles):
                first = m * 128 + key_len - query_len
                for j in range(grid.groups):
                    kept[m, j] |= (j + 1) * grid.group * 64 > first
            kept &= grid.legal()
            if made.bits()[kept].any():
                assert made.bits()[grid.legal() & ~kept].all()


def test_local_sink_is_band_with_both_protected() -> None:
    assert routing.local_sink(0.6, seq_len=3000) == routing.band(0.6, seq_len=3000, protect=("diag", "sink"))
    assert routing.local_sink().coverage == Fraction(3, 4)
    # Two row tiles of 128 queries touch two groups of 64 keys each; the sink is the third kept group.
    bits = routing.local_sink(Fraction(99, 100), seq_len=4096).bits()
    shares = routing.local_sink(0.75, seq_len=4096).bits()
    assert not shares[:, 0].any()
    assert not shares[np.arange(32), 2 * np.arange(32)].any()
    assert not shares[np.arange(32), 2 * np.arange(32) + 1].any()
    assert bits.sum() > shares.sum()


def test_zero_and_one() -> None:
    for keys, queries in ((1000, 1000), (1000, 10), (0, 5), (5, 0)):
        assert routing.zero(seq_len=keys, query_len=queries).coverage() == 0
        made = routing.one(seq_len=keys, query_len=queries)
        np.testing.assert_array_equal(made.bits(), made.grid.legal())
        assert made == routing.band(1, seq_len=keys, query_len=queries)


def test_without_causality_a_band_lies_on_the_diagonal() -> None:
    # 16 groups and 8 row tiles: at 1/2, the eight groups farthest from each diagonal, up to ties, are INT8.
    bits = routing.band(Fraction(1, 2), seq_len=1024, causal=False).bits()
    for m in range(8):
        own = 2 * m + 1
        int8 = [abs(j - own) for j in range(16) if bits[m, j]]
        kept = [abs(j - own) for j in range(16) if not bits[m, j]]
        assert max(kept, default=0) <= min(int8, default=99)
    assert routing.band(Fraction(1, 2), seq_len=1024, causal=False, protect="diag").bits()[0, :2].sum() == 0


def test_a_window_leaves_what_it_hides_out() -> None:
    made = routing.row_random(Fraction(1, 2), seq_len=4096, window=512)
    # A row tile of 128 queries reaches 512 - 1 + 128 keys, which touch 10 tiles of 64 once none lies before key 0.
    assert set(made.grid.weights().sum(axis=1)[4:]) == {10}
    np.testing.assert_array_equal(made.bits()[4:].sum(axis=1), 5)


@pytest.mark.parametrize(
    ("coverage", "want"),
    [
        (0.1, Fraction(1, 10)),
        (0.25, Fraction(1, 4)),
        (1, Fraction(1)),
        (Fraction(2, 3), Fraction(2, 3)),
        (Decimal("0.3"), Fraction(3, 10)),
        (np.float64(0.7), Fraction(7, 10)),
        (0.0, Fraction(0)),
    ],
)
def test_coverages_are_exact(coverage: float, want: Fraction) -> None:
    assert routing.band(coverage).coverage == want


def test_a_tie_of_the_target_is_exact() -> None:
    # W = 72 tiles: 0.1 of them is 7.2, and 5/144 of them exactly 2.5, which goes up.
    assert (routing.band(0.1, seq_len=1000).bits()).sum() == 7
    assert (routing.band(Fraction(5, 144), seq_len=1000).bits()).sum() == 3


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: routing.band(1.5), "coverage is 1.5"),
        (lambda: routing.band(-0.1), "coverage is -0.1"),
        (lambda: routing.band(float("nan")), "coverage is nan"),
        (lambda: routing.band("0.5"), "coverage is '0.5'"),
        (lambda: routing.band(None, seq_len=-1), "seq_len is -1"),
        (lambda: routing.band(seq_len=2.5), "seq_len is 2.5"),
        (lambda: routing.band(seq_len=True), "seq_len is True"),
        (lambda: routing.band(seq_len=2**40), "seq_len is 1099511627776"),
        (lambda: routing.band(seq_len=100, window=0), "window is 0"),
        (lambda: routing.band(seq_len=100, group=0), "group is 0"),
        (lambda: routing.band(seq_len=100, group="one"), "group is 'one'"),
        (lambda: routing.band(seq_len=65536, group=1, words=2), "words is 2"),
        (lambda: routing.band(seq_len=2**26, group=1), "larger group"),
        (lambda: routing.band(protect=("diagonal",)), "diagonal"),
        (lambda: routing.band(seed=-1), "seed is -1"),
        (lambda: routing.band(query_len=5), "seq_len"),
        (lambda: routing.band(compat="release"), "sptrans"),
        (lambda: routing.sptrans(compat="older"), "compat is 'older'"),
        (lambda: routing.sptrans(compat="release", protect="sink"), "release"),
        (lambda: routing.one(0.5), "one is the map of coverage 1"),
        (lambda: routing.named("bigbrd"), "bigbrd"),
        (lambda: routing.named("band175"), "coverage"),
        (lambda: routing.named(7), "routing is 7"),
        (lambda: routing.Template("stripes"), "stripes"),
    ],
)
def test_wrong_arguments_are_named(call, named: str) -> None:
    with pytest.raises(RoutingError, match=named):
        call()


def test_names() -> None:
    assert routing.named("bigbird") == routing.bigbird()
    assert routing.named("SpTrans75") == routing.sptrans(0.75)
    assert routing.named("local_sink_62.5") == routing.local_sink(0.625)
    assert routing.named("global_") == routing.named("global") == routing.global_()
    assert routing.named("One") == routing.one()
    assert routing.local_sink(0.5, seq_len=100).name == "band 0.5 + diag + sink"


def test_templates_build_what_the_functions_do_and_keep_it() -> None:
    made = routing.bigbird(0.5, seed=3).build(300, 1000, window=400)
    assert made == routing.bigbird(0.5, seed=3, seq_len=1000, query_len=300, window=400)
    assert made is routing.bigbird(0.5, seed=3).build(300, 1000, window=400)
    assert routing.bigbird(0.5, group=3).build(1000).grid.group == 3
    assert routing.bigbird(0.5, group=3).build(1000, group=2).grid == Grid(1000, 1000, group=2)
    assert hash(made) == hash(routing.bigbird(0.5, seed=3).build(300, 1000, window=400))


def test_from_scores() -> None:
    rng = np.random.default_rng(0)
    scores = rng.permutation(16 * 8).reshape(8, 16).astype(np.float32)
    made = routing.from_scores(scores, 0.5, seq_len=1000)
    legal = made.grid.legal()
    assert made.bits().sum() == 36
    assert scores[made.bits()].max() < scores[legal & ~made.bits()].min()
    # A map of each head; a group from the scores' shape; integer and bfloat16 scores.
    heads = routing.from_scores(rng.integers(0, 9, (3, 64, 64)), 0.25, seq_len=8192)
    assert heads.heads == 3
    assert heads.grid.group == 2
    assert heads.words.shape == (3, 64, 1)
    for head in heads.bits():
        assert abs((head * heads.grid.weights()).sum() - 1040) <= 1
    kept = routing.from_scores(-scores, 0.5, seq_len=1000, protect="sink")
    assert not kept.bits()[:, 0].any()
    assert routing.from_scores(np.zeros((0, 0)), 0.5, seq_len=0).words.shape == (0, 1)
    one = routing.from_scores(np.full((8, 16), np.inf), 1, seq_len=1000)
    assert one == routing.one(seq_len=1000)


@pytest.mark.parametrize(
    ("scores", "named"),
    [
        (np.zeros((8, 15)), "shape"),
        (np.zeros(8), "shape"),
        (np.full((8, 16), np.nan), "NaN"),
        (np.zeros((8, 16), complex), "complex"),
        ([["a"] * 16] * 8, "real numbers"),
    ],
)
def test_wrong_scores_are_named(scores: np.ndarray, named: str) -> None:
    with pytest.raises(RoutingError, match=named):
        routing.from_scores(scores, 0.5, seq_len=1000)
