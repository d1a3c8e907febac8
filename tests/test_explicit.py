"""On Explicit axes, as jax.make_mesh makes them, layouts do what they do on Auto ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sampling import IN_FULL
from test_foreign import with_gradients
from test_layouts import KEY, OPTIMIZERS, batches, drawn, parts

from shardwise import checkpoint, fsdp, layouts, mesh, objective, rules

SEEN = ["hybrid", "fsdp, tensor by compiler"]
STAGED = "stage, fsdp by hand"
# Of these the program alone: what meshes are told within, of each kind.
LOWERED = ["context by compiler", "expert by compiler", "stage, fsdp"]
LOWERED += ["stage, fsdp, context by hand", "fsdp, context, tensor", "fsdp, expert, context"]
if IN_FULL:
    LOWERED = [name for name in layouts.LAYOUTS if name not in (*SEEN, STAGED)]
TX = OPTIMIZERS["adamw"]
LAYERS = 2


def explicit(auto):
    """The same devices and axes, as JAX makes them by default."""
    return Mesh(auto.devices, auto.axis_names, axis_types=(AxisType.Explicit,) * auto.devices.ndim)


def twins(name):
    """A layout, and the same on Explicit axes."""
    layout = layouts.LAYOUTS[name](max(4, 2 ** len(name.split(", "))))
    return layout, dataclasses.replace(layout, mesh=explicit(layout.mesh))


def born(name, each, tx):
    """(loss, parameters, optimizer's state, whether the loss has auxiliary outputs) of a layout."""
    mixed, stages = "rows" if "expert" in name else False, each.size("stage")
    layers = max(LAYERS, stages)
    loss, _ = parts(stages, layers, mixed, remat=False)
    params, state = drawn(each, layers, mixed, tx)
    for x, to in zip(*map(jax.tree.leaves, (params, layouts.shardings(each, params))), strict=True):
        assert x.sharding.mesh == to.mesh == each.mesh
        assert x.sharding.is_equivalent_to(to, x.ndim)
    return loss, params, state, bool(mixed)


def equal(ours, theirs, **tolerance):
    for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SEEN, STAGED])
def test_a_layout_does_there_what_it_does_on_auto_axes(name, tmp_path):
    auto, layout = twins(name)
    batch, found, tx = batches()[0], [], with_gradients(TX)
    for each in auto, layout:
        loss, params, state, has_aux = born(name, each, tx)
        step = layouts.step(each, loss, tx, has_aux, check=False)
        params, state, *first = step(params, state, batch)
        grads = jax.tree.map(np.asarray, state[0])
        for x, g in zip(*map(jax.tree.leaves, (params, state[0])), strict=True):
            assert g.sharding == x.sharding
        params, state, *second = step(params, state, batch)
        found.append((first, grads, second, params))
    equal(found[1], found[0], rtol=2e-5, atol=2e-5)
    checkpoint.save(tmp_path, 1, {"params": found[1][3]})
    back = checkpoint.restore(tmp_path, {"params": found[0][3]})["params"]
    equal(back, found[1][3], rtol=0)
    again = checkpoint.restore(tmp_path, {"params": found[1][3]})["params"]
    assert jax.tree.leaves(again)[0].sharding.mesh == layout.mesh


@pytest.mark.slow
@pytest.mark.parametrize("name", LOWERED)
def test_a_layout_s_program_there_is_that_on_auto_axes(name):
    """Letter for letter: types are put on and taken off around it."""
    programs = []
    for each in twins(name):
        mixed, stages = "rows" if each.expert else False, each.size("stage")
        loss, create = parts(stages, max(LAYERS, stages), mixed, remat=False)
        shapes = jax.eval_shape(create, KEY)
        given = jax.tree.map(
            lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to),
            (shapes, jax.eval_shape(TX.init, shapes)),
            layouts.shardings(each, shapes, TX),
        )
        step = layouts.step(each, loss, TX, bool(mixed), check=False)
        programs.append(step.lower(*given, batches()[0]).as_text())
    assert programs[0] == programs[1]


def network(params, batch):
    x = jnp.tanh(batch["x"] @ params["w"] + params["b"][None]) @ params["v"]
    return objective.Mean(jnp.sum((x - batch["y"]) ** 2), jnp.float32(len(x)))


def create(key):
    one, other = jax.random.split(key)
    shapes = dict(w=(24, 40), v=(40, 13))
    drawn = zip(shapes.items(), (one, other), strict=True)
    return {"b": jnp.zeros(40)} | {n: jax.random.normal(k, s) for (n, s), k in drawn}


