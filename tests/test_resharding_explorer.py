"""The resharding explorer: Python against a checkpoint's own bytes, the browser against Python."""

import html
import itertools
import random
import re

import jax
import numpy as np
import pytest
from browser import (
    DESKTOP,
    NAME,
    PHONE,
    check_names_are_text,
    check_stands_alone,
    shown,
    shown_for_each,
    silent_page,
    write_page,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import checkpoint, figures, mesh
from shardwise.figures import resharding

SHAPE = (64, 96)
START = ("4×2", "P('a', 'b')"), ("8", "P('a')")
LIMITS = {"small": 2**11, "large": 2**20}


def text(spec):
    return f"P({', '.join(map(repr, spec))})"


@pytest.fixture(scope="module")
def layouts():
    grids = {"1": mesh.make(a=1), "8": mesh.make(a=8), "4×2": mesh.make(a=4, b=2)}
    specs = {
        "1": [P()],
        "8": [P(), P("a"), P(None, "a")],
        "4×2": [P("a", "b"), P("b", "a"), P("a")],
    }
    return {
        name: {text(spec): NamedSharding(grids[name], spec) for spec in specs[name]}
        for name in grids
    }


@pytest.fixture(scope="module")
def root(layouts, tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    bits = np.random.default_rng(0).integers(0, 2**32, SHAPE, np.uint32)
    for limit, size in LIMITS.items():
        state = {
            f"{name} {spec}": {"w": jax.device_put(bits, sharding)}
            for name, listed in layouts.items()
            for spec, sharding in listed.items()
        }
        checkpoint.save(root / limit, 1, state, chunk_bytes=size)
    checkpoint.wait()
    return root


@pytest.fixture(scope="module")
def saved(layouts, root):
    return {
        limit: {
            (name, spec): checkpoint.stored(root / limit, 1, f"{name} {spec}")["w"]
            for name, listed in layouts.items()
            for spec in listed
        }
        for limit in LIMITS
    }


@pytest.fixture(scope="module")
def data(layouts, saved):
    return resharding.table(layouts, saved, *START)


def choices(data):
    """Everything that the controls can say."""
    ends = [(m, s) for m, mesh in enumerate(data["meshes"]) for s in range(len(mesh["specs"]))]
    for limit, one, other in itertools.product(range(len(data["limits"])), ends, ends):
        for device in range(len(data["meshes"][other[0]]["blocks"][other[1]])):
            yield {"limit": limit, "from": [*one], "onto": [*other], "device": device}


def test_tells_what_jax_places_and_what_the_checkpoint_holds(data, layouts, saved):
    seen = set()
    for choice in choices(data):
        names = [
            (list(layouts)[m], data["meshes"][m]["specs"][s])
            for m, s in (choice["from"], choice["onto"])
        ]
        chunks = saved[data["limits"][choice["limit"]]][names[0]]
        sharding = layouts[names[1][0]][names[1][1]]
        device = sorted(sharding.device_set, key=lambda d: d.id)[choice["device"]]
        index = sharding.devices_indices_map(SHAPE)[device]
        answer = resharding.look(data, choice)
        assert answer["held"] == sharding.shard_shape(SHAPE)[0] * sharding.shard_shape(SHAPE)[1] * 4
        mine = [chunks.places[number] for number in chunks.touched(index)]
        assert len(answer["touched"]) == len(mine)
        assert answer["read"] == sum(size for *_, size in mine) >= answer["held"]
        ends = [(a, b) for _, a, b in answer["ranges"]]
        assert sum(b - a for a, b in ends) == answer["read"]
        assert {a for a, _ in ends} <= {offset for _, offset, _ in mine}
        seen.add(len(ends))
    assert len(seen) > 2


def test_the_ranges_hold_all_that_a_device_holds(data, root, saved):
    """Undo the compression of the chunks that are read, and find the block of the device."""
    choice = data["start"] | {"device": 3}
    mesh_, spec = (data["meshes"][choice["from"][0]][key] for key in ("label", "specs"))
    name = f"{mesh_} {spec[choice['from'][1]]}"
    whole = checkpoint.restore(root / "small", {name: {"w": np.zeros(SHAPE, np.uint32)}})[name]["w"]
    answer = resharding.look(data, choice)
    chunk, across = answer["stored"]["chunk"], SHAPE[1] // answer["stored"]["chunk"][1]
    places = saved["small"][mesh_, spec[choice["from"][1]]].places
    top, bottom, left, right = answer["block"]
    covered = np.zeros(SHAPE, bool)
    for number in answer["touched"]:
        i, j = divmod(number, across)
        file, offset, size = places[i, j]
        stored = (root / "small" / "1" / name / file).read_bytes()[offset : offset + size]
        part = (slice(i * chunk[0], (i + 1) * chunk[0]), slice(j * chunk[1], (j + 1) * chunk[1]))
        assert np.ascontiguousarray(whole[part]).tobytes() in stored  # bits that do not compress
        covered[part] = True
    assert covered[top:bottom, left:right].all()


def test_still_says_the_right_numbers(layouts, saved):
    """64×96 words, from 4×2 in chunks of 2 KiB to eight rows of 8, worked out by hand."""
    still = figures.resharding_explorer(layouts, saved, *START)._repr_html_().split("<script>")[0]
    said = dict(re.findall(r'data-name="(\w+)">([^<]+)<', still))
    chunks = saved["small"][START[0]]
    assert said["block"] == "[0:8, 0:96]" and said["held"] == "3,072"
    assert said["chunk"] == "×".join(map(str, chunks.chunk))
    assert int(said["chunks"]) == 64 * 96 // np.prod(chunks.chunk)
    assert int(said["read"].replace(",", "")) >= 3072


def test_is_small_fetches_nothing_and_may_stand_twice_on_a_page(layouts, saved):
    one, two = (figures.resharding_explorer(layouts, saved, *START)._repr_html_() for _ in range(2))
    check_stands_alone(one, two, 60_000, ids=10)


# In the browser


@pytest.fixture
def place(tmp_path, layouts, saved):
    explorers = (figures.resharding_explorer(layouts, saved, *START) for _ in range(2))
    return write_page(tmp_path, *explorers)


LABELS = [
    "Saved from mesh",
    "Saved spec",
    "Chunks",
    "Restored onto mesh",
    "Restored spec",
    "Device",
]


def control(figure, name):
    role = "slider" if name == "Device" else "combobox"
    return figure.get_by_role(role, name=name, exact=True)


def chosen(figure):
    values = figure.locator("select, input").evaluate_all("all => all.map((e) => Number(e.value))")
    mesh0, spec0, limit, mesh1, spec1, device = values
    return {"limit": limit, "from": [mesh0, spec0], "onto": [mesh1, spec1], "device": device}


def expected(data, choice):
    drawn = (resharding.describe, resharding.array_picture, resharding.file_picture)
    return [html.unescape(draw(data, choice)) for draw in drawn]


def agrees(figure, data):
    choice = chosen(figure)
    assert shown(figure) == expected(data, choice)
    return str(choice)


def test_every_control_moves_by_keyboard_and_shows_pythons_numbers(opened, data):
    figure, other = opened.locator(".shardwise-figure").all()
    first = agrees(figure, data)
    assert first == str(data["start"])
    seen = {first}
    for label in LABELS:
        moved = control(figure, label)
        moved.focus()
        moved.press("Home")
        here = set()
        for _ in range(8):
            here.add(moved.input_value())
            seen.add(agrees(figure, data))
            moved.press("ArrowRight" if label == "Device" else "ArrowDown")
        assert len(here) == {"Chunks": 2, "Device": 8}.get(label, 3), label
    control(figure, "Restored onto mesh").press("Home")  # one device, and Device goes back to it
    agrees(figure, data)
    assert chosen(figure)["device"] == 0
    assert agrees(other, data) == first and len(seen) > 15


def test_random_choices_show_pythons_words_and_pictures(opened, data):
    every = list(choices(data))
    picked = random.Random(0).sample(every, 200)
    values = [
        [c["from"][0], c["from"][1], c["limit"], c["onto"][0], c["onto"][1], c["device"]]
        for c in picked
    ]
    figure = opened.locator(".shardwise-figure").first
    found = shown_for_each(figure, values)
    for choice, texts in zip(picked, found, strict=True):
        assert texts == expected(data, choice), choice


def test_tab_reaches_every_control_in_order(opened):
    figure = opened.locator(".shardwise-figure").first
    names = []
    for _ in LABELS:
        opened.keyboard.press("Tab")
        names.append(figure.locator("label:has(:focus)").evaluate("e => e.firstChild.data"))
    assert names == LABELS


def test_the_still_is_what_the_script_draws_first(browser, place, opened):
    alive = opened.locator(".shardwise-figure").first
    with silent_page(browser, viewport=DESKTOP, java_script_enabled=False) as page:
        page.goto(place)
        still = page.locator(".shardwise-figure").first
        assert still.get_by_role("status").is_visible() and still.locator("svg").first.is_visible()
        assert control(still, "Chunks").is_disabled()
        assert "Without JavaScript" in still.inner_text()
        assert shown(still) == shown(alive)


def test_fits_a_phone(browser, place, data):
    with silent_page(browser, viewport=PHONE) as page:
        page.goto(place)
        figure = page.locator(".shardwise-figure").first
        control(figure, "Saved from mesh").select_option("0")
        agrees(figure, data)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_names_are_text(browser, tmp_path, layouts, saved):
    """A mesh, a spec and a limit by such a name, in the words and in the choices."""
    spec, sharding = next(iter(layouts["8"].items()))
    named = {NAME: {NAME: sharding, "two  spaces": sharding}, "8": {"two  spaces": sharding}}
    chunks = next(iter(saved.values()))["8", spec]
    odd = chunks._replace(
        places={i: (f"{NAME}/{file}", *at) for i, (file, *at) in chunks.places.items()}
    )
    found = {NAME: {(m, s): odd for m, specs in named.items() for s in specs}}
    figure = figures.resharding_explorer(named, found, (NAME, NAME), (NAME, NAME))
    for alive in check_names_are_text(browser, tmp_path, figure):
        words = alive.get_by_role("status").inner_text()
        assert words.count(f"{NAME}, {NAME}") == 2 and f"of {NAME}/" in words
        if alive.locator("select").first.is_enabled():
            control(alive, "Restored spec").select_option(index=1)
            control(alive, "Restored onto mesh").select_option(index=1)
            assert chosen(alive)["onto"] == [1, 0]
            control(alive, "Restored onto mesh").select_option(index=0)
            assert chosen(alive)["onto"] == [0, 1]  # held, though options show one space
