import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sampling import sample

from shardwise import checkpoint, data, mesh, model, rules, train

MESHES = {
    "1": {"a": 1},
    "2": {"a": 2},
    "4": {"a": 4},
    "8": {"a": 8},
    "2x4": {"a": 2, "b": 4},
    "4x2": {"a": 4, "b": 2},
    "2x2x2": {"a": 2, "b": 2, "c": 2},
    "replicated": {"a": 8},
}


def shardings(name):
    """Along the axes in order; the last spec puts all axes on one array axis."""
    axes, on = mesh.make(**MESHES[name]), tuple(MESHES[name])
    specs = {"w": P(*on), "v": P(None, on), "b": P(on[-1]), "half": P(on), "count": P(), "key": P()}
    if name == "replicated":
        specs = dict.fromkeys(specs, P())
    return {path: NamedSharding(axes, spec) for path, spec in specs.items()}


def tree():
    draw = np.random.default_rng(0)
    return {
        "w": draw.normal(size=(8, 16, 4)).astype(np.float32),
        "v": draw.integers(0, 2**31, (6, 32)).astype(np.int32),
        "b": draw.normal(size=8).astype(np.float16),
        "half": jnp.asarray(draw.normal(size=(16, 2)), jnp.bfloat16),
        "count": np.int32(3),
        "key": jax.random.key(7),
    }


def abstract(values, placed):
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), values, placed
    )


def bits(x):
    x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return np.asarray(x).tobytes()