ROWS = {
    "x": np.random.default_rng(1).normal(size=(16, 24)).astype(np.float32),
    "y": np.random.default_rng(2).normal(size=(16, 13)).astype(np.float32),
}


@pytest.mark.parametrize("by", ["hand", "compiler"])
@pytest.mark.parametrize("around", [False, True])
def test_the_callers_own_jit_may_be_around(by, around):
    """With its mesh set, or without; plain optax works on the typed arrays."""
    grid = explicit(mesh.make(fsdp=4, data=2))
    layout, tx = layouts.Layout(grid, fsdp="fsdp", data="data", by=by), OPTIMIZERS["adamw"]
    run = layouts.value_and_grad(layout, network, check=False)

    @jax.jit
    def own(params, state, batch):
        mean, grads = run(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, mean, grads

    def trained():
        params, state = layouts.init(layout, create, tx, KEY)
        batch = jax.device_put(ROWS, NamedSharding(grid, P(("data", "fsdp"))))
        if around:  # JAX asks for the mesh where no array in the jit tells it
            born = jax.jit(lambda key: layouts.place(layout, create(key)))(KEY)
            assert born["w"].sharding.is_equivalent_to(params["w"].sharding, 2)
            assert born["w"].sharding.mesh == grid
            equal(born, params, rtol=1e-6)
        made = jax.jit(lambda key: layouts.init(layout, create, tx, key))(KEY)
        for one, other in zip(*map(jax.tree.leaves, (made, (params, state))), strict=True):
            assert one.sharding.mesh == grid
            assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
        equal(made[0], params, rtol=1e-6)
        eager = layouts.value_and_grad(layout, network)(params, batch)
        return eager, own(params, state, batch)

    if around:
        with jax.set_mesh(grid):
            eager, (params, _, mean, grads) = trained()
    else:
        eager, (params, _, mean, grads) = trained()
    expected = jax.jit(objective.value_and_grad(network))(jax.jit(create)(KEY), ROWS)
    equal((mean, grads), expected, rtol=2e-4, atol=1e-4)
    equal(eager, expected, rtol=2e-4, atol=1e-4)
    for x in jax.tree.leaves((params, grads)):
        assert x.sharding.mesh == grid


def test_a_step_donates_and_lowers():
    grid = explicit(mesh.make(fsdp=8))
    layout = layouts.Layout(grid, fsdp="fsdp")
    params, state = layouts.init(layout, create, TX, KEY)
    step = layouts.step(layout, network, TX)
    assert "all_gather" in step.lower(params, state, ROWS).as_text()
    after, state, _ = step(params, state, ROWS)
    assert params["w"].is_deleted() and not after["w"].is_deleted()
    assert layouts.whole(layout, after)["w"].sharding.is_fully_replicated
    with pytest.raises(ValueError, match=r"layouts.step: b of shape \(40,\) is no array of JAX"):
        step(jax.tree.map(np.asarray, after), state, ROWS)


def test_rules_and_the_mechanism_take_them_too():
    grid, rule = explicit(mesh.make(fsdp=8)), fsdp.rule()
    params = rules.place(create(KEY), rule, grid)
    run = rules.jit(
        objective.value_and_grad(network), grid, (rule, P("fsdp")), out_rules=(P(), rule)
    )
    by_rules = run(params, jax.device_put(ROWS, NamedSharding(grid, P("fsdp"))))
    by_hand = fsdp.value_and_grad(network, grid)(params, ROWS)
    equal(by_rules, by_hand, rtol=2e-4, atol=1e-4)
    for x in jax.tree.leaves((by_rules[1], by_hand[1])):
        assert x.sharding.mesh == grid


def test_data_does_not_move():
    grid = mesh.make(fsdp=8)
    x = jax.device_put(jnp.arange(16.0), NamedSharding(grid, P("fsdp")))
    y = mesh.typed({"x": x, "n": 3}, explicit(grid))["x"]
    assert y.sharding.mesh == explicit(grid) and mesh.typed(y, grid).sharding == x.sharding
    for a, b in zip(x.addressable_shards, y.addressable_shards, strict=True):
        assert a.data.unsafe_buffer_pointer() == b.data.unsafe_buffer_pointer()
    other = jax.device_put(jnp.ones(2), jax.devices()[3])
    assert mesh.typed(other, explicit(grid)) is other
