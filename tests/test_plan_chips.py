"""Links of a torus, a worked plan, published runs: what the planner says of hardware."""

import collections
import itertools
import math

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import mesh, plan, topology
from shardwise.costs.arrays import parts
from shardwise.costs.memory import memory
from shardwise.plan import arrays, links, planning, published, roles, runs
from shardwise.plan.links import Side, Way

V5P, V5E = topology.CHIPS["v5p"], topology.CHIPS["v5e"]


def busiest(paths):
    """Blocks over the busiest link, each way by itself."""
    return max(collections.Counter(link for path in paths for link in path).values())


def path(a, b, n, ring):
    """The links from a to b, by the shorter way; half-way round both ways take turns."""
    ahead = (b - a) % n
    forward = [((a + i) % n, (a + i + 1) % n) for i in range(ahead)]
    backward = [((a - i) % n, (a - i - 1) % n) for i in range(n - ahead)]
    if not ring:
        return forward if b > a else backward
    if 2 * ahead == n:
        return forward if a % 2 else backward
    return forward if 2 * ahead < n else backward


@pytest.mark.parametrize("n, whole", [(2, 8), (4, 4), (4, 16), (8, 8), (16, 16)])
@pytest.mark.parametrize("chip", [V5P, V5E], ids=["v5p", "v5e"])
def test_an_exchange_takes_as_long_as_its_busiest_link(chip, n, whole):
    ring = n == whole and chip.is_ring(whole)
    pairs = itertools.permutations(range(n), 2)
    most = busiest(path(a, b, n, ring) for a, b in pairs)
    block = 1e9
    found = links.exchange_seconds(chip, Way((Side(n, 1, whole),)), (n - 1) * block)
    assert math.isclose(found, most * block / chip.link_bandwidth)


@pytest.mark.parametrize("n, whole", [(2, 8), (4, 4), (4, 16), (16, 16)])
def test_a_gather_goes_both_ways_round_a_ring_and_one_way_along_a_line(n, whole):
    """Of a line, the last link carries all other shards; of a ring, half of them."""
    for chip in (V5P, V5E):
        ring = n == whole and chip.is_ring(whole)
        shard = 1e9
        most = (n - 1) * shard / (2 if ring else 1)
        found = links.ring_seconds(chip, [Way((Side(n, 1, whole),))], (n - 1) * shard)
        assert math.isclose(found, most / chip.link_bandwidth)


def test_between_slices_each_device_sends_its_part():
    """A gather of 32 shards over 2 slices of 16: 16 shards cross, a 16th of them by each."""
    side = (Side(16, 1, 16),)
    shard = 1e6
    found = links.ring_seconds(V5E, [Way(side, 2)], 31 * shard)
    within = 15 * 2 * shard / (2 * V5E.link_bandwidth)
    assert math.isclose(found, shard / V5E.dcn_bandwidth + within)
    assert links.hop_seconds(V5E, Way(side, 2), shard) == shard / V5E.dcn_bandwidth


SHAPES = ["v5e:2x4", "v5e:16x16", "v5p:4x4x8", "v4:2x2x4", "v6e:8x8", "tpu7x:2x2x4"]


@settings(max_examples=50)
@given(st.sampled_from(SHAPES), st.sampled_from([1, 2, 4]), st.randoms(use_true_random=False))
def test_axes_fill_the_torus_and_share_none_of_it(name, slices, random):
    chips = topology.chips(name, slices)
    sizes = dict.fromkeys(roles.ORDER, 1)
    for _ in range(chips.devices.bit_length() - 1):
        sizes[random.choice(roles.ORDER)] *= 2
    each = roles.Roles(**sizes)
    try:
        chips.mesh(**each.sizes)
    except ValueError:
        return
    ways = links.lay(chips, tuple(each.sizes.items()))
    for role, size in each.sizes.items():
        assert ways[role].inside * ways[role].across == size
    used = collections.defaultdict(list)
    for way in ways.values():
        for side in way.sides:
            used[side.on_chip, side.whole].append(side)
    assert math.prod(way.inside for way in ways.values()) == chips.devices // slices
    for way in ways.values():
        for side in way.sides:
            assert side.size * side.stride <= side.whole
            lane = chips.chip.link_bandwidth
            assert side.on_chip or side.bandwidth(chips.chip) <= 2 * lane / side.stride


