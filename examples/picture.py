"""The picture in the README: what layouts of eight devices hold and send, by `layouts.predict`.

`python examples/picture.py` writes layouts.svg beside this file; it needs matplotlib.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import optax
from matplotlib import pyplot

from shardwise import layouts, mesh

LAYOUTS = {"data 8": {"data": 8}, "data 2 × fsdp 4": {"data": 2, "fsdp": 4}, "fsdp 8": {"fsdp": 8}}
COLOURS = ("#4477aa", "#cc6677")  # readable in grey, on white and on black


def predicted() -> dict[str, tuple[float, float]]:
    """(MB held, MB sent in a step) on each device, by layout, for the README's two matrices."""
    shape = jax.ShapeDtypeStruct((256, 1024), jnp.float32)
    params = {"w": shape, "v": jax.ShapeDtypeStruct((1024, 256), jnp.float32)}
    batch, found = jax.ShapeDtypeStruct((64, 256), jnp.float32), {}
    for name, sizes in LAYOUTS.items():
        layout = layouts.Layout(mesh.make(**sizes), **{axis: axis for axis in sizes})
        bytes_of = layouts.predict(layout, params, batch, optax.adam(1e-3))
        found[name] = sum(bytes_of.held.values()) / 1e6, sum(bytes_of.sent.values()) / 1e6
    return found


def draw(path: Path) -> None:
    """Bars for each layout, with their numbers."""
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "", "font.size": 11})
    drawing, axes = pyplot.subplots(figsize=(6.4, 2.2), layout="constrained")
    for row, (name, numbers) in enumerate(predicted().items()):
        axes.text(-0.15, row + 0.2, name, ha="right", va="center", color="#777777")
        for at, (what, size) in enumerate(zip(("held", "sent in a step"), numbers, strict=True)):
            axes.barh(row + 0.4 * at, size, 0.36, color=COLOURS[at])
            said = f"{size:.2f} MB {what}"
            axes.text(size + 0.05, row + 0.4 * at, said, va="center", color="#777777")
    axes.set(xlim=(-1.6, 9), ylim=(2.7, -0.3))
    axes.axis("off")
    drawing.savefig(path, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    mesh.simulate(8)
    draw(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).with_name("layouts.svg"))
