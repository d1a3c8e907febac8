"""What JAX says of every layout that the mesh explorer offers, small enough for a page.

A layout cuts an array into a grid of equal tiles, and which tile a device holds depends on mesh
and spec alone. So tiles are stored once for each spec, and for each shape only whether JAX takes
it. Its refusals are stored word for word, with slots for what varies.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardwise_book.figures.interactive import Data

MESHES = ((8,), (4, 2), (2, 4), (2, 2, 2))
NAMES = {1: ("data",), 2: ("data", "model"), 3: ("stage", "data", "model")}
SIZES = (16, 12, 8, 6)
SHAPES = tuple(itertools.product(SIZES, SIZES))
ITEMSIZE = 4  # float32


class Answer(NamedTuple):
    """What one layout gives: [start, stop) of rows and columns by device, or JAX's refusal."""

    blocks: list[tuple[int, int, int, int]] | None
    bytes: int | None
    copies: int | None
    error: str | None


def entries(names: Sequence[str]) -> list[str | tuple[str, ...] | None]:
    """All that one array axis may be cut by: nothing, or mesh axes in any order."""
    return [None, *names, *(o for n in (2, 3) for o in itertools.permutations(names, n))]


def table() -> Data:
    """Every mesh, spec and shape as JSON; `look` reads it, and so does explorer.js.

    Raises:
      RuntimeError: there are fewer than eight CPU devices.
    """
    devices = jax.local_devices(backend="cpu")[:8]
    if len(devices) < 8:
        raise RuntimeError(
            f"The mesh explorer needs 8 CPU devices and found {len(devices)}: call "
            f"mesh.simulate(8) first, before anything touches a device."
        )
    errors = {}
    meshes = [_mesh(np.array(devices).reshape(sizes), errors) for sizes in MESHES]
    prefix = repr(PartitionSpec()).removesuffix("()")  # "P" on newer JAX, "PartitionSpec" before
    return {
        "sizes": SIZES,
        "itemsize": ITEMSIZE,
        "prefix": prefix,
        "meshes": meshes,
        "errors": list(errors),
    }


def look(data: Data, mesh: int, shape: Sequence[int], spec: Sequence[int]) -> Answer:
    """The `Answer` for mesh number `mesh`, a shape of `SIZES`, and two entry numbers."""
    choice = data["meshes"][mesh]
    found = choice["specs"][spec[0] * len(choice["entries"]) + spec[1]]
    error = found if isinstance(found, int) else found[2].get(str(SHAPES.index(tuple(shape))))
    if error is not None:
        grid = None if isinstance(found, int) else found[0]
        text = data["errors"][error]
        for value, slot in _slots(data["prefix"], choice, shape, spec, grid):
            text = text.replace(slot, value)
        return Answer(None, None, None, text)
    (down, across), tiles, _ = found
    height, width = shape[0] // down, shape[1] // across
    corners = [(t // across * height, t % across * width) for t in map(int, tiles)]
    blocks = [(y, y + height, x, x + width) for y, x in corners]
    return Answer(blocks, height * width * ITEMSIZE, 8 // (down * across), None)


def _mesh(devices, errors):
    names = NAMES[devices.ndim]
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * devices.ndim)
    choice = {
        "label": "×".join(map(str, devices.shape)),
        "axes": names,
        "repr": str(mesh),
        "entries": [repr(entry) for entry in entries(names)],
        "places": [str(place(devices.shape, i)) for i in range(8)],
    }
    pairs = itertools.product(enumerate(entries(names)), repeat=2)
    choice["specs"] = [
        _spec(mesh, choice, (i, j), PartitionSpec(a, b), errors) for (i, a), (j, b) in pairs
    ]
    return choice


def _spec(mesh, choice, places, spec, errors):
    """[grid, tile of each device, {shape number: error number}], or one error number."""
    prefix = repr(PartitionSpec()).removesuffix("()")

    def keep(error, shape, grid):
        text = str(error)
        for value, slot in _slots(prefix, choice, shape, places, grid):
            text = text.replace(value, slot)
        return errors.setdefault(text, len(errors))

    try:
        sharding = NamedSharding(mesh, spec)
    except Exception as error:  # its class, DuplicateSpecError, is not public
        return keep(error, SHAPES[0], None)
    blocks = sharding.devices_indices_map((8, 8)).values()  # 8 divides by every grid here
    corners = [tuple(s.indices(8)[0] for s in block) for block in blocks]
    grid = [8 // n for n in sharding.shard_shape((8, 8))]
    tiles = "".join(str(y * grid[0] // 8 * grid[1] + x * grid[1] // 8) for y, x in corners)
    refused = {}
    for number, shape in enumerate(SHAPES):
        try:
            sharding.devices_indices_map(shape)
        except ValueError as error:
            refused[str(number)] = keep(error, shape, grid)
    return [grid, tiles, refused]


def _slots(prefix, choice, shape, spec, grid):
    """What varies in JAX's messages, as (text, slot), longest first. explorer.js has the same."""
    first, second = (choice["entries"][i] for i in spec)
    yield choice["repr"], "{mesh}"
    yield f"{prefix}({first}, {second})", "{spec}"
    if grid:
        axis = 0 if shape[0] % grid[0] else 1
        yield f"({shape[0]}, {shape[1]})", "{shape}"
        yield f"{grid[0]}, {grid[1]}", "{grid}"
        yield f"axis {axis} is partitioned {grid[axis]} times", "{cut}"
        yield f"size is {shape[axis]} ", "{size} "


def place(sizes: Sequence[int], device: int) -> tuple[int, ...]:
    """The coordinates of device number `device` in a mesh of these sizes."""
    return tuple(int(n) for n in np.unravel_index(device, sizes))
