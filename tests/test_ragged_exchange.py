"""The ragged exchange: its operands by what JAX documents, on CPU by blocks, for TPUs compiled."""

import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import experts, layouts, marks, measure, mesh, model, topology
from shardwise.experts import ragged_exchange
from shardwise.experts.mixture import gated

needs_libtpu = pytest.mark.skipif(
    not importlib.util.find_spec("libtpu"),
    reason="libtpu, the TPU compiler, is not installed: pip install 'shardwise[tpu]'",
)
SLOW = pytest.mark.slow


def documented(operands, rooms, told):
    """What the documentation of `jax.lax.ragged_all_to_all` says it returns, on every device.

    `told` are the `Slices` of each. Slices stay within their arrays, and none overwrites another.
    """
    n, results = len(operands), [np.array(room) for room in rooms]
    written = [np.zeros(len(room), int) for room in rooms]
    for sender, mine in enumerate(told):
        per = len(mine.send_sizes) // n
        for i, (start, size, to) in enumerate(zip(*mine[:3], strict=True)):
            receiver = i // per
            assert told[receiver].recv_sizes[sender * per + i % per] == size
            assert 0 <= start <= start + size <= len(operands[sender])
            assert 0 <= to <= to + size <= len(results[receiver])
            results[receiver][to : to + size] = operands[sender][start : start + size]
            written[receiver][to : to + size] += 1
    assert max(w.max() for w in written) <= 1
    return results


def routed(draw, n, experts, tokens, k, skew):
    """Sorted choices of n devices, [n, tokens·k], and how many are of each expert."""
    scores = draw.gumbel(size=(n, tokens, experts)) + skew * np.arange(experts)
    chosen = np.sort(np.argsort(-scores, axis=-1)[..., :k].reshape(n, -1), axis=1)
    return chosen, np.stack([np.bincount(row, minlength=experts) for row in chosen])


def slices_of(counts, home):
    run = jax.jit(jax.vmap(ragged_exchange.slices, in_axes=(None, 0, None)), static_argnums=2)
    found = run(jnp.asarray(counts, jnp.int32), jnp.arange(len(counts)), home)
    return [ragged_exchange.Slices(*each) for each in zip(*map(np.asarray, found), strict=True)]


