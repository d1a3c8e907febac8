import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import data, marks, measure, mesh, model, objective, rules

mesh.simulate(8)
MESH = mesh.make(fsdp=4, model=2)
FSDP = rules.FSDPRule("fsdp", min_size=1)
CONFIG = model.Config(embed=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48)
TENSOR = rules.LogicalRules(
    {"vocab": "model", "embed": None, "heads": "model", "kv_heads": "model"}
    | {"head_dim": None, "mlp": "model"}
)
ROWS = {
    name: P("fsdp") for name in ("embedding_output", "attention_output", "mlp_output", "logits")
}
LAYOUTS = {
    "replicated": (P(), ROWS),
    "fsdp": (FSDP, ROWS),
    "fsdp, first, nothing constrained": (rules.FSDPRule("fsdp", 1, pick="first"), None),
    "tensor": (TENSOR, ROWS | {"logits": P("fsdp", None, "model")}),
    "fsdp and tensor": (rules.FSDPRule("fsdp", 1, over=TENSOR), ROWS),
}


@functools.cache
def reference():
    """Loss and gradient of one batch on one device."""
    graphdef, params = nnx.split(nnx.jit(lambda: model.Decoder(CONFIG, nnx.Rngs(0)))())
    function = objective.value_and_grad(functools.partial(model.loss, graphdef=graphdef))
    batch = next(data.batches(8, 16))
    return function, params, batch, jax.jit(function)(params, batch)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_gradient_of_one_device(layout):
    rule, names = LAYOUTS[layout]
    function, params, batch, (mean, grads) = reference()
    jitted = rules.jit(function, MESH, (rule, P("fsdp")), (P(), rule), names=names)
    placed = rules.place(params, rule, MESH)
    got = jitted(placed, rules.place(batch, P("fsdp"), MESH))
    np.testing.assert_allclose(got[0], mean, rtol=1e-5)
    wanted = jax.tree.leaves(rules.shardings(rule, params, MESH))
    for a, b, s in zip(jax.tree.leaves(got[1]), jax.tree.leaves(grads), wanted, strict=True):
        assert a.sharding.is_equivalent_to(s, a.ndim)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


def test_the_function_runs_once_for_each_kind_of_call():
    runs = []

    def scaled(x, y, power=1, *, shift=0.0):
        runs.append(jnp.shape(x))
        return (x @ y) ** power + shift

    jitted = rules.jit(scaled, MESH, (P("fsdp"), P(None, "model"), None, None), P("fsdp", "model"))
    draw = np.random.default_rng(0)
    for rows, power in [(8, 1), (16, 1), (8, 2), (8, 1)]:
        x, y = (draw.normal(size=s).astype(np.float32) for s in [(rows, 4), (4, 6)])
        for out in [
            jitted(x, y, power, shift=1.0),
            jitted(x, y=y, power=power, shift=1.0),
            jitted(y=y, shift=1.0, x=x, power=power),
            jitted.lower(x, y, power, shift=1.0).compile()(x, y, power, 1.0),
        ]:
            np.testing.assert_allclose(out, (x @ y) ** power + 1.0, rtol=1e-5)
            assert out.sharding.spec == P("fsdp", "model")
    assert runs == [(8, 4), (16, 4)]
    jitted(x.astype(np.float16), y, power, shift=1.0)
    assert len(runs) == 3


def test_rules_are_resolved_again_for_new_shapes_and_structures():
    jitted = rules.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree), MESH, FSDP, FSDP)
    for tree in [
        {"w": np.ones((4, 6))},
        {"w": np.ones((6, 8))},
        [np.ones((4, 1)), np.ones((1, 8))],
    ]:
        out = jitted(tree)
        for x, s in zip(
            jax.tree.leaves(out), jax.tree.leaves(rules.shardings(FSDP, tree, MESH)), strict=True
        ):
            assert x.sharding.is_equivalent_to(s, 2)
            assert not x.sharding.is_fully_replicated


def test_donation_aliases_as_with_jax_jit():
    def step(params, grads):
        return jax.tree.map(lambda p, g: p - g, params, grads)

    params = {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}
    placed = rules.place(params, FSDP, MESH)
    ours = rules.jit(step, MESH, (FSDP, FSDP), FSDP, donate_argnums=0)
    shaped = rules.shardings(FSDP, params, MESH)
    theirs = jax.jit(step, in_shardings=(shaped, shaped), out_shardings=shaped, donate_argnums=(0,))
    one, two = (f.lower(placed, placed).compile() for f in (ours, theirs))
    assert measure.bytes_per_device(one) == measure.bytes_per_device(two)
    assert measure.bytes_per_device(one).aliased == 72 * 4 // 4
    grads = rules.place(params, FSDP, MESH)
    ours(grads=grads, params=placed)
    assert placed["w"].is_deleted() and not grads["w"].is_deleted()
    placed = rules.place(params, FSDP, MESH)
    rules.jit(step, MESH, (FSDP, FSDP), FSDP, donate_argnums=-1)(placed, grads)  # from the end
    assert grads["w"].is_deleted() and not placed["w"].is_deleted()


