"""A traced program as a graph, in which the equations that one result needs light up."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from shardwise_book.figures import palette
from shardwise_book.figures.interactive import (
    STYLE,
    Data,
    Interactive,
    controls,
    select,
    status,
)
from shardwise_book.figures.slices_layout import HIGH, Graph, graph, places
from shardwise_book.figures.timelines import COLOURS

GRAPH = """<style>
.shardwise-figure svg.graph { max-width: 30rem; font-size: 10px; }
.shardwise-figure .node { opacity: .6; cursor: pointer; }
.shardwise-figure .node rect { fill: currentColor; fill-opacity: .12; stroke: currentColor;
  stroke-opacity: .5; }
.shardwise-figure .node.read, .shardwise-figure .node.on { opacity: 1; }
.shardwise-figure .node.read rect { stroke-dasharray: 3 2; stroke-opacity: 1; }
.shardwise-figure .node.on rect { fill: var(--lit); fill-opacity: 1; }
.shardwise-figure .node.on text { fill: var(--ink); }
.shardwise-figure .edge { fill: none; stroke: currentColor; opacity: .16; }
.shardwise-figure .edge.on { opacity: .9; stroke-width: 1.5; }
</style>"""
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
    data = table(traced, chosen, inputs, outputs, rows, start)
    made = select("slice", label, list(chosen), start)
    titles = [f"{row} {i}" for i in range(len(data["tops"]))] if rows else []
    still = (
        controls(made, "slice") + _picture(data, titles) + status(data["slices"][start]["words"])
    )
    shown = {key: data[key] for key in ("owners", "edges", "slices")}
    return Interactive("slices.js", shown, STYLE + GRAPH + still)


def table(
    traced: Any,
    chosen: Mapping[str, Sequence[Any]],
    inputs: Sequence[str],
    outputs: Sequence[str],
    rows: Mapping[str, int] | None,
    start: int,
) -> Data:
    """The graph, and of each slice: which nodes it computes and reads, and what is said of it."""
    found = graph(traced.jaxpr, list(chosen.values()), inputs, outputs)
    parts = [_slice(found, number, list(chosen)) for number in range(len(chosen))]
    row_of = [rows[name] if rows else 0 for name in chosen]
    wide, corners, tops = places(found, row_of)
    return {
        "names": found.names,
        "owners": found.owners,
        "edges": found.edges,
        "places": (wide, corners),
        "tops": tops,
        "slices": parts,
        "start": start,
    }


def _slice(found: Graph, number: int, names: list[str]) -> dict[str, Any]:
    on = [node for node, owner in enumerate(found.owners) if owner == number]
    read = sorted({a for a, b in found.edges if b in on and a not in on})
    results = {b for a, b in found.edges if a in on and found.owners[b] is None}
    products = sum(found.names[node] == "dot_general" for node in on)
    given = [found.names[node] for node in read if found.owners[node] is None]
    others = sorted({found.owners[node] for node in read} - {None})
    colour = COLOURS.get(names[number][:1], palette.DEVICES[4])
    equations = sum(owner is not None for owner in found.owners)
    told = ", ".join(given)
    if others:
        made = " and ".join(names[other] for other in others)
        told += f"{', and ' if given else ''}what {made} computed"
    words = (
        f"<b>{escape(names[number])}</b>: {len(on)} of {equations} equations, {products} of them "
        f"{'a product' if products == 1 else 'products'} of matrices. It reads {escape(told)}."
    )
    return {
        "on": [*on, *sorted(results)],
        "read": read,
        "words": words,
        "colours": [colour, palette.ink(colour)],
    }


def _picture(data: Data, titles: Sequence[str]) -> str:
    shown, (wide, places) = data["slices"][data["start"]], data["places"]
    width = max(x for x, _ in places) + wide + 4
    height = max(y for _, y in places) + HIGH + 14
    nodes = "".join(_node(data, node, shown) for node in range(len(places)))
    edges = "".join(
        f'<path class="edge{" on" if b in shown["on"] else ""}" d="{_curve(wide, places, a, b)}"/>'
        for a, b in data["edges"]
    )
    told = "".join(
        f'<text x="2" y="{top - 5}">{escape(title)}</text>'
        for title, top in zip(titles, data["tops"], strict=False)
    )
    lit, ink = shown["colours"]
    return (
        f'<div class="pictures"><svg id="@graph" class="graph" viewBox="0 0 {width} {height}" '
        f'style="--lit:{lit};--ink:{ink}" role="img" aria-label="The equations of a traced '
        f"program as boxes, with lines from what each reads; those of the chosen slice are lit, "
        f'what it reads is dashed">{told}{edges}{nodes}</svg></div>'
    )


def _node(data, node, shown):
    wide, places = data["places"]
    x, y = places[node]
    state = " on" if node in shown["on"] else " read" if node in shown["read"] else ""
    name, is_equation = data["names"][node], data["owners"][node] is not None
    corner = 2 if is_equation else HIGH // 2
    return (
        f'<g class="node{state}" data-node="{node}"><title>{escape(name)}</title>'
        f'<rect x="{x}" y="{y}" width="{wide}" height="{HIGH}" rx="{corner}"/>'
        f'<text x="{x + wide / 2:g}" y="{y + 12}" text-anchor="middle">'
        f"{escape(SHORT.get(name, name) if is_equation else name)}</text></g>"
    )


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
