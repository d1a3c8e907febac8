"""The figure of one layer: its blocks against JAX's own shardings, the browser against Python."""

import re

import jax.numpy as jnp
import pytest
from browser import NAME, check_names_are_text, check_stands_alone, silent_page, write_page
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import figures, mesh

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


def test_is_small_fetches_nothing_and_may_stand_twice_on_a_page():
    one, two = (figures.layer_explorer(GRID, ROWS, LAYOUTS)._repr_html_() for _ in range(2))
    check_stands_alone(one, two, 40_000, ids=8)


def test_every_choice_shows_what_python_drew(browser, tmp_path):
    data = figures.layer.table(GRID, ROWS, LAYOUTS)
    place = write_page(tmp_path, figures.layer_explorer(GRID, ROWS, LAYOUTS, chosen=1))
    with silent_page(browser, viewport={"width": 360, "height": 800}) as page:
        page.goto(place)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        for layout, device in [(1, 0), (1, 5), (0, 7)]:
            page.get_by_role("combobox").select_option(str(layout))
            page.get_by_role("slider").fill(str(device))
            frame = data["frames"][layout]
            assert page.get_by_role("status").inner_html() == frame["devices"][device]["words"]
            assert (
                page.locator("svg")
                .inner_html()
                .endswith(f"{frame['devices'][device]['blocks']}</g>")
            )
            assert page.locator("tbody tr").count() == len(LAYOUTS[[*LAYOUTS][layout]][2])


def test_names_are_text(browser, tmp_path):
    named = {NAME: (TENSOR, TENSOR, [("forward", NAME, 1, 2)])}
    figure = figures.layer_explorer(GRID, {NAME: ROWS["attention"]}, named)
    for inside in check_names_are_text(browser, tmp_path, figure):
        assert inside.get_by_role("status").inner_text().startswith(NAME)
