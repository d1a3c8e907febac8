import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from shardwise import layouts, mesh, rules, tree

mesh.simulate(8)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    value: jax.Array
    other: dict


@dataclasses.dataclass(frozen=True)
class OwnKey:
    """A key of a library's own, which JAX does not know."""

    name: str

    def __str__(self):
        return f"<{self.name}>"


@jax.tree_util.register_pytree_with_keys_class
class Own:
    def __init__(self, x):
        self.x = x

    def tree_flatten_with_keys(self):
        return ((OwnKey("x"), self.x),), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_a_library_s_own_keys_are_told_by_their_names():
    assert [path for path, _ in tree.leaves({"a": Own(jnp.ones(2))})] == ["a/x"]


class Boxed(linen.Module):
    @linen.compact
    def __call__(self, x):
        start = linen.with_partitioning(linen.initializers.ones, ("embed", "mlp"))
        return linen.Dense(3, kernel_init=start)(x)


class Layer(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))
        self.many = nnx.Param({"a": jnp.ones(3), "b": [jnp.ones(4)]})


def test_paths_of_every_kind_of_tree():
    cases = [
        (jnp.ones(2), [""]),
        ({"a/b": 1, "a.b": 2, "a": {"b": 3}}, ["a/b", "a.b", "a/b"]),
        ([{"w": 1}, (2, None, 3)], ["0/w", "1/0", "1/2"]),
        (Pair(jnp.ones(1), {"value": 2, "n": [3]}), ["value", "other/n/0", "other/value"]),
        (nnx.state(Layer()), ["many/a", "many/b/0", "w"]),
        (
            jax.eval_shape(Boxed().init, jax.random.key(0), jnp.ones((1, 2))),
            ["params/Dense_0/bias", "params/Dense_0/kernel"],
        ),
        (optax.adam(1.0).init({"w": jnp.ones(2)}), ["0/count", "0/mu/w", "0/nu/w"]),
    ]
    for given_tree, paths in cases:
        expected, found = jax.tree.leaves(given_tree), tree.leaves(given_tree)
        assert sorted(path for path, _ in found) == sorted(paths)
        assert all(a is b for (_, a), b in zip(found, expected, strict=True))


# Which parameter owns an array: told by marking each parameter's arrays with its number.

NESTED = {"w": (3, 4), "mu": {"w": (3, 4), "nu": {"w": (5,)}}, "nu": {"w": (3, 4)}}
SHAPES = {
    "nested as Adam's own fields": NESTED,
    "a tuple, as long as a chain": ((3, 4), (3, 4)),
    "a list": [(6,), (6, 5)],
    "a bare array": (4, 3),
    "scalars and empty arrays": {"a": (), "b": (0, 3), "c": (1,)},
}
TRANSFORMATIONS = {
    "adam": optax.adam(1e-2),
    "a chain": optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.9), optax.scale(1.0)),
    "momentum alone": optax.trace(0.9),
    "wrapped": optax.MultiSteps(optax.apply_if_finite(optax.adam(1e-2), 2), 3),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "parts": optax.multi_transform(
        {"a": optax.adam(1e-2), "b": optax.trace(0.5)},
        lambda params: jax.tree.unflatten(
            jax.tree.structure(params),
            ["ab"[i % 2] for i in range(len(jax.tree.leaves(params)))],
        ),
    ),
}


def is_shape(x):
    return isinstance(x, tuple) and all(isinstance(n, int) for n in x)


def arrays(shapes):
    """Each parameter is full of its own number."""
    flat, structure = jax.tree.flatten(shapes, is_leaf=is_shape)
    return jax.tree.unflatten(structure, [jnp.full(shape, i + 1.0) for i, shape in enumerate(flat)])


def check_owners(name, shapes):
    """Optax, which has the transformation, puts the parameters' own numbers into its state."""
    tx, params = TRANSFORMATIONS[name], arrays(shapes)
    state, leaves = tx.init(params), tree.leaves(params)
    known = state if name == "parts" else optax.tree_map_params(tx, lambda _, p: p, state, params)
    for (path, x), owner in zip(tree.leaves(known), tree.owners(state, params), strict=True):
        if jnp.size(x) > 1:
            assert owner.path == leaves[owner.index][0], path
            assert owner.shape == x.shape and owner.axes == tuple(range(x.ndim))
            assert not owner.path or path.endswith("/" + owner.path)
        if known is not state and jnp.ndim(x):
            np.testing.assert_array_equal(x, leaves[owner.index][1])


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_every_array_of_a_state_has_its_owner(name, shapes):
    check_owners(name, shapes)


def owned(state, params):
    """{path: (path of the parameter, axes)} of the arrays with more than one element."""
    found = zip(tree.leaves(state), tree.owners(state, params), strict=True)
    return {path: owner and (owner.path, owner.axes) for (path, x), owner in found if x.size > 1}