def test_whole_sides_are_rings_and_parts_are_lines():
    """128 v5p chips: tensor takes a side, fsdp the two others."""
    ways = links.lay(topology.chips("v5p:4x4x8"), (("fsdp", 16), ("tensor", 8)))
    assert ways["tensor"].sides == (Side(8, 1, 8),) and str(ways["tensor"]) == "8 of 8"
    assert [side.size for side in ways["fsdp"].sides] == [4, 4]
    assert sum(side.bandwidth(V5P) for side in ways["fsdp"].sides) == 4 * V5P.link_bandwidth
    ways = links.lay(topology.chips("v5p:4x4x8"), (("fsdp", 64), ("tensor", 2)))
    (line,) = ways["tensor"].sides
    assert line.bandwidth(V5P) == V5P.link_bandwidth
    between = [side for side in ways["fsdp"].sides if side.stride > 1]
    assert [side.bandwidth(V5P) for side in between] == [2 * V5P.link_bandwidth / 2]


# Whose cores come first; JAX 0.7.2 lays these by another rule.
SMALL = [(f"tpu7x:2x2x{n}", 1) for n in (1, 2, 4)] if jax.__version_info__ >= (0, 8) else []


class Device:
    """A stand-in for a TPU: what `mesh_utils` asks of one."""

    platform = "tpu"

    def __init__(self, chips, place):
        self.slice_index, *coords, self.core_on_chip = map(int, place)
        self.coords = [*coords, 0, 0][:3]
        self.device_kind, self.process_index = chips.chip.names[0], 0


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(
        [
            ("v5e:8x16", 1),
            ("v5e:16x16", 2),
            ("v6e:4x8", 1),
            ("v5p:4x4x8", 1),
            ("v5p:2x4x6", 2),
            ("v4:4x4x4", 2),
            ("tpu7x:4x4x4", 1),
            *SMALL,
        ]
    ),
    st.randoms(),
)
def test_the_planners_links_are_those_that_a_mesh_has(chips, random):
    """`mesh.make` lays axes by JAX's own function, on places as TPUs tell them."""
    chips = topology.chips(*chips)
    each = dict.fromkeys(roles.ORDER, 1)
    left = chips.devices
    while left > 1:
        factor = next(n for n in (2, 3, 5, 7) if left % n == 0)
        each[random.choice(roles.ORDER)] *= factor
        left //= factor
    try:
        chips.mesh(**each)
    except ValueError as error:
        with pytest.raises(ValueError, match="which cut it unevenly"):
            mesh.across_groups("mesh.make", each, chips.slices, "slices")
        assert "unevenly" in str(error)
        return
    places = itertools.product(
        range(chips.slices), *map(range, chips.shape), range(chips.chip.devices)
    )
    grid = mesh.placed([Device(chips, place) for place in places], each)
    ways = links.lay(chips, tuple(each.items()))
    for axis, role in enumerate(each):
        line = [
            grid[tuple(i if j == axis else 0 for j in range(grid.ndim))] for i in range(each[role])
        ]
        assert len({d.slice_index for d in line}) == ways[role].across
        found = []
        for side in range(len(chips.shape)):
            at = sorted({d.coords[side] for d in line})
            if len(at) > 1:
                found.append(Side(len(at), at[1] - at[0], chips.shape[side]))
        if len({d.core_on_chip for d in line}) > 1:
            found.append(Side(2, 1, 2, on_chip=True))
        told = ways[role].sides
        if chips.devices <= 32 and chips.chip.devices > 1:  # its rings go over several sides
            assert any(side.on_chip for side in told) == any(side.on_chip for side in found)
        else:
            assert told == tuple(found)


# --- "How to Scale Your Model", chapter 6 (applied-training.md at commit 04d8de58): 70B on a pod


