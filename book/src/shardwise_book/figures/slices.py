"""A traced program as a graph, in which the equations that one result needs light up."""

import dataclasses
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from shardwise_book.figures import palette, svg
from shardwise_book.figures.interactive import RESULT, Control, Interactive, explorer
from shardwise_book.figures.timelines import COLOURS

HIGH, STEP, LANE, ROW = 17, 10, 23, 18  # a box, and the spaces: to the right, below, between rows

SHORT = {
    "add_any": "add",
    "broadcast_in_dim": "fill",
    "dot_general": "dot",
    "integer_pow": "pow",
    "reduce_sum": "sum",
    "transpose": "swap",
}


def slice_graph(
    traced: Any,
    chosen: Mapping[str, Sequence[Any]],
    inputs: Sequence[str],
    outputs: Sequence[str],
    rows: Mapping[str, int] | None = None,
    row: str = "stage",
    label: str = "What is computed",
    start: int = 0,
) -> Interactive:
    """Choose a slice of a program; its equations light up, and what it reads is outlined.

    Args:
      traced: what `jax.make_jaxpr` returns, without inner programs.
      chosen: for each name, equations of `traced.eqns`; each is in one slice, none in two. A name
        that begins with a kind of task (F, B, I, W) has its colour.
      inputs, outputs: names of the program's arguments and results.
      rows: the number of the `row` in which a slice is drawn; all in one if it is left out.
      start: the number of the slice that is shown at first.

    Raises:
      ValueError: an equation in no slice, or in two.
    """
    found = graph(traced.jaxpr, list(chosen.values()), inputs, outputs)
    names = list(chosen)
    wide, corners, tops = places(found, [rows[name] if rows else 0 for name in names])
    titles = [f"{row} {i}" for i in range(len(tops))] if rows else []
    parts = {
        "result": lambda slice: describe(found, names, slice),
        "graph": lambda slice: _picture(found, names, titles, wide, corners, tops, slice),
    }
    controls = {"slice": Control(label, {name: i for i, name in enumerate(names)})}
    layout = f'<div class="pictures graph" id="@graph"></div>{RESULT}'
    return explorer(controls, layout, parts, {"slice": start}, "slice")


@dataclasses.dataclass(frozen=True)
class Graph:
    """Nodes are equations, and the inputs and outputs that are read or computed.

    `owners[node]` is the number of the slice that computes it, None for an input or an output;
    `edges` are pairs of nodes, from what is computed to what reads it.
    """

    names: list[str]
    owners: list[int | None]
    edges: list[tuple[int, int]]


def slice_of(found: Graph, number: int) -> tuple[list[int], list[int]]:
    """The nodes that a slice computes, its results among them, and those that it reads."""
    own = [node for node, owner in enumerate(found.owners) if owner == number]
    read = sorted({a for a, b in found.edges if b in own and a not in own})
    results = {b for a, b in found.edges if a in own and found.owners[b] is None}
    return [*own, *sorted(results)], read


def describe(found: Graph, names: Sequence[str], number: int) -> str:
    """What a slice computes and reads, in words."""
    on, read = slice_of(found, number)
    own = [node for node in on if found.owners[node] == number]
    products = sum(found.names[node] == "dot_general" for node in own)
    given = [found.names[node] for node in read if found.owners[node] is None]
    others = sorted({found.owners[node] for node in read} - {None})
    told = ", ".join(given)
    if others:
        made = " and ".join(names[other] for other in others)
        told += f"{', and ' if given else ''}what {made} computed"
    equations = sum(owner is not None for owner in found.owners)
    return (
        f"<b>{escape(names[number])}</b>: {len(own)} of {equations} equations, {products} of them "
        f"{'a product' if products == 1 else 'products'} of matrices. It reads {escape(told)}."
    )


