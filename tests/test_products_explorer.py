"""The explorer of products: what it says and draws against the programs."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from explorers import Explorer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import measure, mesh
from shardwise_book import figures
from shardwise_book.figures import products

SPECS = P("model", None), P(None, "model"), P(None, None)
SIZES = (32, 32, 64), (8, 32, 32)


@functools.cache
def line():
    return mesh.make(model=4)


@functools.cache
def compiled():
    """Every pair of specs for each of the sizes, and the arrays that its collective takes in."""
    found = {}
    for sizes, left, right in itertools.product(SIZES, SPECS, SPECS):
        i, j, k = sizes
        layouts = NamedSharding(line(), left), NamedSharding(line(), right)
        factors = jax.device_put((np.ones((i, j)), np.ones((j, k))), layouts)
        program = jax.jit(jnp.dot).lower(*factors).compile()
        moved = measure.collectives(program)
        what = "".join(moved), moved.payload_bytes, moved.ring_bytes, "%line = f32[1]{0} <&>"
        one = figures.Product(sizes, left, right, program.output_shardings.spec, *what)
        found[one] = [dims for op in moved.ops for _, dims in op.arrays]
    return found


def rectangles(svg):
    """[(fill or None, opacity, stroke width, [(x, y, width, height), ...]), ...] of a column."""
    for path in re.findall(r"<path ([^>]*)/?>", svg):
        said = dict(re.findall(r'([\w-]+)="([^"]*)"', path))
        boxes = re.findall(r"M(\S+) (\S+?)h(\S+?)v(\S+?)h", said["d"])
        fill = None if said["fill"] == "none" else said["fill"]
        opacity, width = said.get("fill-opacity", "1"), float(said.get("stroke-width", 1))
        yield fill, float(opacity), width, [tuple(map(float, box)) for box in boxes]


def area(boxes):
    return sum(width * height for _, _, width, height in boxes)


def test_names_the_factor_that_the_program_gathered():
    seen = set()
    for product, arrays in compiled().items():
        (i, j, k), number = product.sizes, products._gathered(product)
        if number is not None:
            factor = [((i, j), product.left), ((j, k), product.right)][number]
            assert arrays == [NamedSharding(line(), factor[1]).shard_shape(factor[0])]
            assert ["left", "right"][number] in products.describe(product)
        seen.add((product.collective, number))
    assert seen == {("", None), ("all-gather", 0), ("all-gather", 1), ("all-reduce", None)}


def test_draws_what_devices_hold_and_what_comes_to_them():
    for product in compiled():
        (i, j, k), scale = product.sizes, 64 / max(product.sizes)
        columns, gathered = products._columns(line(), product), products._gathered(product)
        shapes = (i, j), (j, k), (i, k)
        for number, (column, shape) in enumerate(zip(columns, shapes, strict=True)):
            drawn = list(rectangles(column))
            held = NamedSharding(line(), product[1 + number]).shard_shape(shape)
            whole, block = (4 * scale**2 * np.prod(size) for size in (shape, held))
            outlines = [boxes for fill, _, width, boxes in drawn if not fill and width == 1]
            np.testing.assert_allclose(area(outlines[0]), whole, rtol=1e-4)
            full = sum(area(boxes) for fill, opacity, _, boxes in drawn if fill and opacity == 1)
            if number < 2:
                bold = [boxes for fill, _, width, boxes in drawn if not fill and width == 2]
                np.testing.assert_allclose(area(bold[0]), block, rtol=1e-4)
            if number == gathered or number == 2:
                np.testing.assert_allclose(full, whole if number < 2 else block, rtol=1e-4)
            elif product.collective == "all-reduce":  # a quarter of the summed axis each
                np.testing.assert_allclose(full, whole / 4, rtol=1e-4)
            else:
                np.testing.assert_allclose(full, block, rtol=1e-4)


def test_says_numbers_and_line_and_escapes_it():
    product = next(p for p in compiled() if p.collective == "all-reduce")
    said = products.describe(product)
    assert f'data-name="sent">{product.ring_bytes:,}<' in said and "&lt;&amp;&gt;" in said
    assert "P('model', None)" in said


def test_wants_every_pair_in_order():
    with pytest.raises(ValueError, match=r"expected 18 products.*got 17"):
        figures.product_explorer(line(), list(compiled())[:-1])


def expected(data, at):
    product = [*compiled()][9 * at[0] + 3 * at[1] + at[2]]
    drawn = "".join(products._columns(line(), product))
    return [products.describe(product), re.findall(r' d="([^"]*)"', drawn)]


EXPLORER = Explorer(
    lambda: figures.product_explorer(line(), [*compiled()], start=1),
    start=[0, 0, 1],
    controls={"Sizes": 2, "Left factor": 3, "Right factor": 3},
    states=lambda data: [*itertools.product(range(2), range(3), range(3))],
    expected=expected,
    read=lambda texts: [texts[0], re.findall(r' d="([^"]*)"', texts[1])],
    bytes=60_000,
    ids=6,
)