LLAMA = plan.preset("llama3-70b")
POD = topology.chips("v5p:16x20x28")
BATCH = 4 * 1024 * 1024  # tokens
C = V5P.peak() / (2 * V5P.link_bandwidth)  # its 2550: operations for each byte of a ring


def count(*ends):
    found = arrays.of_decoder(LLAMA).parameters
    return sum(a.size for a in found if a.path.split("/")[-2] in ends)


def test_the_worked_plan_counts_parameters():
    assert f"{count('gate', 'up', 'down') / 1e9:.1f}" == "56.4"  # printed as 56.3, cut off
    assert f"{count('embed', 'head') / 1e9:.1f}" == "2.1"
    assert f"{count('q', 'k', 'v', 'o') / 1e9:.0f}" == "12"
    assert round(sum(a.size for a in arrays.of_decoder(LLAMA).parameters) / 1e9) in (70, 71)


def test_the_worked_plan_counts_time():
    """6 × 70e9 operations for a token; 15e12 tokens in 44 days at 40 % of 8,960 chips."""
    without = plan.model_flops(LLAMA, 1, 4096) * 4 - plan.model_flops(LLAMA, 1, 8192)
    each = without / (4 * 4096 - 8192)  # attention grows with the square, and cancels
    assert abs(each / 4.2e11 - 1) < 0.01
    assert POD.number == 8960 and C == 2550
    days = each * 15e12 / (POD.number * V5P.peak() * 0.4) / 86400
    assert round(days) in (43, 44)


def test_the_worked_plan_counts_memory():
    """bfloat16 weights, two float32 moments, three activations a layer: 16.5 TB, 1.8 GB a chip."""
    total = sum(a.size for a in arrays.of_decoder(LLAMA).parameters)
    moments = sum(a.size for a in arrays.of_decoder(LLAMA).state) * 4
    each = roles.Roles(data=64, fsdp=16, remat=True)
    (part,) = parts(each, LLAMA, arrays.of_decoder(LLAMA), 1024, 4096)
    kept = 3 * memory(part).terms.kept * each.rows
    assert abs(2 * total / 140e9 - 1) < 0.01 and abs(moments / 560e9 - 1) < 0.01
    assert abs(kept / 15.8e12 - 1) < 0.05  # it takes 4e6 tokens, not 4 · 2²⁰
    whole = 2 * total + moments + kept
    assert abs(whole / 16.5e12 - 1) < 0.05 and f"{whole / POD.number / 1e9:.1f}" in ("1.8", "1.9")
    assert round(whole / 96e9) in range(165, 185)


def products(tokens, fsdp, tensor, sides):
    """Seconds of an MLP's forward pass on a chip: (arithmetic, its weights, its activations)."""
    e, m, chips = LLAMA.embed, LLAMA.mlp, fsdp * tensor
    along = [Way((Side(16, 1, 16),) * n) for n in sides]
    weights = 2 * 2 * e * m / tensor * (fsdp - 1) / fsdp
    activations = 2 * 2 * tokens / fsdp * e * (tensor - 1) / tensor
    return (
        4 * tokens * e * m / chips / V5P.peak(),
        links.ring_seconds(V5P, along[:1], weights),
        links.ring_seconds(V5P, along[1:], activations) if tensor > 1 else 0.0,
    )


def test_the_worked_plan_finds_fsdp_bound_by_links():
    """468 tokens a chip, and FSDP over three axes needs 850."""
    assert round(BATCH / POD.number) == 468
    work, gathers, _ = products(BATCH, 8960, 1, [3, 1])
    assert gathers > work
    even = products(8960 * 850, 8960, 1, [3, 1])
    assert abs(even[0] / even[1] - 1) < 1e-2
    assert POD.number > 1024  # nor are there as many sequences of 4,096 tokens


