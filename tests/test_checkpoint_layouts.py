"""What `fsdp`, `rules` and stages hold is stored as one device would hold it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import checkpoint, fsdp, layouts, mesh, rules


def params():
    """No axis but "even"'s divides by 8; "blocks" is a stack of two layers, one for each stage."""
    draw = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(draw.normal(size=shape), jnp.float32)

    return {
        "blocks": {"w": normal(2, 10, 10), "b": normal(2, 10)},
        "embed": normal(13, 10),
        "half": normal(5).astype(jnp.bfloat16),
        "even": normal(8, 3),
        "scale": jnp.float32(1.5),
    }


def sharded(n):
    rule = fsdp.rule(stacked=lambda path: "blocks" in path)
    return lambda tree: rules.place(tree, rule, mesh.make(fsdp=n))


def by_rule(tree):
    grid = mesh.make(a=2, b=4)
    return rules.place(tree, rules.FSDPRule("a", min_size=1, uneven="replicate"), grid)


def in_stages(tree):
    grid = mesh.make(stage=2, fsdp=2)
    return layouts.place(layouts.Layout(grid, stage="stage", fsdp="fsdp"), tree)


FORMS = {
    "one device": lambda tree: tree,
    "fsdp on 8": sharded(8),
    "fsdp on 4": sharded(4),
    "fsdp on 3": sharded(3),
    "rules": by_rule,
    "stages": in_stages,
}


def assert_bitwise(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture
def root(tmp_path):
    yield str(tmp_path / "run")
    checkpoint.wait()


@pytest.fixture(scope="module")
def forms():
    return {name: form(params()) for name, form in FORMS.items()}


@pytest.mark.parametrize(
    "source",
    [pytest.param(f, marks=[pytest.mark.slow] if i % 3 else []) for i, f in enumerate(FORMS)],
)
def test_every_form_restores_as_every_other(root, forms, source):
    """Bitwise; targets are zeros, so that what comes back was read."""
    checkpoint.save(root, 1, {"params": forms[source]})
    for name, form in forms.items():
        target = jax.tree.map(lambda x: jax.device_put(np.zeros_like(x), x.sharding), form)
        found = checkpoint.restore(root, {"params": target})["params"]
        assert_bitwise(found, params())
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(target), strict=True):
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim), name


def test_an_optimizers_state_under_fsdp_is_stored_as_on_one_device(root):
    tx, tree = optax.adam(1e-2), {"w": jnp.arange(48.0).reshape(16, 3)}
    state = tx.update(tree, tx.init(tree), tree)[1]
    layout = layouts.Layout(mesh.make(fsdp=8), fsdp="fsdp")
    _, zeros = layouts.init(layout, lambda key: tree, tx, jax.random.key(0))
    checkpoint.save(root, 1, {"opt_state": state})
    held = checkpoint.restore(root, {"opt_state": zeros})["opt_state"]
    assert held[0].mu["w"].sharding == zeros[0].mu["w"].sharding
    checkpoint.save(root, 2, {"opt_state": held})
    assert_bitwise(checkpoint.restore(root, {"opt_state": tx.init(tree)})["opt_state"], state)


def test_orbax_reads_what_a_layout_wrote_and_is_read_into_it(root, forms):
    held, tree = forms["fsdp on 8"], params()
    checkpoint.save(root, 1, {"params": held})
    checkpoint.wait()
    onto = NamedSharding(mesh.make(a=1), P())
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=onto), tree)
    with ocp.CheckpointManager(root) as manager:
        found = manager.restore(1, args=ocp.args.Composite(params=ocp.args.StandardRestore(target)))
        assert_bitwise(found["params"], tree)
        manager.save(2, args=ocp.args.Composite(params=ocp.args.StandardSave(tree)))
        manager.wait_until_finished()
    assert_bitwise(checkpoint.restore(root, {"params": held}, 2)["params"], tree)


def test_another_shape_is_refused_by_its_true_one(root, forms):
    checkpoint.save(root, 1, {"params": forms["fsdp on 8"]})
    wider = sharded(8)(params() | {"embed": jnp.ones((14, 10))})
    with pytest.raises(ValueError, match=r"embed is float32\[13, 10\] .* float32\[14, 10\] in"):
        checkpoint.restore(root, {"params": wider})