# devices, experts, tokens of each device, k
SIZES = [(4, 12, 6, 4), (8, 16, 9, 2)]
SIZES += [pytest.param(s, marks=SLOW) for s in [(1, 3, 4, 2), (2, 2, 5, 1), (4, 4, 7, 3)]]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_offsets_and_sizes_bring_rows_to_their_experts_and_back(size):
    n, count, tokens, k = size
    held, draw = count // n, np.random.default_rng(sum(size))
    most = ragged_exchange.most_rows(1, tokens, k, held)
    for skew in (0, 0, 0.5, 50):  # the last: the same k experts for every token
        chosen, counts = routed(draw, n, count, tokens, k, skew)
        # A row says whose it is: (expert, device, place).
        rows = np.array([[(e, d, i) for i, e in enumerate(chosen[d])] for d in range(n)])
        room = np.full((n * most, 3), -1)
        arrived = documented(rows, [room] * n, slices_of(counts, False))
        for d in range(n):
            mine = sorted(tuple(row) for row in rows.reshape(-1, 3) if row[0] // held == d)
            np.testing.assert_array_equal(arrived[d], [*mine, *room[len(mine) :]])
        returned = documented(arrived, np.zeros_like(rows), slices_of(counts, True))
        np.testing.assert_array_equal(returned, rows)


def anything(draw, n, per, most):
    """Operands and slices of n devices as JAX allows them: in any order, with gaps between."""
    sizes = draw.integers(0, most // per + 1, (n, n, per)) * draw.integers(0, 2, (n, n, per))

    def offsets(sizes):  # [n, n·per] of arrays of n · most + 3 rows
        found = np.zeros(sizes.shape, int)
        for d, order in enumerate(draw.permuted(np.tile(np.arange(n * per), (n, 1)), axis=1)):
            found[d, order] = np.cumsum(sizes[d, order]) - sizes[d, order] + draw.integers(0, 4)
        return found

    of_receivers = np.swapaxes(sizes, 0, 1).reshape(n, -1)
    at = np.swapaxes(offsets(of_receivers).reshape(n, n, per), 0, 1).reshape(n, -1)
    sizes = sizes.reshape(n, -1)
    told = np.stack([offsets(sizes), sizes, at, of_receivers], axis=1)
    return draw.normal(size=(2, n, n * most + 3, 2)).astype(np.float32), told.astype(np.int32)


@pytest.mark.parametrize(("n", "per"), [(4, 3), pytest.param(8, 1, marks=SLOW)])
def test_blocks_do_what_is_documented(n, per):
    most = 4 * per

    def local(rows, room, told):
        return ragged_exchange.in_blocks(rows[0], room[0], *told[0], "x", most)[None]

    cut = P("x")
    run = jax.jit(jax.shard_map(local, mesh=mesh.make(x=n), in_specs=cut, out_specs=cut))
    for seed in range(5):
        (rows, rooms), told = anything(np.random.default_rng(seed), n, per, most)
        expected = documented(rows, rooms, [ragged_exchange.Slices(*each) for each in told])
        np.testing.assert_array_equal(run(rows, rooms, told), expected)


def layer(meaning, capacity=None):
    """The sum of squares of a mixture's outputs, and its gradients, on devices of an axis "x"."""

    def local(given, chosen):
        def loss(given):
            x, weights, stacked = given
            with marks.bind(experts=meaning):
                n = 2 * jax.lax.axis_size("x")
                return jnp.sum(
                    marks.experts(x, chosen, weights, gated, stacked, n, capacity)[0] ** 2
                )

        value, grads = jax.value_and_grad(loss)(given)
        return value[None], grads

    return local


def shapes(grid, n, rows=2, tokens=64, k=2, embed=256, dtype=jnp.bfloat16):
    """Arguments of `layer`, on a mesh that may be abstract: two experts on each device."""
    sharding = NamedSharding(grid, P("x"))
    make = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    x, weights = make((n * rows, tokens, embed), dtype), make((n * rows, tokens, k), jnp.float32)
    wide, back = make((2 * n, embed, 2 * embed), dtype), make((2 * n, 2 * embed, embed), dtype)
    return (x, weights, [wide, wide, back]), make((n * rows, tokens, k), jnp.int32)


def mapped(grid, meaning, capacity=None):
    run = jax.shard_map(layer(meaning, capacity), mesh=grid, in_specs=P("x"), out_specs=P("x"))
    return jax.jit(run)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_each_platform_gets_what_it_has(platform):
    grid = mesh.make(x=4)
    traced = mapped(grid, experts.ragged("x")).trace(*shapes(grid, 4, tokens=8, embed=4))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    # There and back, forward and backward; blocks travel with the offsets at which they arrive.
    found = [text.count(f"{op}") for op in ("@ragged_all_to_all", '"stablehlo.all_to_all"')]
    assert found == ([0, 8] if platform == "cpu" else [4, 0])
    assert text.count('"stablehlo.all_gather"') == 1


@SLOW
@pytest.mark.parametrize("capacity", [None, 0.75])
def test_a_layout_sends_what_is_predicted_and_the_dispatch(capacity):
    config = small(capacity, 32)
    layout = layouts.Layout(mesh.make(expert=4), expert="expert", dispatch="ragged")
    run, placed, batch = step(config, layout)
    found = measure.by_axis(measure.collectives(run.lower(placed, batch)), layout.mesh)
    forward = experts.bytes_sent(2, 64, 32, 2, 8, 4, capacity, "ragged")
    dispatched = config.layers * (3 * forward - 4 * 8 * 3)  # counts are gathered in forward passes
    balance = 2 * 4 * (config.layers * (2 * config.experts + 1) + 1) * 3 / 4  # and what aux has
    said = layouts.predict(layout, placed, batch, remat=True).sent
    assert found[("expert",)].ring_bytes == said[("expert",)] + dispatched + balance


RAGGED = re.compile(r" ragged-all-to-all(?:-start)?\(")


def exchanges(program):
    return [op for op in measure.collectives(program).ops if op.kind == "all-to-all"]


@needs_libtpu
@SLOW
@pytest.mark.parametrize("chips", ["v5e:2x4", "v5p:2x2x2"])
@pytest.mark.parametrize("capacity", [None, 1.25])
def test_a_layer_on_chips_exchanges_raggedly_four_times(chips, capacity):
    grid = topology.chips(chips).mesh(x=8)
    run = mapped(grid.abstract, experts.ragged("x"), capacity)
    program = topology.compile(grid.lower(run, *shapes(grid.abstract, 8)), grid)
    found = exchanges(program)
    assert len(RAGGED.findall(program.as_text())) == len(found) == 4
    assert {op.notes for op in found} == {("bound",)}
    most = 2 * 64 * 2 if capacity is None else 2 * 2 * 10  # rows · slots of two experts
    # Rows of 256 bfloat16; narrower ones are padded to 256, the two rows of a tile.
    own, worst = 2 * 64 * 2 * 256 * 2, 8 * most * 256 * 2
    assert sorted(op.ring_bytes for op in found) == sorted([own, worst, own, worst])


@needs_libtpu
@SLOW
@pytest.mark.parametrize("chips", ["v5e:2x4", "v5p:2x2x2"])
def test_a_decoder_on_chips_exchanges_raggedly(chips):
    grid = topology.chips(chips).mesh(fsdp=2, expert=4)
    layout = layouts.Layout(grid.abstract, fsdp="fsdp", expert="expert", dispatch="ragged")
    program = topology.compile(grid.lower(*step(small(None, 128), layout)), grid)
    found = exchanges(program)
    # There and back in a scan's body: forward, again, and backward.
    assert len(RAGGED.findall(program.as_text())) == len(found) == 6
    assert {op.trips for op in found} == {2} and {op.group_size for op in found} == {4}


def small(capacity, embed):
    return model.Config(
        vocab=256, embed=embed, layers=2, heads=2, kv_heads=2, head_dim=64, mlp=256, experts=8,
        experts_per_token=2, capacity_factor=capacity, remat=True,
    )  # fmt: skip


def step(config, layout):
    """(loss and gradient of a decoder, what it is called with, in shapes)."""
    graphdef, params = nnx.split(nnx.eval_shape(lambda: model.Decoder(config, nnx.Rngs(0))))
    loss = functools.partial(model.routed_loss, graphdef=graphdef)
    placed = jax.eval_shape(functools.partial(layouts.place, layout), params)
    make = functools.partial(
        jax.ShapeDtypeStruct, sharding=NamedSharding(layout.mesh, P(layout.rows))
    )
    batch = {name: make((8, 64), jnp.int32) for name in ("tokens", "targets")}
    batch["mask"] = make((8, 64), jnp.float32)
    return layouts.value_and_grad(layout, loss, has_aux=True), placed, batch
