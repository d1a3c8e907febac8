"""Sharding by rule beside what a user would pick instead: hand-written shardings, and scalax.

Run from the project's root: `pip install -e . -r benchmarks/requirements.txt`, then
`python benchmarks/rules.py --repeats 7 --models reference decoder`. Takes a few minutes.

Full training steps (loss, gradients, AdamW, donation) on eight simulated CPU devices in one
process. Ends with an error if a variant with a target sends more bytes than that; times, which
depend on what else the machine does, are only shown: all devices share its cores, so only ratios
above about 1.5 mean something. `run` counts collectives: AG all-gather, AR all-reduce, A2A
all-to-all; ring MB is what one device sends for them.
"""

import argparse
import functools
import itertools

import jax
import optax
import reference
import rounds
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import marks, mesh, model, objective, rules
from shardwise.model import Config, Decoder

MIN_SIZE = 2**14
WITHIN = 1.2  # of the fastest step
ACTIVATIONS = dict.fromkeys(
    ["embedding_output", "attention_output", "mlp_output", "logits"], P("fsdp")
)
DECODER = Config(vocab=2048, embed=256, layers=4, heads=4, kv_heads=4, head_dim=64, mlp=768)
# No weight of DECODER has two axes that tie for the largest; with mlp=256 three of a layer do.
SQUARE = Config(vocab=2048, embed=256, layers=4, heads=4, kv_heads=4, head_dim=64, mlp=256)


class Benchmark:
    """One model's parameters, loss and step; `names` are the logical axes of plain arrays."""

    def __init__(self, params, loss, limit, names=None):
        self.params, self.names, self.limit = jax.device_get(params), names, limit
        self.optimizer = optax.adamw(3e-4)
        self.opt_state = jax.device_get(self.optimizer.init(self.params))
        self.batch = reference.random_batch()
        self._mean_and_grad = objective.value_and_grad(loss)
        self.mesh = mesh.make(fsdp=8)

    def step(self, params, opt_state, batch):
        mean, grads = self._mean_and_grad(params, batch)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, mean

    def variant(self, name, step, shardings, limit=None):
        """The row of a jitted step, its arguments placed by `shardings`, one for each of them."""
        args = (self.params, self.opt_state, self.batch)
        return rounds.Variant(name, step, *map(jax.device_put, args, shardings), limit)


def reference_model():
    return Benchmark(reference.init(), reference.loss, 55.5e6, reference.AXES)


def decoder(config):
    """The book's decoder with its own marks; at most 1.02 of what its layout must move."""
    graphdef, params = nnx.split(jax.jit(lambda: Decoder(config, nnx.Rngs(0)))())
    sizes = [(path, x.nbytes) for path, x in rules.named_leaves(params)]
    large = [(path, size) for path, size in sizes if size >= 4 * MIN_SIZE]
    layers = sum(size for path, size in large if path.startswith("blocks/"))
    rest = sum(size for _, size in large) - layers
    # Gradients as all-reduce: on CPU jit has no reduce-scatter. Layers are gathered in both passes.
    moved = (2 * sum(size for _, size in sizes) + 2 * layers + rest) * 7 / 8
    return Benchmark(params, functools.partial(model.loss, graphdef=graphdef), 1.02 * moved)


MODELS = {
    "reference": reference_model,
    "decoder": functools.partial(decoder, DECODER),
    "square": functools.partial(decoder, SQUARE),
}


def one_device(bench):
    device = jax.sharding.SingleDeviceSharding(mesh.devices()[0])
    yield bench.variant("one device", jax.jit(bench.step, donate_argnums=(0, 1)), [device] * 3)


def ours(bench):
    for pick, names in itertools.product(["largest", "first"], [None, ACTIVATIONS]):
        rule = rules.FSDPRule("fsdp", min_size=MIN_SIZE, pick=pick, names=bench.names)
        layout = (rule, rules.follow(rule, bench.params), P("fsdp"))
        step = rules.jit(
            bench.step,
            bench.mesh,
            in_rules=layout,
            out_rules=(*layout[:2], P()),
            names=names,
            donate_argnums=(0, 1),
        )
        trees = (bench.params, bench.opt_state, bench.batch)
        layout = rules.shardings(layout, trees, bench.mesh)
        limit = None if names is None else bench.limit
        yield bench.variant(f"rules, pick {pick}{_with(names)}", step, layout, limit)