def test_the_worked_plan_splits_fsdp_and_tensor():
    """X = 1643 + 284 = 1927: there two axes of FSDP and one of tensor take as long as products."""
    n, wide = POD.number, LLAMA.mlp
    root = math.sqrt(4.19e6**2 * wide**2 - 2 * C**2 * wide * 4.19e6 * n) / (C * wide)
    x = 4.19e6 / C + root
    assert (int(4.19e6 / C), int(root)) == (1643, 284) and abs(x - 1927) < 2
    work, gathers, activations = products(4.19e6, x, n / x, [2, 1])
    assert abs((gathers + activations * n / x / (n / x - 1)) / work - 1) < 1e-2
    work, gathers, activations = products(BATCH, 2048, n / 2048, [2, 1])
    assert gathers + activations < work  # so that 2048 × 4 is bound by arithmetic
    assert 2 * C**2 / wide < BATCH / n and round(2 * C**2 / wide) in (453, 454)
    assert wide / C > 11 > n / 2048


def test_the_planner_agrees_with_the_worked_plan():
    """4M tokens on a pod: FSDP alone waits for links; with tensor, arithmetic binds."""
    shape = topology.chips("v5p:16x16x32")  # 1024 rows do not divide over 5 and 7
    held = arrays.of_decoder(LLAMA)

    def seconds(**sizes):
        each = roles.Roles(**sizes, remat=True)
        return planning.candidate(each, LLAMA, held, shape, 1024, 4096).step

    alone, mixed = seconds(fsdp=1024, context=8), seconds(fsdp=1024, context=2, tensor=4)
    assert alone.hidden > alone.arithmetic and alone.binds != "arithmetic"
    assert mixed.hidden < mixed.arithmetic and mixed.seconds < alone.seconds


# --- Published runs

# MFU as published, of those that tell the convention: of all pairs, or of half of them.
MFU = [
    ("v6e", "llama3-8b", 256, False, 0.4546),
    ("v6e", "llama3-70b", 256, False, 0.5033),
    ("v6e", "llama2-70b", 256, False, 0.438),
    ("a100", "llama2-7b", 128, False, 0.68),
    ("h100", "llama2-7b", 96, False, 0.46),
    ("h100", "llama3-70b", 2048, False, 0.5432),
    ("tpu7x", "llama3-70b", 64, True, 1207.05 / 2307),
    ("v5p", "llama3-405b", 512, True, 314.530 / 459),
]


@pytest.mark.parametrize("kind, name, chips, causal, published", MFU, ids=str)
def test_a_published_run_has_the_mfu_of_its_tokens(kind, name, chips, causal, published):
    (run,) = [r for r in plan.RUNS if (r.kind, r.model, r.chips) == (kind, name, chips)]
    config = plan.preset(name)
    ours, theirs = (plan.model_flops(config, 1, run.sequence, causal=c) for c in (True, causal))
    assert abs(run.mfu * theirs / ours / published - 1) < 0.03


@pytest.mark.parametrize("run", plan.RUNS, ids=lambda r: f"{r.model}, {r.chips} {r.kind}")
def test_published_runs_lie_below_the_bound(run):
    """Of FSDP alone with nothing done again: their layouts are not told in full."""
    config, each = plan.preset(run.model), roles.Roles(fsdp=run.on.devices)
    assert run.on.number == run.chips
    given = arrays.of_decoder(config), run.on, 4 * run.on.devices, run.sequence
    assert run.mfu < planning.candidate(each, config, *given).mfu_bound
    low, high, on = runs.reached(topology.CHIPS[run.kind], bool(config.experts))
    assert low <= run.mfu <= high and on in (run.kind, "TPUs", "GPUs")


def test_presets_are_the_published_models():
    """Parameters in billions, as their papers and names have them."""
    totals = {"llama3-8b": 8.03, "llama3-70b": 70.6, "llama3-405b": 405.9, "llama2-70b": 69.0}
    totals |= {"mixtral-8x7b": 46.7, "llama2-7b": 6.74}
    assert set(totals) == set(published.PRESETS)
    for name, billions in totals.items():
        held = arrays.of_decoder(plan.preset(name)).parameters
        assert abs(sum(a.size for a in held) / 1e9 / billions - 1) < 2e-3
        assert "arXiv" in published.PRESETS[name].source
    dense = plan.model_flops(plan.preset("mixtral-8x7b"), 1, 1, causal=False) / 6
    assert abs(dense / 12.9e9 - 1) < 0.02  # active parameters; the embedding is no product
