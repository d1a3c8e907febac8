"""The resharding explorer: Python against a checkpoint's own bytes."""

import atexit
import functools
import itertools
import random
import re
import tempfile
from pathlib import Path

import jax
import numpy as np
from browser import NAME, silent_page, write_page
from explorers import Explorer, values
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import checkpoint, mesh
from shardwise_book import figures
from shardwise_book.figures import resharding

SHAPE = (64, 96)
START = ("4×2", "P('a', 'b')"), ("8", "P('a')")
LIMITS = {"small": 2**11, "large": 2**20}


def text(spec):
    return f"P({', '.join(map(repr, spec))})"


@functools.cache
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


@functools.cache
def root():
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    root = Path(folder.name)
    bits = np.random.default_rng(0).integers(0, 2**32, SHAPE, np.uint32)
    for limit, size in LIMITS.items():
        state = {
            f"{name} {spec}": {"w": jax.device_put(bits, sharding)}
            for name, listed in layouts().items()
            for spec, sharding in listed.items()
        }
        checkpoint.save(root / limit, 1, state, chunk_bytes=size)
    checkpoint.wait()
    return root


@functools.cache
def saved():
    return {
        limit: {
            (name, spec): checkpoint.stored(root() / limit, 1, f"{name} {spec}")["w"]
            for name, listed in layouts().items()
            for spec in listed
        }
        for limit in LIMITS
    }


@functools.cache
def table():
    return resharding.table(layouts(), saved(), *START)


def choices(data):
    """Everything that the controls can say."""
    ends = [(m, s) for m, mesh in enumerate(data["meshes"]) for s in range(len(mesh["specs"]))]
    for limit, one, other in itertools.product(range(len(data["limits"])), ends, ends):
        for device in range(len(data["meshes"][other[0]]["blocks"][other[1]])):
            yield {"limit": limit, "from": [*one], "onto": [*other], "device": device}


def test_tells_what_jax_places_and_what_the_checkpoint_holds():
    data, seen = table(), set()
    for choice in choices(data):
        names = [
            (list(layouts())[m], data["meshes"][m]["specs"][s])
            for m, s in (choice["from"], choice["onto"])
        ]
        chunks = saved()[data["limits"][choice["limit"]]][names[0]]
        sharding = layouts()[names[1][0]][names[1][1]]
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


def test_the_ranges_hold_all_that_a_device_holds():
    """Undo the compression of the chunks that are read, and find the block of the device."""
    data = table()
    choice = data["start"] | {"device": 3}
    mesh_, spec = (data["meshes"][choice["from"][0]][key] for key in ("label", "specs"))
    name = f"{mesh_} {spec[choice['from'][1]]}"
    whole = checkpoint.restore(root() / "small", {name: {"w": np.zeros(SHAPE, np.uint32)}})[name][
        "w"
    ]
    answer = resharding.look(data, choice)
    chunk, across = answer["stored"]["chunk"], SHAPE[1] // answer["stored"]["chunk"][1]
    places = saved()["small"][mesh_, spec[choice["from"][1]]].places
    top, bottom, left, right = answer["block"]
    covered = np.zeros(SHAPE, bool)
    for number in answer["touched"]:
        i, j = divmod(number, across)
        file, offset, size = places[i, j]
        stored = (root() / "small" / "1" / name / file).read_bytes()[offset : offset + size]
        part = (slice(i * chunk[0], (i + 1) * chunk[0]), slice(j * chunk[1], (j + 1) * chunk[1]))
        assert np.ascontiguousarray(whole[part]).tobytes() in stored  # bits that do not compress
        covered[part] = True
    assert covered[top:bottom, left:right].all()


def test_still_says_the_right_numbers():
    """64×96 words, from 4×2 in chunks of 2 KiB to eight rows of 8, worked out by hand."""
    still = (
        figures.resharding_explorer(layouts(), saved(), *START)._repr_html_().split("<script>")[0]
    )
    said = dict(re.findall(r'data-name="(\w+)">([^<]+)<', still))
    chunks = saved()["small"][START[0]]
    assert said["block"] == "[0:8, 0:96]" and said["held"] == "3,072"
    assert said["chunk"] == "×".join(map(str, chunks.chunk))
    assert int(said["chunks"]) == 64 * 96 // np.prod(chunks.chunk)
    assert int(said["read"].replace(",", "")) >= 3072


def expected(data, at):
    mesh0, spec0, limit, mesh1, spec1, device = at
    choice = {"limit": limit, "from": [mesh0, spec0], "onto": [mesh1, spec1], "device": device}
    drawn = resharding.describe, resharding.array_picture, resharding.file_picture
    return [draw(data, choice) for draw in drawn]


def states(data):
    every = random.Random(0).sample(list(choices(data)), 200)
    return [[*c["from"], c["limit"], *c["onto"], c["device"]] for c in every]


def named():
    """A mesh, a spec and a limit by such a name, in the words and in the choices."""
    spec, sharding = next(iter(layouts()["8"].items()))
    named = {NAME: {NAME: sharding, "two  spaces": sharding}, "8": {"two  spaces": sharding}}
    chunks = next(iter(saved().values()))["8", spec]
    odd = chunks._replace(
        places={i: (f"{NAME}/{file}", *at) for i, (file, *at) in chunks.places.items()}
    )
    found = {NAME: {(m, s): odd for m, specs in named.items() for s in specs}}
    return figures.resharding_explorer(named, found, (NAME, NAME), (NAME, NAME))


EXPLORER = Explorer(
    lambda: figures.resharding_explorer(layouts(), saved(), *START),
    start=[2, 0, 0, 1, 1, 0],
    controls={
        "Saved from mesh": 3,
        "Saved spec": 3,
        "Chunks": 2,
        "Restored onto mesh": 3,
        "Restored spec": 3,
        "Device": 8,
    },
    states=states,
    expected=expected,
    bytes=60_000,
    ids=10,
    named=named,
    told=lambda words: words.count(f"{NAME}, {NAME}") == 2 and f"of {NAME}/" in words,
)


def test_what_another_mesh_lacks_is_given_up_and_what_it_has_is_kept(browser, tmp_path):
    made, odd = EXPLORER.figure(), named()
    with silent_page(browser) as page:
        page.goto(write_page(tmp_path, made, odd))
        figure, other = page.locator(".shardwise-figure").all()
        figure.get_by_role("slider", name="Device").press("End")
        onto = figure.get_by_role("combobox", name="Restored onto mesh")
        onto.press("Home")  # one device, and Device goes back to it
        assert EXPLORER.agrees(figure, made.data)[3:] == [0, 0, 0]
        spec, onto = (
            other.get_by_role("combobox", name=name)
            for name in ("Restored spec", "Restored onto mesh")
        )
        spec.select_option(index=1)
        onto.select_option(index=1)
        assert values(other)[3:5] == [1, 0]
        onto.select_option(index=0)
        assert values(other)[3:5] == [0, 1]  # held, though options show one space