def by_hand(bench):
    whole, rows = (NamedSharding(bench.mesh, spec) for spec in (P(), P("fsdp")))

    def jit(layout, names):
        def step(*args):
            with marks.bind(constrain=lambda x, name: _pinned(x, rows if names else None)):
                return bench.step(*args)

        out = (*layout[:2], whole)
        return jax.jit(step, in_shardings=layout, out_shardings=out, donate_argnums=(0, 1))

    layout = (whole, whole, rows)
    yield bench.variant("jit by hand, data parallel", jit(layout, None), layout)
    for ties, names in itertools.product(["last", "first"], [None, ACTIVATIONS]):
        cut = functools.partial(largest_axis, bench.mesh, ties)
        layout = (*(jax.tree.map_with_path(cut, x) for x in (bench.params, bench.opt_state)), rows)
        yield bench.variant(f"jit by hand, ties {ties}{_with(names)}", jit(layout, names), layout)


def largest_axis(grid, ties, path, x):
    """One array's sharding, as users write it themselves: its largest axis, never the layers'."""
    axes = range("blocks" in jax.tree_util.keystr(path), x.ndim)
    if x.size < MIN_SIZE:
        return NamedSharding(grid, P())
    i = max(axes, key=lambda i: (x.shape[i], i if ties == "last" else -i))
    return NamedSharding(grid, P(*[None] * i, "fsdp"))


def by_scalax(bench):
    try:
        from scalax import sharding as scalax
    except ImportError as error:
        why = f"{error}: pip install -r benchmarks/requirements.txt"
        yield from (rounds.Missing(f"scalax{_with(names)}", why) for names in (None, ACTIVATIONS))
        return

    def step(*args):
        with marks.bind(constrain=scalax.with_sharding_annotation):
            return bench.step(*args)

    helper = scalax.MeshShardingHelper([-1], ["fsdp"])
    rule = scalax.FSDPShardingRule(min_fsdp_size=MIN_SIZE)
    for names in (None, ACTIVATIONS):
        jitted = helper.sjit(
            step,
            in_shardings=(rule, rule, P("fsdp")),
            out_shardings=(rule, rule, P()),
            annotation_shardings=names,
            donate_argnums=(0, 1),
        )
        trees = (bench.params, bench.opt_state, bench.batch)
        layout = helper.match_sharding_rule((rule, rule, P("fsdp")), trees)
        yield bench.variant(f"scalax{_with(names)}", jitted, layout)


def _with(names):
    return ", constrained" if names else ""


def _pinned(x, sharding):
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


def compare(model, repeats):
    """Print one model's table; the rows that missed their limit."""
    bench = MODELS[model]()
    makers = (one_device, ours, by_hand, by_scalax)
    rows = [row for maker in makers for row in maker(bench)]
    variants = [row for row in rows if isinstance(row, rounds.Variant)]
    rounds.check(variants)
    rounds.time_all(variants, repeats)
    count = sum(x.size for x in jax.tree.leaves(bench.params))
    print(f"\n{model}: {count:,} parameters, jax {jax.__version__}, {repeats} rounds")
    print(rounds.table(rows))
    targets = [row for row in variants if row.limit is not None]
    fastest = min(row.time[0] for row in variants)
    for row in targets:
        median, spread = row.time
        verdict = "met" if median <= WITHIN * fastest else "missed"
        print(
            f"{row.name}: {median / fastest:.2f} of the fastest step, spread "
            f"{spread / fastest:.2f}; at most {WITHIN}: {verdict}"
        )
    return [f"{model}: {row.name}" for row in targets if not rounds.met(row)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    mesh.simulate(8)
    missed = [row for model in options.models for row in compare(model, options.repeats)]
    assert not missed, f"more bytes than the target: {missed}"
