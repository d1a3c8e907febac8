"""The mesh explorer: Python's answers against JAX's."""

import ast
import math
import random
import re

import jax
import numpy as np
import pytest
from explorers import Explorer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import mesh
from shardwise_book import figures
from shardwise_book.figures import explorer, layouts
from shardwise_book.figures.interactive import Interactive


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


def test_still_says_the_right_numbers():
    """4×2, P('data', None), 16×8 float32, worked out by hand."""
    still = figures.mesh_explorer()._repr_html_().split("<script>")[0]
    said = dict(re.findall(r'data-name="(\w+)">([^<]+)<', still))
    assert said == {"block": "4×8", "bytes": "128", "copies": "2", "held": "[0:4, 0:8]"}
    assert "device 7 [12:16, 0:8]" in still


def test_data_cannot_end_the_script():
    shown = Interactive("explorer.js", {"text": "</script><b>"}, "")._repr_html_()
    assert shown.count("</script>") == 1 and "<b>" not in shown


def choice(data, at):
    """Mesh, shape, spec and device by the values of the controls."""
    number, rows, columns, first, second, device = at
    return number, (data["sizes"][rows], data["sizes"][columns]), (first, second), device


def expected(data, at):
    """The words, and the eight blocks, each as its part of the array."""
    picked = choice(data, at)
    rows, columns = picked[1]
    blocks = layouts.look(data, *picked[:3]).blocks or []
    scaled = [(t / rows, b / rows, x / columns, r / columns) for t, b, x, r in blocks]
    return [explorer.describe(data, *picked), [tuple(round(n, 3) for n in one) for one in scaled]]


def read(texts):
    """The same, found in the picture of the memories."""
    boxes, outlines = (
        [
            [
                float(re.search(rf' {name}="([^"]+)"', tag)[1])
                for name in ("y", "height", "x", "width")
            ]
            for tag in re.findall(rf'<rect class="{kind}"[^>]*>', texts[2])
            if "display: none" not in tag
        ]
        for kind in ("block", "memory")
    )
    return [
        texts[0],
        [
            tuple(
                round(n, 3)
                for n in ((y - y0) / h0, (y - y0 + h) / h0, (x - x0) / w0, (x - x0 + w) / w0)
            )
            for (y, h, x, w), (y0, h0, x0, w0) in zip(boxes, outlines, strict=False)
        ],
    ]


def states(data):
    draw = random.Random(0)
    for _ in range(300):
        number = draw.randrange(4)
        entries = len(data["meshes"][number]["entries"])
        shape = [data["sizes"].index(size) for size in draw.choice(layouts.SHAPES)]
        yield number, *shape, *(draw.randrange(entries) for _ in "ab"), draw.randrange(8)


def test_what_is_tried_in_a_browser_is_taken_and_refused_for_both_reasons(data):
    texts = [explorer.describe(data, *choice(data, at)) for at in states(data)]
    for reason in ("Each element lies on", "duplicate entries", "should evenly divide"):
        assert sum(reason in text for text in texts) > 10


# The script writes numbers in another way than Python: what is drawn is compared as numbers.
GEOMETRY = """(root) => [root.querySelector("[role=status]").innerHTML,
  ...[...root.querySelectorAll("svg")].map((e) => e.getAttribute("aria-label")),
  ...[...root.querySelectorAll("svg *")].map((e) => [
    e.tagName, e.textContent, e.getAttribute("transform")?.replace(/[\\d.]+/g, Number),
    ...["x", "y", "width", "height"].map((name) => Number(e.getAttribute(name)).toFixed(3))])]"""

EXPLORER = Explorer(
    figures.mesh_explorer,
    start=[1, 0, 2, 1, 0, 0],
    controls={
        "Mesh": 4,
        "Rows": 4,
        "Columns": 4,
        "Rows cut by": 16,  # on the mesh of three axes
        "Columns cut by": 16,
        "Outlined device": 8,
    },
    states=lambda data: [*states(data)],
    expected=expected,
    read=read,
    same=lambda figure: figure.evaluate(GEOMETRY),
    bytes=60_000,
    ids=10,
)
