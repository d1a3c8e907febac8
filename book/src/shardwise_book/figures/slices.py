"""A traced program as a graph, in which the equations that one result needs light up."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from shardwise_book.figures import palette, svg
from shardwise_book.figures.interactive import Control, Interactive, explorer
from shardwise_book.figures.pipelines import COLOURS

HIGH, STEP, LANE, TOP = 17, 10, 23, 18  # a box, and the spaces: to the right, below, above all

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
    start: int = 0,
) -> Interactive:
    """Choose a slice of a program; its equations light up, and what it reads is outlined.

    Args:
      traced: what `jax.make_jaxpr` returns, without inner programs.
      chosen: for each name, equations of `traced.eqns`; each is in one slice, none in two. A name
        that begins with a kind of task (F, B, I, W) has its colour.
      inputs: the names of the program's arguments.
      outputs: the names of its results.
      start: the number of the slice that is shown at first.

    Raises:
      ValueError: an equation in no slice, or in two.
    """
    found = graph(traced.jaxpr, list(chosen.values()), inputs, outputs)
    names = list(chosen)
    controls = {"slice": Control("What is computed", {name: i for i, name in enumerate(names)})}
    layout = '<div class="pictures graph" id="@graph"></div>'
    more = {"start": {"slice": start}, "shows": "slice"}
    fixed = {"found": found, "names": names, "drawn": places(found)}
    return explorer(controls, layout, _graph, result=describe, fixed=fixed, **more)


class Graph(NamedTuple):
    """Nodes are equations, and the inputs and outputs that are read or computed.

    `owners[node]` is the number of the slice that computes it, None for an input or an output;
    `edges` are pairs of nodes, from what is computed to what reads it.
    """

    names: list[str]
    owners: list[int | None]
    edges: list[tuple[int, int]]

    def of(self, number: int) -> tuple[list[int], list[int]]:
        """The nodes that a slice computes, its results among them, and those that it reads."""
        own = [node for node, owner in enumerate(self.owners) if owner == number]
        read = sorted({a for a, b in self.edges if b in own and a not in own})
        results = {b for a, b in self.edges if a in own and self.owners[b] is None}
        return [*own, *sorted(results)], read


def describe(found: Graph, names: Sequence[str], slice: int) -> str:
    """What a slice computes and reads, in words."""
    on, read = found.of(slice)
    own = [node for node in on if found.owners[node] == slice]
    products = sum(found.names[node] == "dot_general" for node in own)
    given = [found.names[node] for node in read if found.owners[node] is None]
    others = sorted({found.owners[node] for node in read} - {None})
    made = " and ".join(names[other] for other in others)
    told = [", ".join(given)] * bool(given) + [f"what {made} computed"] * bool(others)
    equations = sum(owner is not None for owner in found.owners)
    return (
        f"<b>{escape(names[slice])}</b>: {len(own)} of {equations} equations, {products} of them "
        f"{'a product' if products == 1 else 'products'} of matrices. It reads "
        f"{escape(', and '.join(told))}."
    )


def _graph(found, names, drawn, slice):
    (wide, corners), (on, read) = drawn, found.of(slice)
    width, height = max(x for x, _ in corners) + wide + 4, max(y for _, y in corners) + HIGH + 14
    colour = COLOURS.get(names[slice][:1], palette.DEVICES[4])
    inside = f'<g style="--lit:{colour};--ink:{palette.ink(colour)}">'
    for a, b in found.edges:  # from the right side of a box to the left one of another
        (x, y), (to_x, to_y) = corners[a], corners[b]
        bow = HIGH if y == to_y and to_x > x + 2 * wide else 0  # over the boxes in between
        x, y, to_y, bend = x + wide, y + HIGH / 2, to_y + HIGH / 2, (to_x - x - wide) / 2
        curve = f"C{x + bend:g} {y - bow:g} {to_x - bend:g} {to_y - bow:g} {to_x} {to_y:g}"
        inside += f'<path class="edge{" on" * (b in on)}" d="M{x} {y:g}{curve}"/>'
    for node, (x, y) in enumerate(corners):
        name, owner = found.names[node], found.owners[node]
        state = " on" if node in on else " read" if node in read else ""
        corner, shown = (HIGH // 2, name) if owner is None else (2, SHORT.get(name, name))
        chooses = "" if owner is None else f'data-chooses="slice={owner}"'
        inside += (
            f'<g class="node{state}" {chooses}><title>{escape(name)}</title><rect x="{x}" y="{y}" '
            f'width="{wide}" height="{HIGH}" rx="{corner}"/>'
            f"{svg.text(x + wide / 2, y + 12, shown, 'middle')}</g>"
        )
    alt = "The equations of a traced program as boxes, with lines from what each reads; those of "
    alt += "the chosen slice are lit, what it reads is dashed"
    return svg.picture("", width, height, alt, f"{inside}</g>", 30)


def graph(
    jaxpr: Any, slices: Sequence[Sequence[Any]], inputs: Sequence[str], outputs: Sequence[str]
) -> Graph:
    """The graph of a jaxpr whose equations are divided into slices; ValueError if they are not."""
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
        edges |= {(node_of[v], node) for v in eqn.invars if not hasattr(v, "val")}  # no literals
        node_of |= dict.fromkeys(eqn.outvars, node)
    for name, v in zip(outputs, jaxpr.outvars, strict=True):
        edges.add((node_of[v], add(name)))
    return Graph(names, owners, sorted(edges))


def places(found: Graph) -> tuple[int, list[tuple[int, int]]]:
    """(width of a box, its left upper corner for each node), in units of the SVG.

    To the right of what it reads, and one that reads nothing close to a reader; of those that stand
    so far to the right, equations above the others, in the order of their slices.
    """
    depth = [0] * len(found.names)  # how many nodes stand before each
    for node in range(len(depth)):  # nodes come after those that they read
        depth[node] = max((1 + depth[a] for a, b in found.edges if b == node), default=0)
    reading = {b for _, b in found.edges}
    for node, _ in found.edges:
        if node not in reading:
            depth[node] = min(depth[b] for a, b in found.edges if a == node) - 1
    columns = max(depth) + 1
    wide = min(70, (372 - STEP * (columns - 1)) // columns)
    last = len(found.owners)
    order = [(last if owner is None else owner, n) for n, owner in enumerate(found.owners)]
    corners = []
    for place, far in zip(order, depth, strict=True):
        lane = sum(other < place for other, d in zip(order, depth, strict=True) if d == far)
        corners.append((2 + far * (wide + STEP), TOP + LANE * lane))
    return wide, corners
