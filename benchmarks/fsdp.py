"""FSDP by shard_map beside what a user would pick instead: jit with shardings, and scalax.

Run from the project's root: `pip install -e . -r benchmarks/requirements.txt`, then
`python benchmarks/fsdp.py --repeats 7 --models reference decoder`. Takes a few minutes.

Full training steps (loss, gradients, AdamW, donation) on eight simulated CPU devices in one
process. Ends with an error if ours holds or sends another number of bytes than the formulas say;
times are only shown, as in `rules.py`, whose rows stand beside ours.
"""

import argparse
import dataclasses
import functools

import jax
import reference
import rounds
import rules as by_rules
from flax import nnx

from shardwise import layouts, measure, mesh, model, rules


def reference_losses():
    """Of a layer: what the other rows keep; or nothing but its input."""
    policies = {"products kept": reference.KEPT, "input kept": None}
    losses = {name: functools.partial(reference.loss, policy=p) for name, p in policies.items()}
    return losses, reference.loss


def decoder_losses():
    """With remat, a layer keeps its input; without, weights are gathered once and kept."""

    def loss(remat):
        config = dataclasses.replace(by_rules.DECODER, remat=remat)
        graphdef = nnx.split(nnx.eval_shape(lambda: model.Decoder(config, nnx.Rngs(0))))[0]
        return functools.partial(model.loss, graphdef=graphdef)

    return {"remat": loss(True)}, loss(False)


MODELS = {
    "reference": (by_rules.reference_model, reference_losses),
    "decoder": (by_rules.MODELS["decoder"], decoder_losses),
}


def ours(bench, losses):
    """ZeRO-3, gathering layers again; and ZeRO-1, which gathers all at once."""
    again, plain = losses()
    for name, loss in again.items():
        yield variant(bench, f"fsdp, {name}", loss, 3)
    yield variant(bench, "fsdp, zero=1", plain, 1)


def variant(bench, name, loss, zero):
    roles = dict(fsdp="fsdp", stacked=lambda path: path.startswith("blocks/"))
    layout = layouts.Layout(bench.mesh, zero=zero, **roles)
    of_params, of_state = layouts.shardings(layout, bench.params, bench.optimizer)
    params = jax.device_put(bench.params, of_params)
    state = jax.jit(bench.optimizer.init, out_shardings=of_state)(params)
    step = layouts.step(layout, loss, bench.optimizer)
    row = rounds.Variant(name, step, params, state, bench.batch, expected_bytes(bench, zero))
    assert row.sent.ring_bytes == row.limit, f"{name}: {row.sent.ring_bytes}, not {row.limit}"
    held = set(measure.bytes_on_devices(row.state).values())
    count = sum(x.size for x in jax.tree.leaves(bench.params))
    assert held == {12 * count // 8 + 4}, f"{name} holds {held}"
    return row


def expected_bytes(bench, zero):
    """Ring bytes of a step: gathers, once more for layers that are gathered again, and gradients.

    Every array of these models divides by eight. 8 bytes are the total and the count.
    """
    sizes = {path: x.nbytes for path, x in rules.named_leaves(bench.params)}
    layers = {path for path in sizes if path.startswith("blocks/")}
    again = sum(sizes[path] for path in layers) if zero == 3 else 0
    return (2 * sum(sizes.values()) + again + 2 * 8) * 7 / 8


def compare(name, repeats):
    """Print the table of all variants on one model."""
    make, losses = MODELS[name]
    bench = make()
    makers = (
        by_rules.one_device,
        functools.partial(ours, losses=losses),
        by_rules.by_hand,
        by_rules.by_scalax,
    )
    rows = [row for maker in makers for row in maker(bench)]
    variants = [row for row in rows if isinstance(row, rounds.Variant)]
    rounds.check(variants)
    rounds.time_all(variants, repeats)
    count = sum(x.size for x in jax.tree.leaves(bench.params))
    print(f"\n{name}: {count:,} parameters, jax {jax.__version__}, {repeats} rounds")
    print(rounds.table(rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    mesh.simulate(8)
    for name in options.models:
        compare(name, options.repeats)
