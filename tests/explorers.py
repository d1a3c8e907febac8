"""Every explorer of the book, small, and what its packed states say: `states` reads them."""

import atexit
import base64
import dataclasses
import functools
import itertools
import json
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from browser import NAME
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import checkpoint, context, jaxprs, marks, measure, mesh, schedules
from shardwise_book import figures
from shardwise_book.figures import pipelines
from shardwise_book.figures.interactive import Interactive


class States:
    """What a figure has packed, read as player.js reads it."""

    def __init__(self, figure):
        data = json.loads(zlib.decompress(base64.b64decode(figure.data)))
        rows, texts = [0] * len(data["templates"]), []
        for number in data["order"]:
            pieces, *columns = data["templates"][number]
            numbers = [*(column.split(" ")[rows[number]] for column in columns), ""]
            texts.append("".join(map("".join, zip(pieces, numbers, strict=True))))
            rows[number] += 1
        new = iter(texts)

        def read(entry):
            if isinstance(entry, list):
                return [read(one) for one in entry]
            return texts[entry - 1] if entry else next(new)

        self.controls = data["controls"]
        self.parts = {
            name: one | {"table": read(one["table"])} for name, one in data["parts"].items()
        }

    def _find(self, one, at):
        found = one["table"]
        for key in one["keys"]:
            found = found[at[key]]
        return found

    def options(self, name, **at):
        """What a control offers."""
        return self._find(self.controls[name], at)

    def every(self):
        """All that the controls can say, as {name: number of the option}."""
        found = [{}]
        for name in self.controls:
            found = [at | {name: i} for at in found for i in range(len(self.options(name, **at)))]
        return found

    def shown(self, **at):
        """{part: HTML} for numbers of options; those of the first where they are left out."""
        at = dict.fromkeys(self.controls, 0) | at
        return {name: self._find(one, at) for name, one in self.parts.items()}

    def labelled(self, **labels):
        """{part: HTML} for labels of options."""
        at = dict.fromkeys(self.controls, 0)
        for name in self.controls:
            if name in labels:
                at[name] = self.options(name, **at).index(labels[name])
        return self.shown(**at)


@dataclasses.dataclass(frozen=True)
class Example:
    """An explorer, small; and `named`, one of a caller's NAMEs."""

    figure: Callable[[], Interactive]
    named: Callable[[], Interactive] | None = None