def _picture(found, names, titles, wide, corners, tops, number):
    on, read = slice_of(found, number)
    width, height = max(x for x, _ in corners) + wide + 4, max(y for _, y in corners) + HIGH + 14
    colour = COLOURS.get(names[number][:1], palette.DEVICES[4])
    told = "".join(svg.text(2, y - 5, title) for title, y in zip(titles, tops, strict=False))
    edges = "".join(
        f'<path class="edge{" on" * (b in on)}" d="{_curve(wide, corners, a, b)}"/>'
        for a, b in found.edges
    )
    nodes = ""
    for node, (x, y) in enumerate(corners):
        name, owner = found.names[node], found.owners[node]
        state = " on" if node in on else " read" if node in read else ""
        corner, shown = (HIGH // 2, name) if owner is None else (2, SHORT.get(name, name))
        chooses = "" if owner is None else f'data-chooses="slice={owner}"'
        nodes += (
            f'<g class="node{state}" {chooses}><title>{escape(name)}</title><rect x="{x}" y="{y}" '
            f'width="{wide}" height="{HIGH}" rx="{corner}"/>'
            f"{svg.text(x + wide / 2, y + 12, shown, 'middle')}</g>"
        )
    alt = "The equations of a traced program as boxes, with lines from what each reads; those of "
    alt += "the chosen slice are lit, what it reads is dashed"
    lit = f'<g style="--lit:{colour};--ink:{palette.ink(colour)}">{told}{edges}{nodes}</g>'
    return svg.picture("", width, height, alt, lit, 30)


def _curve(wide, places, a, b):
    """From the right side to the left one; between rows, or backwards, from above or below."""
    (x, y), (to_x, to_y) = places[a], places[b]
    if to_x >= x + wide:
        bow = HIGH if y == to_y and to_x > x + 2 * wide else 0  # over the boxes in between
        x, y, to_y, bend = x + wide, y + HIGH / 2, to_y + HIGH / 2, (to_x - x - wide) / 2
        by, to_by = y - bow, to_y - bow
        return f"M{x} {y:g}C{x + bend:g} {by:g} {to_x - bend:g} {to_by:g} {to_x} {to_y:g}"
    down = to_y > y
    x, to_x, y, to_y = x + wide / 2, to_x + wide / 2, y + HIGH * down, to_y + HIGH * (not down)
    bend = (to_y - y) / 2
    return f"M{x:g} {y}C{x:g} {y + bend:g} {to_x:g} {to_y - bend:g} {to_x:g} {to_y}"


def graph(
    jaxpr: Any, slices: Sequence[Sequence[Any]], inputs: Sequence[str], outputs: Sequence[str]
) -> Graph:
    """The graph of a jaxpr whose equations are divided into slices.

    Raises:
      ValueError: an equation in no slice, or in two.
    """
    names, owners, edges, node_of = [], [], set(), {}

    def add(name, owner=None):
        names.append(name)
        owners.append(owner)
        return len(names) - 1

    for name, v in zip(inputs, jaxpr.invars, strict=True):
        node_of[v] = add(name)
    for eqn in jaxpr.eqns:
        found = [i for i, one in enumerate(slices) if any(e is eqn for e in one)]
        if len(found) != 1:
            raise ValueError(
                f"slice_graph: {eqn.primitive.name} is in {len(found)} slices, not in one."
            )
        node = add(eqn.primitive.name, found[0])
        edges |= {(node_of[v], node) for v in _variables(eqn.invars)}
        node_of |= dict.fromkeys(eqn.outvars, node)
    for name, v in zip(outputs, jaxpr.outvars, strict=True):
        edges.add((node_of[v], add(name)))
    return Graph(names, owners, sorted(edges))


def _variables(atoms):
    return [v for v in atoms if not hasattr(v, "val")]  # a literal has one


def places(found: Graph, rows: Sequence[int]) -> tuple[int, list[tuple[int, int]], list[int]]:
    """(width of a box, its left upper corner for each node, top of each row), in units of the SVG.

    To the right of what it reads in its own row; in the first lane of the row that is free there.
    """
    row_of = _rows(found, rows)
    depth = _depths(found, row_of)
    order = sorted(range(len(depth)), key=lambda n: (depth[n], _rank(found, n), n))
    lanes, taken = {}, set()
    for node in order:
        lane = 0
        while (row_of[node], depth[node], lane) in taken:
            lane += 1
        taken.add((row_of[node], depth[node], lane))
        lanes[node] = lane
    tops, top = [], ROW
    for row in range(max(row_of) + 1):
        tops.append(top)
        top += LANE * (1 + max(lanes[n] for n in lanes if row_of[n] == row)) + ROW
    columns = max(depth) + 1
    wide = min(70, (372 - STEP * (columns - 1)) // columns)
    found_at = [
        (2 + depth[n] * (wide + STEP), tops[row_of[n]] + LANE * lanes[n]) for n in range(len(depth))
    ]
    return wide, found_at, tops


def _rank(found, node):
    """Equations in the order of their slices, then inputs and outputs."""
    owner = found.owners[node]
    return len(found.owners) if owner is None else owner


def _rows(found, rows):
    """An equation's row is its slice's; an input's that of its first reader, an output's alike."""
    row_of = [None if owner is None else rows[owner] for owner in found.owners]
    for a, b in found.edges:
        if row_of[a] is None:
            row_of[a] = row_of[b]
        if row_of[b] is None:
            row_of[b] = row_of[a]
    return [0 if row is None else row for row in row_of]


def _depths(found, row_of):
    """How many nodes of its row stand before each; one that reads nothing, close to a reader."""
    near = [(a, b) for a, b in found.edges if row_of[a] == row_of[b]]
    depth = [0] * len(row_of)
    for node in range(len(depth)):  # nodes come after those that they read
        depth[node] = max((1 + depth[a] for a, b in near if b == node), default=0)
    for node in range(len(depth)):
        readers = [depth[b] for a, b in near if a == node]
        if readers and not any(b == node for _, b in near):
            depth[node] = max(0, min(readers) - 1)
    return depth
