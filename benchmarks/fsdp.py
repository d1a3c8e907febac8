"""FSDP by shard_map beside what a user would pick instead: jit with shardings, and scalax.

Run from the project's root: `pip install -e . -r benchmarks/requirements.txt`, then
`python benchmarks/fsdp.py --repeats 7`. Takes a few minutes.

Full training steps (loss, gradients, AdamW, donation) on eight simulated CPU devices in one
process, all on the reference model. Ends with an error if ours holds or sends another number of
bytes than the formulas say; times are only shown, as in `rules.py`, whose rows stand beside ours.
"""

import argparse
import functools

import jax
import optax
import reference
import rounds
import rules as by_rules

from shardwise import fsdp, measure, mesh

# Of a layer: what the benchmark's other rows keep; or nothing but its input.
POLICIES = {"products kept": reference.KEPT, "input kept": None}


def ours(bench):
    """Stage 3 with either policy, and stage 1, which gathers all at once."""
    for kept, policy in POLICIES.items():
        yield variant(bench, f"fsdp, {kept}", functools.partial(reference.loss, policy=policy), 3)
    yield variant(bench, "fsdp, stage 1", reference.loss, 1)


def variant(bench, name, loss, stage):
    mean_and_grad = fsdp.value_and_grad(loss, bench.mesh, stage=stage)

    def step(params, opt_state, batch):
        mean, grads = mean_and_grad(params, batch)
        updates, opt_state = fsdp.update(bench.optimizer, grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, mean

    params = fsdp.shard(bench.params, bench.mesh, stacked=is_stacked)
    state = fsdp.init(bench.optimizer, params)
    step = jax.jit(step, donate_argnums=(0, 1))
    row = rounds.Variant(name, step, params, state, bench.batch, expected_bytes(params, stage))
    assert row.sent.ring_bytes == row.limit, f"{name}: {row.sent.ring_bytes}, not {row.limit}"
    held = set(measure.bytes_on_devices(row.state).values())
    assert held == {12 * reference.PARAMETERS // 8 + 4}, f"{name} holds {held}"
    return row


def is_stacked(path):
    return path.startswith("blocks/")


def expected_bytes(params, stage):
    """Ring bytes of a step: gathers, once more for layers that are gathered again, and gradients.

    Every array of the reference model divides by eight. 8 bytes are the total and the count. The
    bias that a layer adds last is not gathered again: no gradient depends on its value.
    """
    whole = sum(x.nbytes for x in jax.tree.leaves(params.tree))
    blocks = params.tree["blocks"]
    again = sum(x.nbytes for x in jax.tree.leaves(blocks)) - blocks["down"]["bias"].nbytes
    again = again if stage == 3 else 0
    return (2 * whole + again + 2 * 8) * 7 / 8


def compare(repeats):
    """Print the table of all variants."""
    bench = by_rules.reference_model()
    makers = (by_rules.one_device, ours, by_rules.by_hand, by_rules.by_scalax)
    rows = [row for maker in makers for row in maker(bench)]
    variants = [row for row in rows if isinstance(row, rounds.Variant)]
    rounds.check(variants)
    rounds.time_all(variants, repeats)
    print(f"{reference.PARAMETERS:,} parameters, jax {jax.__version__}, {repeats} rounds")
    print(rounds.table(rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    mesh.simulate(8)
    compare(options.repeats)
