"""Links that collectives take between the places of devices, and those that run at once."""

import itertools
import math
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from shardwise import measure, topology
from shardwise.measure.links import carried
from shardwise.plan import links

V5E, H100 = topology.CHIPS["v5e"], topology.CHIPS["h100"]
SIZE = 4 * 4096  # bytes of an array
ONE = SIZE / 45e9
# JAX's order of eight v5e in 2×4, as `topology.compile` tells it.
PLANE = [(0, 0), (1, 0), (0, 1), (1, 1), (1, 3), (0, 3), (1, 2), (0, 2)]


def on(places, text, chip=V5E):
    """The `Overlap` of a program whose devices lie at these places, of one core and one slice."""
    places = tuple((*place, *[0] * (3 - len(place)), 0, 0) for place in places)
    given = dict(coordinates=places, as_text=lambda: text, memory_analysis=lambda: None)
    return measure.overlap(SimpleNamespace(**given), chip)


def program(*lines, devices=8):
    body = "\n".join(f"  {line}" for line in lines)
    return (
        f"HloModule m, is_scheduled=true, num_partitions={devices}\n\n"
        f"ENTRY %main (p: f32[4096]) -> f32[4096] {{\n"
        f"  %p = f32[4096] parameter(0)\n{body}\n  ROOT %r = f32[4096] copy(%p)\n}}\n"
    )


def start(name, pairs, operand="p"):
    pairs = ",".join(f"{{{a},{b}}}" for a, b in pairs)
    made = "(f32[4096], f32[4096], u32[])"
    return f"%{name} = {made} collective-permute-start(%{operand}), source_target_pairs={{{pairs}}}"


def done(name):
    return f"%{name}.done = f32[4096] collective-permute-done(%{name})"


def ring(n, by=1):
    return [(i, (i + by) % n) for i in range(n)]


def test_both_ways_round_a_plane_of_eight_take_the_links_twice():
    """By hand: 1 to 2, 3 to 4, 5 to 6 and 7 to 0 go two links, the first of them down a column.

    Each way alone, no link has two shards. Together 24 links are passed, of 20 directions; that
    from chip (1, 0) to (0, 0), for one, by shards from 1 to 2 and from 1 to 0.
    """
    lines = start("a", ring(8)), start("b", ring(8, -1)), done("a"), done("b")
    found = on(PLANE, program(*lines))
    assert [b.seconds for b in found.found] == pytest.approx([ONE, ONE])
    alone = on(PLANE, program(lines[0], lines[2]))
    assert alone.seconds == pytest.approx(ONE)
    # Where each next one is a neighbour, the two ways are over different links.
    around = [(0, i) for i in range(4)] + [(1, i) for i in reversed(range(4))]
    found = on(around, program(*lines))
    assert found.seconds == pytest.approx(ONE)
    assert [b.seconds for b in found.found] == pytest.approx([ONE / 2] * 2)
    in_turn = on(around, program(lines[0], lines[2], lines[1], lines[3]))
    assert in_turn.seconds == pytest.approx(2 * ONE)
    # Four links to the farthest of a line: each of the middle's two directions has four shards.
    line = [(0, i) for i in range(8)]
    assert on(line, program(start("a", ring(8, 4)), done("a"))).seconds == pytest.approx(4 * ONE)


def test_what_is_awaited_is_over_before_the_next_of_its_way_begins():
    """As a windowed product has it: each of two ways is awaited, and at once begins again."""
    next_, before = ring(8), ring(8, -1)
    lines = [start("a", next_), start("b", before)]
    lines += [done("a"), start("c", next_, "a.done"), done("b"), start("d", before, "b.done")]
    found = on(PLANE, program(*lines, done("c"), done("d")))
    assert [b.seconds for b in found.found] == pytest.approx([ONE] * 4)
    near = [(0, i) for i in range(4)] + [(1, i) for i in reversed(range(4))]
    assert on(near, program(*lines, done("c"), done("d"))).seconds == pytest.approx(2 * ONE)


def test_a_permute_without_places_has_a_link_for_each_device():
    text = program(start("a", ring(8)), start("b", ring(8, -1)), done("a"), done("b"))
    assert [b.seconds for b in measure.overlap(text, V5E).found] == pytest.approx([ONE, ONE])


def walked(start, end, sizes, chip):
    """{link: share}, by going each way along each axis until it arrives or falls off."""
    found, at = Counter(), list(start)
    for axis, size in enumerate(sizes):
        ways = []
        for sign in (1, -1):
            passed, here = [], list(at)
            while here[axis] != end[axis]:
                passed.append((axis, sign > 0, *here))
                here[axis] += sign
                if chip.is_ring(size):
                    here[axis] %= size
                elif not 0 <= here[axis] < size:
                    break
            else:
                ways.append(passed)
        shortest = [way for way in ways if len(way) == min(map(len, ways))]
        for way in shortest if at[axis] != end[axis] else ():
            found.update({link: 1 / len(shortest) for link in way})
        at[axis] = end[axis]
    return found


