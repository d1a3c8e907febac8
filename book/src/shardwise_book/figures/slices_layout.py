"""The graph of a traced program, and where each of its nodes is drawn."""

import dataclasses
from collections.abc import Sequence
from typing import Any

HIGH, STEP, LANE, ROW = 17, 10, 23, 18  # a box, and the spaces: to the right, below, between rows


@dataclasses.dataclass(frozen=True)
class Graph:
    """Nodes are equations, and the inputs and outputs that are read or computed.

    `owners[node]` is the number of the slice that computes it, None for an input or an output;
    `edges` are pairs of nodes, from what is computed to what reads it.
    """

    names: list[str]
    owners: list[int | None]
    edges: list[tuple[int, int]]


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