def test_arrays_of_other_shapes_have_the_axes_that_they_kept():
    shapes = {"w": (2, 5, 7), "square": (6, 6), "b": (4,), "scalar": ()}
    params = {k: jnp.ones(shape) for k, shape in shapes.items()}
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    assert owned(factored.init(params), params) == {
        "v/b": ("b", (0,)),
        "v_col/square": ("square", (1,)),
        "v_row/square": ("square", (0,)),
        "v_col/w": ("w", (0, 2)),
        "v_row/w": ("w", (0, 1)),
    }
    history = owned(optax.scale_by_lbfgs(3).init(params), params)
    assert history["diff_params_memory/w"] == ("w", (None, 0, 1, 2))
    assert history["diff_updates_memory/b"] == ("b", (None, 0))
    assert history["diff_params_memory/scalar"] == ("scalar", (None,))
    assert history["weights_memory"] is None
    covers = owned(
        optax.scale_by_sm3().init([jnp.ones((2, 5)), jnp.ones(5)]), [*map(jnp.ones, ((2, 5), 5))]
    )
    assert covers == {
        "mu/0/0": ("0", (0,)),
        "mu/0/1": ("0", (1,)),
        "mu/1/0": ("1", (0,)),
        "nu/0": ("0", (0, 1)),
        "nu/1": ("1", (0,)),
    }


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((7,), (2,)),
        ((5,), (1,)),
        ((7, 5), (2, 3)),
        ((5, 5), (1, 3)),
        ((5, 2), None),
        ((3,), None),
        ((1, 5, 1, 5), (None, 1, None, 3)),
        ((2, 1, 7, 5), (0, None, 2, 3)),
        ((2, 2, 7, 5), None),
    ],
)
def test_an_array_without_some_axes_or_with_size_1_there_has_the_first_of_its_sizes(shape, axes):
    params = {"w": jnp.ones((2, 5, 7, 5))}
    assert owned({"w": jnp.ones(shape)}, params) == {"w": ("w", axes)}


def test_what_lies_beside_the_parameters_has_no_owner():
    params = {"a": jnp.ones((3, 3)), "count": jnp.ones(3)}
    state = optax.chain(optax.add_noise(1.0, 0.5, 3), optax.adam(1e-2)).init(params)
    found = owned(state, params)
    assert found == {
        f"1/0/{moment}/{path}": (path, tuple(range(x.ndim)))
        for moment in ("mu", "nu")
        for path, x in tree.leaves(params)
    }
    muon = optax.contrib.muon(1e-2, ns_coeffs=tuple((3.4, -4.7, 2.0) for _ in range(3)))
    assert owned(muon.init(params), params)["inner_states/muon/inner_state/0/ns_coeffs"] is None


def test_a_part_of_the_parameters_and_more_than_they_are():
    params = {"a": jnp.ones(3), "b": {"c": jnp.ones((4, 2))}}
    assert owned({"ema": {"b": {"c": jnp.ones((4, 2))}}}, params) == {"ema/b/c": ("b/c", (0, 1))}
    more = {"old": {**params, "d": jnp.ones(9)}}
    assert owned(more, params) == {
        "old/a": ("a", (0,)),
        "old/b/c": ("b/c", (0, 1)),
        "old/d": None,
    }


def test_nnx_and_linen_optimizers():
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    whole = nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)
    found = owned(nnx.state(whole), nnx.state(layer, nnx.Param))
    assert len(found) == 2 * 2
    assert all(path.endswith(f"/{owner}") for path, (owner, _) in found.items())
    boxed = Boxed().init(jax.random.key(0), jnp.ones((1, 2)))
    assert owned(optax.trace(0.9).init(boxed), boxed) == {
        "trace/params/Dense_0/bias": ("params/Dense_0/bias", (0,)),
        "trace/params/Dense_0/kernel": ("params/Dense_0/kernel", (0, 1)),
    }


@given(
    shapes=st.recursive(
        st.lists(st.integers(1, 4), max_size=3).map(tuple),
        lambda inner: (
            st.dictionaries(
                st.sampled_from(["w", "mu", "nu", "count", "trace", "0", "1"]), inner, min_size=1
            )
            | st.lists(inner, min_size=1, max_size=3)
        ),
        max_leaves=6,
    ),
    name=st.sampled_from(["adam", "a chain", "momentum alone", "wrapped", "hyperparameters"]),
)
@settings(max_examples=40)
def test_any_tree_of_parameters(shapes, name):
    check_owners(name, shapes)


# One owner for every strategy: `{w, mu: {w}}` under Adam.


def test_moments_of_nested_names_go_to_their_own_parameters():
    shapes = {"w": jax.ShapeDtypeStruct((8, 8), "float32")}
    params, tx = {**shapes, "mu": shapes}, optax.adam(1e-2)
    state = jax.eval_shape(tx.init, params)
    line = mesh.make(data=2, model=2)
    rule = rules.PathRules(("^w$", P("data")), ("^mu/w$", P("model")))
    specs = rules.follow(rule, params)(state, line)
    assert specs[0].mu == {"w": P("data"), "mu": {"w": P("model")}} == specs[0].nu


def test_a_layout_keeps_a_moment_as_its_own_parameter():
    params = {"w": jnp.ones((8, 4)), "mu": {"w": jnp.ones((8, 4))}}
    stacked = lambda path: path == "mu/w"  # noqa: E731
    layout = layouts.Layout(mesh.make(fsdp=2), fsdp="fsdp", stacked=stacked)
    specs = jax.tree.map(lambda s: s.spec, layouts.shardings(layout, params, optax.adam(1e-2)))
    assert specs[0] == {"w": P("fsdp"), "mu": {"w": P(None, "fsdp")}}
    assert specs[1][0].mu == specs[1][0].nu == specs[0]