@pytest.mark.parametrize(
    "kind, sizes",
    [("v5e", (4, 4, 1)), ("v5e", (2, 16, 1)), ("v5p", (2, 4, 4)), ("v5p", (8, 2, 3))],
)
def test_ways_are_those_of_a_walk(kind, sizes):
    random.seed(0)
    places = list(np.ndindex(sizes))
    chip = topology.CHIPS[kind]
    for _ in range(5):
        random.shuffle(places)
        pairs = tuple(enumerate(random.sample(range(len(places)), len(places))))
        expected = Counter()
        for a, b in pairs:
            expected.update(walked(places[a], places[b], sizes, chip))
        laid = tuple((*place, 0, 0) for place in places)
        assert carried(pairs, laid, chip) == expected


def test_cores_share_the_links_of_their_chip():
    """Two chips of two cores: each core to its fellow on the other chip, or to that beside it."""
    chip = topology.CHIPS["tpu7x"]
    places = tuple((x, 0, 0, core, 0) for x in (0, 1) for core in (0, 1))
    assert carried(((0, 2), (1, 3)), places, chip) == {(0, True, 0, 0, 0): 2}
    there, back = (3, True, 0, 0, 0), (3, False, 0, 0, 0)
    assert carried(((0, 1), (1, 0), (2, 2)), places, chip) == {there: 1, back: 1}


def test_what_goes_from_core_to_core_takes_as_long_as_the_planner_counts():
    """Six times as fast as over a link of the torus, for a sum and for a permute."""
    chip, way = topology.CHIPS["tpu7x"], links.Way((links.Side(2, 1, 2, on_chip=True),))
    places = tuple((0, 0, 0, core, 0) for core in (0, 1))
    took = []
    for text in (one("all-reduce", [(0, 1)]), program(start("a", ring(2)), done("a"))):
        given = dict(coordinates=places, memory_analysis=lambda: None, as_text=lambda x=text: x)
        took.append(measure.overlap(SimpleNamespace(**given), chip).seconds)
    assert took == pytest.approx([SIZE / (6 * chip.link_bandwidth)] * 2)
    assert links.ring_seconds(chip, [way], SIZE) == pytest.approx(took[0])  # a sum sends it once
    assert links.hop_seconds(chip, way, SIZE) == pytest.approx(took[1])
    around = links.Way((links.Side(4, 1, 4), *way.sides))  # every other hop leaves a chip
    assert links.hop_seconds(chip, around, SIZE) == pytest.approx(SIZE / chip.link_bandwidth)


@pytest.mark.parametrize("sides", [(4,), (2, 2), (2, 2, 4)])
def test_a_sum_over_cores_and_chips_is_no_quicker_than_what_leaves_a_chip(sides):
    """Of SIZE bytes all but a chip's part leave it, over each of its links at once."""
    chip, chips = topology.CHIPS["tpu7x"], math.prod(sides)
    torus = tuple(links.Side(size, 1, 4) for size in sides)
    ways = [links.Way((*torus, links.Side(2, 1, 2, on_chip=True)))]
    n = 2 * chips
    out = SIZE * (1 - 1 / chips) / sum(2 * side.bandwidth(chip) for side in torus)
    took = links.ring_seconds(chip, ways, SIZE * (1 - 1 / n))
    assert took == pytest.approx(max(out, SIZE / 2 / chip.core_bandwidth))
    strided = links.Way((links.Side(4, 3, 12), links.Side(2, 1, 2, on_chip=True)))
    assert links.hop_seconds(chip, strided, SIZE) == pytest.approx(3 * SIZE / chip.link_bandwidth)


def one(kind, groups):
    groups = "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups) + "}"
    more = "to_apply=%add" if kind == "all-reduce" else "dimensions={0}"
    return program(f"%a = f32[4096] {kind}(%p), replica_groups={groups}, {more}", devices=16)


def test_pairs_that_lie_across_each_other_share_links():
    """Sixteen in 4×4: halves whose partners are two links apart, or one."""
    square = list(np.ndindex(4, 4))
    found = on(square, one("all-reduce", [(i, i + 8) for i in range(8)]))
    assert found.seconds == pytest.approx(2 * ONE)
    near = [(i, i + 4) for i in (0, 1, 2, 3, 8, 9, 10, 11)]
    assert on(square, one("all-reduce", near)).seconds == pytest.approx(ONE)


@pytest.mark.parametrize("sizes", [(2, 4), (4, 4), (2, 8)])
def test_an_all_to_all_takes_as_long_as_the_planner_counts(sizes):
    n, places = np.prod(sizes), list(np.ndindex(sizes))
    found = on(places, one("all-to-all", [range(n)]))
    way = links.lay(topology.chips("v5e:" + "x".join(map(str, sizes))), (("expert", int(n)),))
    sent = SIZE * (n - 1) / n
    assert found.seconds == pytest.approx(links.exchange_seconds(V5E, way["expert"], sent))


def test_nodes_of_fewer_gpus_than_nvlink_joins_are_told_by_their_places():
    """Two nodes of four H100: a permute between them leaves by the network, as a sum does."""
    places = tuple(itertools.product(range(4), range(2)))  # number in its node, node
    given = dict(coordinates=places, memory_analysis=lambda: None)
    text = program(start("a", [(0, 1)]), done("a"))
    given["as_text"] = lambda: text
    assert measure.overlap(SimpleNamespace(**given), H100).seconds == pytest.approx(SIZE / 50e9)
    inside = program(start("a", [(0, 2)]), done("a"))
    given["as_text"] = lambda: inside
    assert measure.overlap(SimpleNamespace(**given), H100).seconds == pytest.approx(SIZE / 450e9)