def test_names_bind_marks_for_this_function_only():
    def f(x):
        y = marks.constrain(x * 2, "hidden")
        return marks.constrain(y + 1, "unbound")

    x = np.ones((8, 4), np.float32)
    jitted = rules.jit(f, MESH, P(), names={"hidden": P("fsdp", "model")})
    assert jitted(x).sharding.spec == P("fsdp", "model")
    assert jax.jit(f)(x).sharding.is_fully_replicated
    with pytest.raises(ValueError, match=r"names has 'hiden', which f never marks; it marks \['h"):
        rules.jit(f, MESH, names={"hiden": P()})(x)
    with pytest.raises(ValueError, match=r"hidden has shape \(6, 4\), and axis 0 of 6 does not"):
        rules.jit(f, MESH, names={"hidden": P("fsdp")})(x[:6])
    by_rule = rules.jit(f, MESH, names={"hidden": FSDP})
    assert by_rule(x).sharding.is_equivalent_to(NamedSharding(MESH, P("fsdp")), 2)


def _pinned(x, _):
    return marks.constrain(x * 2, "hidden"), None


def _constrained(x, _):
    return rules.constrain_tree(x * 2, P("fsdp", "model")), None


def test_what_jax_keeps_of_a_trace_has_the_names_and_the_mesh_of_now():
    """A scanned body, and a jitted block, that stand at a module's top level."""
    x = np.ones((8, 4), np.float32)
    block = jax.jit(lambda x: _pinned(x, None)[0])
    scanned = lambda x: jax.lax.scan(_pinned, x, None, length=2)[0]  # noqa: E731
    for f in block, scanned, lambda x: block(x) + 1, jax.jit(scanned):
        for spec in P("fsdp", "model"), P("model", "fsdp"):
            pinned = rules.jit(f, MESH, P(), names={"hidden": spec})
            assert pinned(x).sharding.is_equivalent_to(NamedSharding(MESH, spec), 2)
            assert rules.jit(f, MESH, P())(x).sharding.is_fully_replicated
            assert f(x).sharding.num_devices == 1

    other = mesh.make(model=4, fsdp=2)
    for m in MESH, other:
        out = rules.jit(lambda x: jax.lax.scan(_constrained, x, None, length=2)[0], m)(x)
        assert out.sharding.is_equivalent_to(NamedSharding(m, P("fsdp", "model")), 2)


def test_what_hides_its_marks_is_named():
    def f(x):
        return marks.constrain(x * 2, "hidden")

    traced = jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(f)(jnp.ones(8)))
    with pytest.raises(ValueError, match=r"which .* never marks; .*as a jaxpr or an exported"):
        rules.jit(lambda x: traced(x)[0], MESH, names={"hidden": P()})(jnp.ones(8))


def test_constraints_move_what_lies_elsewhere_and_in_rules_refuse_it():
    tree = {"w": rules.place(jnp.ones((8, 4)), P("model"), MESH), "n": 3}
    wants = ({"w": FSDP, "n": None},)
    refuse = rules.jit(lambda tree: tree["w"] * tree["n"], MESH, wants)
    with pytest.raises(ValueError, match=r"argument 0/w lies as .*model.*expects.*fsdp.*place it"):
        refuse(tree)

    def inside(tree):
        (tree,) = rules.constrain_tree((tree,), wants)
        return tree["w"] * tree["n"]

    assert rules.jit(inside, MESH)(tree).sharding.spec == P("fsdp")
    with pytest.raises(ValueError, match="no mesh here; call it inside a function"):
        jax.jit(inside)(tree)


def test_arguments_may_hold_none():
    tree = {"a": None, "w": rules.place(jnp.ones((8, 4)), P("model"), MESH)}
    add = lambda tree, y: tree["w"] + (0 if y is None else y)  # noqa: E731
    wanted = NamedSharding(MESH, P("fsdp"))
    for rule, y in (P("fsdp"), None), (P("fsdp"), 1.0), (({"a": None, "w": P("fsdp")}, None), 1.0):
        move = rules.jit(lambda *given, rule=rule: add(*rules.constrain_tree(given, rule)), MESH)
        assert move(tree, y).sharding.is_equivalent_to(wanted, 2)
    refuse = rules.jit(add, MESH, (P("fsdp"), None))
    with pytest.raises(ValueError, match=r"argument 0/w lies as .*model.*expects.*fsdp.*place it"):
        refuse(tree, None)


def test_the_mesh_may_be_set_around():
    add = rules.jit(lambda x: rules.constrain_tree(x + 1, P("fsdp")), MESH, P("fsdp"))
    with jax.set_mesh(MESH):
        assert add(np.ones((8, 4))).sharding.is_equivalent_to(NamedSharding(MESH, P("fsdp")), 2)


def test_mistakes_in_the_call_are_named():
    def f(x, y):
        return x + y

    with pytest.raises(ValueError, match="in_rules has 1 entries, and f takes 2 arguments"):
        rules.jit(f, MESH, (P(),))(1.0, 2.0)
    with pytest.raises(TypeError, match="'fsdp' is no rule"):
        rules.jit(f, MESH, ("fsdp", P()))(1.0, 2.0)
    with pytest.raises(ValueError, match=r"names has 'typo', which functools.partial"):
        rules.jit(functools.partial(f, 1.0), MESH, names={"typo": P()})(1.0)
    with pytest.raises(ValueError, match=r"At 0: .* has shape \(6,\).*6 does not divide over"):
        rules.jit(f, MESH, P("fsdp"))(jnp.ones(6), jnp.ones(6))


def test_it_differentiates_nests_and_keeps_its_name():
    @functools.partial(rules.jit, mesh=MESH, in_rules=P("fsdp"))
    def square(x):
        """Squares."""
        return jnp.sum(x**2)

    x = np.arange(8.0, dtype=np.float32)
    np.testing.assert_allclose(jax.grad(square)(x), 2 * x)
    np.testing.assert_allclose(jax.jit(lambda x: square(x) + 1)(x), (x**2).sum() + 1)
    assert (square.__name__, square.__doc__) == ("square", "Squares.")
