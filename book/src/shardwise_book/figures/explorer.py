"""The interactive figure in which to try meshes and specs: which device holds which block."""

from collections.abc import Sequence
from html import escape

from shardwise_book.figures import layouts, palette
from shardwise_book.figures.interactive import (
    STYLE,
    Data,
    Interactive,
    controls,
    select,
    slider,
    status,
)

START = {"mesh": 1, "shape": (16, 8), "spec": (1, 0), "device": 0}  # 4×2, P('data', None)


def mesh_explorer() -> Interactive:
    """Choose an array's shape, a mesh and a spec; see the blocks, their bytes, or JAX's refusal.

    Needs eight CPU devices (`mesh.simulate(8)`). Raises RuntimeError where there are fewer.
    """
    data = {**layouts.table(), "start": START}
    still = _controls(data) + _pictures(data) + status(describe(data, **START))
    return Interactive("explorer.js", data, STYLE + still)


def describe(data: Data, mesh: int, shape: Sequence[int], spec: Sequence[int], device: int) -> str:
    """The result in one sentence of HTML, as explorer.js writes it too; numbers carry names."""
    answer = layouts.look(data, mesh, shape, spec)
    choice = data["meshes"][mesh]
    first, second = (choice["entries"][i] for i in spec)
    name = f"<code>{data['prefix']}({first}, {second})</code>"
    if answer.error:
        return f'JAX refuses {name}: <span data-name="error">{escape(answer.error, False)}</span>'
    top, bottom, left, right = answer.blocks[device]
    whole = shape[0] * shape[1] * data["itemsize"]
    return (
        f'{name}: each device holds <b data-name="block">{bottom - top}×{right - left}</b> of '
        f"{shape[0]}×{shape[1]} float32 elements, "
        f'<b data-name="bytes">{answer.bytes}</b> of {whole} bytes. '
        f'Each element lies on <b data-name="copies">{answer.copies}</b> of 8 devices. '
        f'Device {device} holds <b data-name="held">[{top}:{bottom}, {left}:{right}]</b>.'
    )


def _controls(data):
    choice = data["meshes"][START["mesh"]]
    meshes = [f"{m['label']} ({', '.join(m['axes'])})" for m in data["meshes"]]
    sizes = [str(n) for n in data["sizes"]]
    selects = (
        ("mesh", "Mesh", meshes, START["mesh"]),
        ("rows", "Rows", sizes, sizes.index(str(START["shape"][0]))),
        ("columns", "Columns", sizes, sizes.index(str(START["shape"][1]))),
        ("first", "Rows cut by", choice["entries"], START["spec"][0]),
        ("second", "Columns cut by", choice["entries"], START["spec"][1]),
    )
    made = "".join(select(*choice) for choice in selects)
    return controls(made + slider("device", "Outlined device", 7, START["device"]), "layout")


def _pictures(data):
    blocks = layouts.look(data, START["mesh"], START["shape"], START["spec"]).blocks
    return f'<div class="pictures">{_array(blocks)}{_memories(data, blocks)}</div>'


def _array(blocks):
    """The array, each block in one strip for each device that holds it."""
    rows, columns = START["shape"]
    unit = 250 / max(rows, columns)
    boxes = []
    for device, block in enumerate(blocks):
        holders = [i for i, other in enumerate(blocks) if other == block]
        top, bottom, left, right = (n * unit for n in block)
        strip = (right - left - 3) / len(holders)  # blocks stand 3 apart, strips touch
        x = 41.5 + left + holders.index(device) * strip
        boxes.append(_box(device, x, 31.5 + top, strip, bottom - top - 3))
    top, bottom, left, right = (n * unit for n in blocks[START["device"]])
    return (
        f'<svg id="@array" viewBox="0 0 300 290" role="img" aria-label="{_alt(blocks)}">'
        f'<text class="across" x="{40 + columns * unit / 2}" y="20" text-anchor="middle">'
        f'{columns} columns</text><text class="down" text-anchor="middle" '
        f'transform="translate(32 {30 + rows * unit / 2}) rotate(-90)">{rows} rows</text>'
        f"{''.join(boxes)}"
        f'<path class="lines" d="{_lines(rows, columns, unit)}" stroke="currentColor" '
        f'stroke-opacity=".25" fill="none"/><rect class="edge" x="40" y="30" '
        f'width="{columns * unit}" height="{rows * unit}" fill="none" stroke="currentColor"/>'
        f'<rect class="pick" x="{40 + left}" y="{30 + top}" width="{right - left}" '
        f'height="{bottom - top}" fill="none" stroke="currentColor" stroke-width="4"/></svg>'
    )


def _memories(data, blocks):
    """The memory of each device: the block it holds, inside the outline of the whole array."""
    rows, columns = START["shape"]
    unit = 62 / max(rows, columns)
    choice = data["meshes"][START["mesh"]]
    drawn = []
    for device, (top, bottom, left, right) in enumerate(blocks):
        x, y = device % 4 * 82 + 8, device // 4 * 118 + 58
        seat = choice["places"][device]
        size = ((right - left) * unit, (bottom - top) * unit)
        box = _box(device, x + left * unit, y + top * unit, *size, label=False)
        drawn.append(
            f'<text x="{x}" y="{y - 24}">device {device}</text>'
            f'<text class="place" x="{x}" y="{y - 9}" opacity=".75">{seat}</text>'
            f"{box}"
            f'<rect class="memory" x="{x}" y="{y}" width="{columns * unit}" '
            f'height="{rows * unit}" fill="none" stroke="currentColor" '
            f'stroke-width="{3 if device == START["device"] else 0.8}"/>'
        )
    axes = ", ".join(choice["axes"])
    return (
        f'<svg id="@memories" viewBox="0 0 330 250" role="img" '
        f'aria-label="The memory of each device">'
        f'<text class="axes" x="8" y="16" opacity=".75">place in the mesh: ({axes})</text>'
        f"{''.join(drawn)}</svg>"
    )


def _box(device, x, y, width, height, label=True):
    colour = palette.device(device)
    text = (
        f'<text class="name" x="{x + width / 2}" y="{y + height / 2 + 4}" text-anchor="middle" '
        f'fill="{palette.ink(colour)}">{device}</text>'
    )
    return (
        f'<rect class="block" x="{x}" y="{y}" width="{width}" height="{height}" '
        f'fill="{colour}"/>{text if label else ""}'
    )


def _lines(rows, columns, unit):
    """The path of the lines between elements."""
    down = (f"M{40 + i * unit} 30v{rows * unit}" for i in range(1, columns))
    across = (f"M40 {30 + i * unit}h{columns * unit}" for i in range(1, rows))
    return "".join((*down, *across))


def _alt(blocks):
    """What the picture of the array shows, in words, for those who do not see it."""
    held = (f"device {i} [{t}:{b}, {x}:{y}]" for i, (t, b, x, y) in enumerate(blocks))
    return "Blocks held: " + ", ".join(held)
