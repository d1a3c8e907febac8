"""The mesh explorer: Python's answers against JAX's, and the browser's against Python's."""

import ast
import html
import math
import random
import re

import jax
import numpy as np
import pytest
from browser import DESKTOP, PHONE, check_stands_alone, silent_page, write_page
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import figures, mesh
from shardwise.figures import explorer, layouts
from shardwise.figures.interactive import Interactive

START = (1, (16, 8), (1, 0), 0)  # mesh 4×2, P('data', None), device 0


@pytest.fixture(scope="module")
def data():
    return layouts.table()


def meshes(data):
    """The meshes that the explorer names, made again from what it shows."""
    for choice in data["meshes"]:
        sizes = map(int, choice["label"].split("×"))
        yield mesh.make(**dict(zip(choice["axes"], sizes, strict=True)))


def offered(data, number):
    """Every pair of entry numbers for a mesh, and the spec that their texts stand for."""
    entries = [ast.literal_eval(text) for text in data["meshes"][number]["entries"]]
    for pair in np.ndindex(len(entries), len(entries)):
        yield pair, P(*(entries[i] for i in pair))


def from_jax(grid, spec, shape):
    """(blocks by device, bytes of a block, the error), asked of JAX without the explorer."""
    try:
        sharding = NamedSharding(grid, spec)
        held = sharding.devices_indices_map(shape)
    except Exception as error:
        return None, None, str(error)
    blocks = []
    for device in mesh.devices():
        (top, bottom, _), (left, right, _) = map(slice.indices, held[device], shape)
        blocks.append((top, bottom, left, right))
    return blocks, math.prod(sharding.shard_shape(shape)) * 4, None


def test_answers_as_jax_does_for_everything_on_offer(data):
    counts = {True: 0, False: 0}
    for number, grid in enumerate(meshes(data)):
        for pair, spec in offered(data, number):
            for shape in layouts.SHAPES:
                answer = layouts.look(data, number, shape, pair)
                blocks, size, error = from_jax(grid, spec, shape)
                assert (answer.blocks, answer.bytes, answer.error) == (blocks, size, error)
                if not error:  # all that is held, over what there is to hold
                    assert answer.copies == 8 * size / (math.prod(shape) * 4)
                counts[error is None] += 1
    assert min(counts.values()) > 500, counts


def test_device_places_are_the_mesh_s(data):
    for choice, grid in zip(data["meshes"], meshes(data), strict=True):
        for place, device in np.ndenumerate(grid.devices):
            assert ast.literal_eval(choice["places"][mesh.devices().index(device)]) == place


def test_refusals_name_axis_sizes_and_mesh(data):
    uneven = layouts.look(data, 1, (6, 8), (1, 0)).error
    assert re.search(r"axis 0 is partitioned 4 times.*size is 6 .*\(6, 8\).*4, 1", uneven)
    assert "'data': 4, 'model': 2" in uneven and "{" not in uneven
    assert "duplicate entries for `data`" in layouts.look(data, 1, (8, 8), (1, 1)).error


def test_needs_eight_devices(monkeypatch):
    some = jax.local_devices(backend="cpu")[:4]
    monkeypatch.setattr(jax, "local_devices", lambda backend: some)
    with pytest.raises(RuntimeError, match=r"8 CPU devices and found 4: .*mesh\.simulate\(8\)"):
        figures.mesh_explorer()


def test_is_small_fetches_nothing_and_may_stand_twice_on_a_page():
    one, two = (figures.mesh_explorer()._repr_html_() for _ in range(2))
    check_stands_alone(one, two, 60_000, ids=10)


def test_still_says_the_right_numbers():
    """4×2, P('data', None), 16×8 float32, worked out by hand."""
    still = figures.mesh_explorer()._repr_html_().split("<script>")[0]
    said = dict(re.findall(r'data-name="(\w+)">([^<]+)<', still))
    assert said == {"block": "4×8", "bytes": "128", "copies": "2", "held": "[0:4, 0:8]"}
    assert "device 7 [12:16, 0:8]" in still


def test_data_cannot_end_the_script():
    shown = Interactive("explorer.js", {"text": "</script><b>"}, "")._repr_html_()
    assert shown.count("</script>") == 1 and "<b>" not in shown


# In the browser


@pytest.fixture
def place(tmp_path):
    return write_page(tmp_path, figures.mesh_explorer(), figures.mesh_explorer())


@pytest.fixture
def opened(browser, place):
    """A silent page with two explorers."""
    with silent_page(browser, viewport=DESKTOP) as page:
        page.goto(place)
        yield page


def control(figure, name):
    """A control by the name that a screen reader says."""
    role = "slider" if name == "Outlined device" else "combobox"
    return figure.get_by_role(role, name=name, exact=True)


def chosen(figure, data):
    """What the controls say: (mesh, shape, spec, device)."""
    values = figure.locator("select, input").evaluate_all("all => all.map((e) => Number(e.value))")
    number, rows, columns, first, second, device = values
    return number, (data["sizes"][rows], data["sizes"][columns]), (first, second), device