def balance(**changes):
    masks = {
        "causal": (marks.causal, None),
        "packed": (marks.causal, lambda size: np.arange(size) // (size // 2)),
        "prefix": (lambda q, k: marks.causal(q, k) | (k.positions < 3) | (k.index == 9), None),
    }
    given = {
        "orders": {"contiguous": context.contiguous, "zigzag": context.zigzag},
        "masks": masks,
        "devices": (2, 4),
        "lengths": (16, 64),
        "sent": lambda n, size: {"ring": 1000 * n + size, "Ulysses": "too few"},
        "start": {"devices": 1, "length": 1},
    }
    return figures.balance_explorer(context.work, **given | changes)


CUTS = "columns", "rows"
SENDS = {"between": ("reduce-scatter", 1536), "after": ("all-reduce", 768)}


def block(n, first, second, sequence):
    error = 0.0 if first == "columns" else n / 10
    unsent = 0.5 if second == "rows" else None
    return figures.Block(n, first, second, sequence, 8192 // n, SENDS, error, unsent)


BLOCKS = [block(*c) for c in itertools.product((2, 4, 8), CUTS, CUTS, (False, True))]
LAYERS = {f"layer {i}": 4096 for i in range(3)}


LINKS = {"a ring": 2e11, "a slow network": 1e10}


def lanes(strategy="data", bandwidths=LINKS):
    chip = {"flops_per_s": 4e14, "bandwidths": bandwidths, "devices": 8, "tokens": (1024, 4096)}
    return figures.lanes_explorer(strategy, 4e8, 4e8, **chip)


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
LAYOUTS = {
    "whole": (WHOLE, WHOLE, []),
    "both": (BOTH, TENSOR, [("forward", "all-gather of weights", 4, 1234)]),
}


def layer(rows=ROWS, layouts=LAYOUTS, chosen=1):
    return figures.layer_explorer(mesh.make(data=4, model=2), rows, layouts, chosen)


OFFERED = {
    "experts": {"4": 4, "16": 16},
    "per_token": {"1": 1, "2": 2},
    "capacity": {"1": 1.0, "none": None},
    "skew": {"even": 0, "skewed": 3},
    "devices": {"2": 2, "4": 4},
}


def loads(offered=OFFERED):
    def route(count, k, capacity, skew):
        wanted = [10 * k + skew * i for i in range(count)]
        slots = None if capacity is None else 12 * k
        return wanted, [min(w, 1000 if slots is None else slots) for w in wanted], slots

    def sent(count, k, capacity, devices):
        return (0 if capacity is None else 1000 * count * k), 5000 * devices * k

    return figures.loads_explorer(offered, route, sent, {"experts": 1, "skew": 1})


def refusing():
    """A schedule of the reader's own, which refuses, and says so."""

    def refuse(stages, devices, microbatches):
        raise ValueError(f"{NAME} wants more")

    start = {"schedule": len(schedules.SCHEDULES), "task": 0}
    with (
        mock.patch.dict(schedules.SCHEDULES, {NAME: refuse}),
        mock.patch.dict(pipelines.START, start),
    ):
        return figures.pipeline_explorer()


CHOICES = {"Chips": ["8", "64"], "Tensor": ["1", "2", "8"]}
PLACES = list(itertools.product(range(2), range(3)))
GIB = 2**30


def budget(chips, tensor):
    if (chips, tensor) == (0, 2):
        return "8 chips, and <tensor> asks for 16."
    memory = {"state": (9 + 20 * chips) * GIB, "kept": 3.14159 * GIB, "logits": tensor * GIB}
    seconds = {"arithmetic": 1.23456, "fsdp": 0.4 / (1 + chips), "tensor": 0.9 * tensor}
    return figures.Budget(f"tensor {tensor}", memory, 15.75 * GIB, seconds, 2.5, 0.4567)


def load(devices, tensor):
    if (devices, tensor) == (0, 2):
        return "8 devices, and <tensor> asks for 16."
    sent = {"tensor": (tensor * 123.456e9, 0.2744 * tensor), "fsdp": (7e9, 1 / (1 + devices))}
    return figures.Load(60e9 * (1 + devices), 0.75, sent)


BUDGETS, SPLITS = ({place: make(*place) for place in PLACES} for make in (budget, load))


def plan(choices=CHOICES, budgets=BUDGETS, chosen=(0, 1)):
    return figures.plan_explorer(choices, budgets, chosen)


def split(choices=CHOICES, loads=SPLITS, chosen=(0, 1)):
    return figures.split_explorer(choices, loads, chosen, 80e9)


TWO = {NAME: [NAME, "another"]}
NAMED_BUDGETS = {(0,): figures.Budget(NAME, {NAME: 1e9}, 2e9, {NAME: 1}, 2, 0.5), (1,): NAME}
NAMED_LOADS = {(0,): figures.Load(1e9, 1, {NAME: (1e9, 2)}), (1,): NAME}


@functools.cache
def products():
    """Every pair of specs for each of the sizes, and the arrays that its collective takes in."""
    specs, found = (P("model", None), P(None, "model"), P(None, None)), {}
    for sizes, left, right in itertools.product(((32, 32, 64), (8, 32, 32)), specs, specs):
        i, j, k = sizes
        line = mesh.make(model=4)
        layouts = NamedSharding(line, left), NamedSharding(line, right)
        factors = jax.device_put((np.ones((i, j)), np.ones((j, k))), layouts)
        program = jax.jit(jnp.dot).lower(*factors).compile()
        moved = measure.collectives(program)
        what = "".join(moved), moved.payload_bytes, moved.ring_bytes, "%line = f32[1]{0} <&>"
        one = figures.Product(sizes, left, right, program.output_shardings.spec, *what)
        found[one] = [dims for op in moved.ops for _, dims in op.arrays]
    return found


SHAPE = (64, 96)
START = ("4×2", "P('a', 'b')"), ("8", "P('a')")


@functools.cache
def layouts():
    grids = {"1": mesh.make(a=1), "8": mesh.make(a=8), "4×2": mesh.make(a=4, b=2)}
    specs = {
        "1": [P()],
        "8": [P(), P("a"), P(None, "a")],
        "4×2": [P("a", "b"), P("b", "a"), P("a")],
    }
    return {
        name: {
            f"P({', '.join(map(repr, spec))})": NamedSharding(grids[name], spec)
            for spec in specs[name]
        }
        for name in grids
    }


@functools.cache
def saved():
    """{limit: {layout: its chunks}}, of bits that do not compress."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    bits = np.random.default_rng(0).integers(0, 2**32, SHAPE, np.uint32)
    keys = [(name, spec) for name, listed in layouts().items() for spec in listed]
    found = {}
    for limit, size in {"small": 2**11, "large": 2**20}.items():
        where = Path(folder.name) / limit
        placed = {key: jax.device_put(bits, layouts()[key[0]][key[1]]) for key in keys}
        state = {" ".join(key): {"w": array} for key, array in placed.items()}
        checkpoint.save(where, 1, state, chunk_bytes=size)
        checkpoint.wait()
        found[limit] = {key: checkpoint.stored(where, 1, " ".join(key))["w"] for key in keys}
    return found


def resharding_named():
    spec, sharding = next(iter(layouts()["8"].items()))
    named = {NAME: {NAME: sharding, "two  spaces": sharding}, "8": {"two  spaces": sharding}}
    chunks = next(iter(saved().values()))["8", spec]
    places = {i: (f"{NAME}/{file}", *at) for i, (file, *at) in chunks.places.items()}
    odd = chunks._replace(places=places)
    found = {NAME: {(m, s): odd for m, specs in named.items() for s in specs}}
    return figures.resharding_explorer(named, found, (NAME, NAME), (NAME, NAME))


PASSES = {"gather": 1, "reduce": 1, "all-reduce": 2, "exchange": 1}


def histories(marks):
    """What the devices hold in a ring, by real permutes."""
    n, me = len(marks), jax.lax.axis_index("x")

    def moves(blocks, slots, hop, add=False):
        """Every device sends its block `slots[0]` on, and puts what arrives into `slots[1]`."""
        pairs = [(d, (d + hop) % n) for d in range(n)]
        arrived = jax.lax.ppermute(blocks[slots[0] % n], "x", pairs)
        place = blocks.at[slots[1] % n]
        return place.add(arrived) if add else place.set(arrived)

    found = {name: [marks] for name in PASSES}
    found["gather"] = [jnp.where(jnp.arange(n) == me, marks, 0)]
    for k in range(n - 1):
        summing = (me - k - 1, me - k - 2)
        for name in "reduce", "all-reduce":
            found[name].append(moves(found[name][-1], summing, 1, add=True))
        found["exchange"].append(moves(found["exchange"][-1], (k + 1, k + 1), k + 1))
    for k in range(n - 1):
        for name in "gather", "all-reduce":
            found[name].append(moves(found[name][-1], (me - k, me - k - 1), 1))
    return {name: jnp.stack(states)[:, None] for name, states in found.items()}


@functools.cache
def rings():
    found = {name: {} for name in PASSES}
    for n in (2, 3, 4, 8):
        specs = {"in_specs": P("x"), "out_specs": P(None, "x"), "check_vma": False}
        program = jax.jit(jax.shard_map(histories, mesh=mesh.make(x=n), **specs))
        marks = np.repeat(1 << np.arange(n), n).astype(np.int32)
        for name, history in program(marks).items():
            hops = range(1, n) if name == "exchange" else [1] * (len(history) - 1)
            pairs = [[(d, (d + hop) % n) for d in range(n)] for hop in hops]
            found[name][n] = np.array(history), pairs
    return found


def saving():
    return figures.saving_explorer(
        {"0.03 s": 0.03, "2 s": 2.0},
        {"5 ms, then 50 ms": (0.005, 0.05), "5 s, then 1 min": (5, 60)},
        {"20 min": 1200, "3.1 h": 54 * 24 / 419 * 3600},
        300,
        {"steps": 1, "saves": 1},
    )


@functools.cache
def traced():
    """The program of a product and its gradients, and the slices that make each of its results."""

    def product(x, w, cotangent):
        y, pull = jax.vjp(jnp.matmul, x, w)
        return y, *pull(cotangent)

    program = jax.make_jaxpr(product)(jnp.ones((2, 3)), jnp.ones((3, 3)), jnp.ones((2, 3)))
    results = zip("FIW", program.jaxpr.outvars, strict=True)
    return program, {kind: jaxprs.needed(program.eqns, [v], ())[0] for kind, v in results}


INPUTS, OUTPUTS = ["x", "w", "cotangent"], ["y", "to x", "to w"]


def slices(named=""):
    program, chosen = traced()
    listed = {f"{named}{kind}": equations for kind, equations in chosen.items()}
    return figures.slice_graph(program, listed, INPUTS, OUTPUTS, start=1)


EXPLORERS = {
    "balance": Example(balance, lambda: balance(orders={NAME: context.zigzag})),
    "block": Example(lambda: figures.block_explorer(BLOCKS, start=10)),
    "fsdp": Example(
        lambda: figures.fsdp_stepper(LAYERS),
        lambda: figures.fsdp_stepper({"head": 80, NAME: 40}),
    ),
    "lanes": Example(lanes, lambda: lanes("fsdp", {NAME: 1e11, "another": 2e11})),
    "layer": Example(
        layer,
        lambda: layer(
            {NAME: ROWS["attention"]}, {NAME: (TENSOR, TENSOR, [("forward", NAME, 1, 2)])}, 0
        ),
    ),
    "loads": Example(loads, lambda: loads(OFFERED | {"skew": {"even": 0, NAME: 3}})),
    "mesh": Example(figures.mesh_explorer),
    "pipeline": Example(figures.pipeline_explorer, refusing),
    "plan": Example(plan, lambda: plan(TWO, NAMED_BUDGETS, (0,))),
    "products": Example(
        lambda: figures.product_explorer(mesh.make(model=4), [*products()], start=1)
    ),
    "resharding": Example(
        lambda: figures.resharding_explorer(layouts(), saved(), *START), resharding_named
    ),
    "ring": Example(
        lambda: figures.ring_stepper(rings()),
        lambda: figures.ring_stepper({NAME: rings()["reduce"]}),
    ),
    "saving": Example(
        saving,
        lambda: figures.saving_explorer({NAME: 1.0, "2": 2}, {"1": (1, 2)}, {"1 h": 3600}, 0),
    ),
    "slices": Example(slices, lambda: slices(NAME)),
    "split": Example(split, lambda: split(TWO, NAMED_LOADS, (0,))),
}
