"""The figure of one layer: its blocks against JAX's own shardings."""

import re

import jax.numpy as jnp
import pytest
from browser import NAME
from explorers import Explorer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import mesh
from shardwise_book import figures

mesh.simulate(8)
GRID = mesh.make(data=4, model=2)
ROWS = {
    "attention": {"q": ((16, 4, 8), 1), "o": ((4, 8, 16), 2)},
    "MLP": {"up": ((16, 48), 1), "down": ((48, 16), 1)},
}
WHOLE = {"q": P(), "o": P(), "up": P(), "down": P()}
TENSOR = {"q": P(None, "model"), "o": P("model"), "up": P(None, "model"), "down": P("model")}
BOTH = {
    "q": P("data", "model"),
    "o": P("model", None, "data"),
    "up": P("data", "model"),
    "down": P("model", "data"),
}
SENDS = [("forward", "all-gather of weights", 4, 1234)]
LAYOUTS = {"whole": (WHOLE, WHOLE, []), "both": (BOTH, TENSOR, SENDS)}


def bytes_of(specs, device):
    """What JAX puts on a device, of arrays with these specs."""
    total = 0
    for row in ROWS.values():
        for name, (shape, _) in row.items():
            shards = NamedSharding(GRID, specs[name]).devices_indices_map(shape)
            total += 4 * jnp.zeros(shape)[shards[GRID.devices.flat[device]]].size
    return total


def numbers(words):
    found = re.findall(r'data-name="(\w+)">([\d,]+)<', words)
    return {name: int(text.replace(",", "")) for name, text in found}


def test_words_say_jaxs_own_bytes():
    data = figures.layer.table(GRID, ROWS, LAYOUTS)
    total = bytes_of(WHOLE, 0)
    for device in range(8):
        held, used = bytes_of(BOTH, device), bytes_of(TENSOR, device)
        words = data["frames"][1]["devices"][device]["words"]
        assert numbers(words) == {"held": held, "received": used - held, "unseen": total - used}
        assert f"device {device} (data {device // 2}, model {device % 2})" in words
    assert "receives none" in data["frames"][0]["devices"][0]["words"]
    assert data["frames"][0]["sums"] == ""  # nothing contracts an axis that is cut
    assert data["frames"][1]["sums"].count("Σ") == 2  # after o and after down
    assert "1,234" in data["frames"][1]["sends"]


def test_blocks_of_all_devices_tile_each_matrix():
    data = figures.layer.table(GRID, ROWS, LAYOUTS)
    areas = []
    for device in data["frames"][1]["devices"]:
        held = re.search(r'd="([^"]+)" [^>]*class="held"', device["blocks"])[1]
        boxes = re.findall(r"h([\d.]+)v([\d.]+)h-", held)
        areas.append(sum(float(w) * float(h) for w, h in boxes))
    outlines = re.findall(r'width="([\d.]+)" height="([\d.]+)"', data["outlines"])
    assert sum(areas) == pytest.approx(sum(float(w) * float(h) for w, h in outlines), rel=0.05)


def test_a_block_that_is_no_rectangle_is_an_error():
    cut = TENSOR | {"q": P(None, None, "model")}  # half of each head
    with pytest.raises(ValueError, match=r"axes \(4, 8\) drawn as one.*no interval"):
        figures.layer_explorer(GRID, ROWS, {"heads in half": (cut, cut, [])})


def expected(data, at):
    layout, device = data["frames"][at[0]], data["frames"][at[0]]["devices"][at[1]]
    table = re.fullmatch("<table>(.*)</table>", layout["sends"])[1]
    assert table.count("<tr>") == 1 + len(LAYOUTS[[*LAYOUTS][at[0]]][2])
    return [device["words"], layout["sums"], device["blocks"], table]


def read(texts):
    words, picture, table = texts
    return [
        words,
        *re.search(r'-sums">(.*)</g><g id="[^"]*-blocks">(.*)</g>', picture).groups(),
        table,
    ]


EXPLORER = Explorer(
    lambda: figures.layer_explorer(GRID, ROWS, LAYOUTS, chosen=1),
    start=[1, 0],
    controls={"Layout": 2, "Device, 0 to 7": 8},
    states=lambda data: [(layout, device) for layout in range(2) for device in range(8)],
    expected=expected,
    read=read,
    bytes=40_000,
    ids=8,
    named=lambda: figures.layer_explorer(
        GRID, {NAME: ROWS["attention"]}, {NAME: (TENSOR, TENSOR, [("forward", NAME, 1, 2)])}
    ),
    told=lambda words: words.startswith(NAME),
)