def drawn(figure):
    """The eight blocks in the picture of the memories, as (top, bottom, left, right) elements."""
    boxes, outlines = (
        figure.locator(f'[id$="-memories"] .{name}').evaluate_all(
            "all => all.filter((e) => e.style.display != 'none').map((e) =>"
            "  ['y', 'height', 'x', 'width'].map((name) => Number(e.getAttribute(name))))"
        )
        for name in ("block", "memory")
    )
    return [
        tuple(
            round(n, 3)
            for n in ((y - y0) / h0, (y - y0 + h) / h0, (x - x0) / w0, (x - x0 + w) / w0)
        )
        for (y, h, x, w), (y0, h0, x0, w0) in zip(boxes, outlines, strict=False)
    ]


def agrees(figure, data):
    """Asserts that the figure shows what Python says of what its controls say; returns that."""
    choice = chosen(figure, data)
    assert figure.get_by_role("status").inner_html() == explorer.describe(data, *choice)
    rows, columns = choice[1]
    blocks = layouts.look(data, *choice[:3]).blocks or []
    scaled = [(t / rows, b / rows, x / columns, r / columns) for t, b, x, r in blocks]
    assert drawn(figure) == [tuple(round(n, 3) for n in block) for block in scaled]
    return choice


def test_every_control_moves_by_keyboard_and_shows_pythons_numbers(opened, data):
    figure, other = opened.locator(".shardwise-figure").all()
    seen = {agrees(figure, data)}
    assert seen == {START}
    controls = {
        "Mesh": 4,
        "Rows": 4,
        "Columns": 4,
        "Rows cut by": 16,  # on the mesh of three axes, where Mesh leaves us
        "Columns cut by": 16,
        "Outlined device": 8,
    }
    for label, count in controls.items():
        moved = control(figure, label)
        moved.focus()
        moved.press("Home")
        here = set()
        for _ in range(count):
            here.add(moved.input_value())
            seen.add(agrees(figure, data))
            moved.press("ArrowRight" if label == "Outlined device" else "ArrowDown")
        assert here == {str(i) for i in range(count)}, label
        if "cut" in label:  # back to a layout that JAX takes
            moved.press("Home")
        if label == "Rows cut by":
            moved.press("ArrowDown")
    control(figure, "Mesh").press("Home")  # the entries that this mesh has not are gone
    seen.add(agrees(figure, data))
    assert agrees(other, data) == START  # the other figure on the page stood still
    texts = [explorer.describe(data, *choice) for choice in seen]
    assert any("duplicate entries" in text for text in texts)
    assert any("should evenly divide" in text for text in texts)


def test_tab_reaches_every_control_in_order(opened):
    figure = opened.locator(".shardwise-figure").first
    names = []
    for _ in range(6):
        opened.keyboard.press("Tab")
        names.append(figure.locator("label:has(:focus)").evaluate("e => e.firstChild.data"))
    labels = ["Mesh", "Rows", "Columns", "Rows cut by", "Columns cut by", "Outlined device"]
    assert names == labels


def test_random_choices_show_pythons_words(opened, data):
    draw, choices = random.Random(0), []
    for _ in range(300):
        number = draw.randrange(4)
        entries = len(data["meshes"][number]["entries"])
        shape = draw.choice(layouts.SHAPES)
        choices.append((number, shape, [draw.randrange(entries) for _ in "ab"], draw.randrange(8)))
    values = [
        [number, *map(data["sizes"].index, shape), *spec, device]
        for number, shape, spec, device in choices
    ]
    shown = opened.locator(".shardwise-figure").first.evaluate(
        """(root, all) => all.map((values) => {
          root.querySelectorAll("select, input").forEach((control, i) => {
            control.value = values[i];
            control.dispatchEvent(new Event("input", { bubbles: true }));
          });
          return root.querySelector("[role=status]").innerHTML;
        })""",
        values,
    )
    for choice, text in zip(choices, shown, strict=True):
        assert text == explorer.describe(data, *choice), choice


def test_the_still_is_what_the_script_draws_first(browser, place, opened):
    """Without JavaScript the same picture and words, and controls that do not pretend."""
    geometry = """(root) => [...root.querySelectorAll("svg *")].map((e) => [
      e.tagName, e.textContent, e.getAttribute("transform")?.replace(/[\\d.]+/g, Number),
      ...["x", "y", "width", "height"].map((name) => Number(e.getAttribute(name)).toFixed(3))])"""
    alive = opened.locator(".shardwise-figure").first
    with silent_page(browser, viewport=DESKTOP, java_script_enabled=False) as page:
        page.goto(place)
        still = page.locator(".shardwise-figure").first
        assert still.get_by_role("status").is_visible() and still.locator("svg").first.is_visible()
        assert control(still, "Mesh").is_disabled()
        assert "Without JavaScript" in still.inner_text()
        assert still.get_by_role("status").inner_html() == alive.get_by_role("status").inner_html()
        assert still.evaluate(geometry) == alive.evaluate(geometry)
        assert html.unescape(still.locator("svg").first.get_attribute("aria-label")) == (
            alive.locator("svg").first.get_attribute("aria-label")
        )


def test_fits_a_phone_even_when_refused(browser, place, data):
    with silent_page(browser, viewport=PHONE) as page:
        page.goto(place)
        figure = page.locator(".shardwise-figure").first
        control(figure, "Rows").select_option("6")
        assert "should evenly divide" in figure.get_by_role("status").inner_text()
        agrees(figure, data)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