def assert_bitwise(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


@pytest.fixture
def root(tmp_path):
    yield str(tmp_path / "run")
    checkpoint.wait()


@pytest.mark.parametrize("source", MESHES)
def test_every_layout_restores_onto_every_other(root, source):
    values = tree()
    checkpoint.save(root, 1, {"params": jax.device_put(values, shardings(source))}, chunk_bytes=256)
    for goal in MESHES:
        wanted = abstract(values, shardings(goal))
        found = checkpoint.restore(root, {"params": wanted})["params"]
        assert_bitwise(found, values)
        for path, x in found.items():
            assert x.sharding.is_equivalent_to(wanted[path].sharding, x.ndim)


def test_each_item_comes_back_alone_and_as_the_target_says(root):
    placed = jax.device_put(np.arange(8.0, dtype=np.float32), shardings("8")["half"])
    keys = jax.random.split(jax.random.key(1, impl="rbg"), 3)
    state = {
        "params": {"w": placed, "rest": [np.arange(3), 5, 0.5, True, jnp.ones(2)]},
        "rng": keys,
        "data": {"next_index": 7, "nested": [1, "a"]},
        "loader": b"\x00\xffposition",
        "opt_state": ((), ()),
    }
    checkpoint.save(root, 4, state)
    found = checkpoint.restore(root, state)
    assert found.keys() == state.keys()
    assert found["params"]["w"].sharding.is_equivalent_to(placed.sharding, 1)
    rest = found["params"]["rest"]
    assert isinstance(rest[0], np.ndarray) and rest[1:4] == [5, 0.5, True]
    assert [type(x) for x in rest[1:4]] == [int, float, bool]
    assert not rest[4].committed and found["params"]["w"].committed
    assert_bitwise(found["rng"], keys)
    assert found["data"] == state["data"] and found["loader"] == state["loader"]
    assert found["opt_state"] == ((), ())
    alone = checkpoint.restore(root, {"rng": keys, "data": None}, step=4)
    assert alone.keys() == {"rng", "data"} and alone["data"] == state["data"]
    shape = {"params": {"w": jax.eval_shape(lambda: jnp.ones(8))}}
    assert not checkpoint.restore(root, shape, partial=True)["params"]["w"].committed


def test_orbax_itself_reads_what_was_saved(root):
    values = tree()
    checkpoint.save(root, 2, {"params": {"blocks": values}, "data": {"next_index": 1}})
    checkpoint.wait(root)
    both = ocp.args.Composite(params=ocp.args.StandardRestore(), data=ocp.args.JsonRestore())
    with ocp.CheckpointManager(root) as manager:
        found = manager.restore(2, args=both)
    assert_bitwise(found["params"]["blocks"], {k: jnp.asarray(v) for k, v in values.items()})
    assert found["data"] == {"next_index": 1}


def test_a_step_that_donates_does_not_reach_what_is_saved(root):
    @functools.partial(jax.jit, donate_argnums=0)
    def step(x):
        return jax.tree.map(lambda y: y + 1, x)

    for n, name in enumerate(["1", "8", "2x4", "replicated"], start=1):
        layout = shardings(name)
        zeros = {"v": jnp.zeros((512, 512)), "half": jnp.zeros((2048, 64))}
        x = step({path: jax.device_put(x, layout[path]) for path, x in zeros.items()})
        written = jax.tree.map(np.array, x)
        host = np.zeros(2**18)
        checkpoint.save(root, n, {"params": x, "host": host}, keep=1)
        host += 1
        for _ in range(5):
            x = step(x)
        found = checkpoint.restore(root, {"params": written, "host": host})
        assert_bitwise(found["params"], written)
        assert not found["host"].any()


CONFIG = model.Config(embed=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp=24)


@pytest.mark.slow
def test_training_goes_on_from_any_layout_to_any_other(root):
    """Losses agree to float32's rounding in sums of another order, and bitwise on one mesh."""
    tx, fsdp = optax.adam(1e-3), rules.FSDPRule("a", min_size=1)
    graphdef, params, opt_state = train.init(CONFIG, mesh.make(a=8), fsdp, tx)
    step = train.step(functools.partial(model.loss, graphdef=graphdef), tx)

    def go(params, opt_state, batches, n=3):
        losses = []
        for batch in itertools.islice(batches, n):
            params, opt_state, mean = step(params, opt_state, batch)
            losses.append(float(mean))
        return params, opt_state, losses

    batches = data.batches(8, 16)
    params, opt_state, _ = go(params, opt_state, batches)
    state = {"params": params, "opt_state": opt_state, "data": batches.get_state()}
    checkpoint.save(root, 3, state)
    *_, expected = go(params, opt_state, batches)
    # Saving from other layouts gives the same bits (above), so these targets stand for all pairs.
    meshes = [
        {"a": 8},
        *sample([{"a": 1}, {"a": 2}, {"a": 4}, {"a": 2, "b": 4}, {"a": 4, "b": 2}], 1),
    ]
    targets = [(axes, fsdp) for axes in [*meshes, {"a": 2, "b": 2, "c": 2}]]
    for axes, rule in [*targets, ({"a": 8}, P())]:
        on = mesh.make(**axes)
        target = {
            "params": abstract(params, rules.shardings(rule, params, on)),
            "opt_state": abstract(opt_state, rules.shardings(rule, opt_state, on)),
        }
        found = checkpoint.restore(root, target | {"data": None})
        again = data.batches(8, 16)
        again.set_state(found["data"])
        *_, losses = go(found["params"], found["opt_state"], again)
        same_program = axes == {"a": 8} and rule is fsdp
        np.testing.assert_allclose(losses, expected, rtol=0 if same_program else 1e-4)


def test_parameters_go_into_a_model_with_a_new_head(root):
    saved = {"body": {"w": jnp.arange(6.0)}, "head": {"w": jnp.ones((6, 2))}}
    new = {"body": {"w": jnp.zeros(6)}, "head": {"w": jnp.zeros((6, 5))}}
    checkpoint.save(root, 1, {"params": saved, "rng": jax.random.key(0)})
    with pytest.raises(ValueError, match=r"head/w is float32\[6, 2\] .* float32\[6, 5\] in"):
        checkpoint.restore(root, {"params": new}, partial=True)
    body = {"body": new["body"]}
    with pytest.raises(ValueError, match=r"params: head/w float32\[6, 2\] is only in the check"):
        checkpoint.restore(root, {"params": body})
    found = checkpoint.restore(root, {"params": body}, partial=True)["params"]
    assert_bitwise(new | found, {"body": saved["body"], "head": new["head"]})
