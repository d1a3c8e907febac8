"""The explorer of products: what it says and draws against the programs, the browser against it."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from browser import (
    DESKTOP,
    PHONE,
    check_stands_alone,
    shown,
    shown_for_each,
    silent_page,
    write_page,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import figures, measure, mesh
from shardwise.figures import products

SPECS = P("model", None), P(None, "model"), P(None, None)
SIZES = (32, 32, 64), (8, 32, 32)


@pytest.fixture(scope="module")
def line():
    return mesh.make(model=4)


@pytest.fixture(scope="module")
def compiled(line):
    """Every pair of specs for each of the sizes, and the arrays that its collective takes in."""
    found = {}
    for sizes, left, right in itertools.product(SIZES, SPECS, SPECS):
        i, j, k = sizes
        layouts = NamedSharding(line, left), NamedSharding(line, right)
        factors = jax.device_put((np.ones((i, j)), np.ones((j, k))), layouts)
        program = jax.jit(jnp.dot).lower(*factors).compile()
        moved = measure.collectives(program)
        what = "".join(moved), moved.payload_bytes, moved.ring_bytes, "%line = f32[1]{0} <&>"
        one = figures.Product(sizes, left, right, program.output_shardings.spec, *what)
        found[one] = [dims for op in moved.ops for _, dims in op.arrays]
    return found


@pytest.fixture
def figure(line, compiled):
    return figures.product_explorer(line, [*compiled], start=1)


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


def test_names_the_factor_that_the_program_gathered(line, compiled):
    seen = set()
    for product, arrays in compiled.items():
        (i, j, k), number = product.sizes, products._gathered(product)
        if number is not None:
            factor = [((i, j), product.left), ((j, k), product.right)][number]
            assert arrays == [NamedSharding(line, factor[1]).shard_shape(factor[0])]
            assert ["left", "right"][number] in products.describe(product)
        seen.add((product.collective, number))
    assert seen == {("", None), ("all-gather", 0), ("all-gather", 1), ("all-reduce", None)}


def test_draws_what_devices_hold_and_what_comes_to_them(line, compiled):
    for product in compiled:
        (i, j, k), scale = product.sizes, 64 / max(product.sizes)
        columns, gathered = products._columns(line, product), products._gathered(product)
        shapes = (i, j), (j, k), (i, k)
        for number, (column, shape) in enumerate(zip(columns, shapes, strict=True)):
            drawn = list(rectangles(column))
            held = NamedSharding(line, product[1 + number]).shard_shape(shape)
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


def test_says_numbers_and_line_and_escapes_it(compiled):
    product = next(p for p in compiled if p.collective == "all-reduce")
    said = products.describe(product)
    assert f'data-name="sent">{product.ring_bytes:,}<' in said and "&lt;&amp;&gt;" in said
    assert "P('model', None)" in said


def test_wants_every_pair_in_order(line, compiled):
    with pytest.raises(ValueError, match=r"expected 18 products.*got 17"):
        figures.product_explorer(line, list(compiled)[:-1])


def test_is_small_fetches_nothing_and_may_stand_twice_on_a_page(figure):
    one, two = (figure._repr_html_() for _ in range(2))
    check_stands_alone(one, two, 60_000, ids=6)


# In the browser


@pytest.fixture
def place(tmp_path, figure):
    return write_page(tmp_path, figure, figure)


def test_every_choice_shows_pythons_words_and_picture(opened, line, compiled):
    inside = opened.locator(".shardwise-figure").first
    values = [list(v) for v in itertools.product(range(2), range(3), range(3))]
    found = shown_for_each(inside, values)
    for (words, picture), product in zip(found, compiled, strict=True):
        assert words == products.describe(product).replace("&lt;&amp;&gt;", "<&>")
        drawn = "".join(products._columns(line, product))
        assert re.findall(r' d="([^"]*)"', picture) == re.findall(r' d="([^"]*)"', drawn)


def test_moves_by_keyboard_and_leaves_the_other_alone(opened, compiled):
    figure, other = opened.locator(".shardwise-figure").all()
    first = shown(other)
    assert shown(figure)[0] == first[0]
    for _ in "sizes", "left":
        opened.keyboard.press("Tab")
    opened.keyboard.press("ArrowDown")
    assert shown(figure)[0] == products.describe([*compiled][4]).replace("&lt;&amp;&gt;", "<&>")
    assert shown(other) == first


def test_the_still_is_what_the_script_draws_first(browser, place, opened):
    alive = opened.locator(".shardwise-figure").first
    with silent_page(browser, viewport=DESKTOP, java_script_enabled=False) as page:
        page.goto(place)
        still = page.locator(".shardwise-figure").first
        assert "Without JavaScript" in still.inner_text()
        assert still.get_by_role("combobox", name="Left factor", exact=True).is_disabled()
        assert shown(still) == shown(alive)


@pytest.mark.parametrize("width", [360, PHONE["width"]])
def test_fits_a_phone(browser, place, width):
    with silent_page(browser, viewport=PHONE | {"width": width}) as page:
        page.goto(place)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
