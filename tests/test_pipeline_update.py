"""`pipeline.update`: what is combined, what is refused, and whose memory is used."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from shardwise import mesh, pipeline
from shardwise.pipeline import optimizing

mesh.simulate(8)
HALVES = ((0, (0, 2)), (1, (2, 4)))
UNEVEN = ((0, (0, 1)), (1, (1, 4)))


class At:
    """What `pipeline.place` asks of a loss: where each array is to live."""

    def __init__(self, stages=2, **homes):
        self.stages, self.of = stages, homes

    def homes(self, tree, batch, key=None):
        grid = mesh.make(stage=self.stages)
        meshes = pipeline.placing.stage_meshes(grid, "stage", tuple(range(self.stages)))
        return [self.of[key] for key in sorted(tree)], meshes


def draw(shape, seed=0, dtype="float32"):
    return jnp.asarray(np.asarray(np.random.default_rng(seed).normal(size=shape), jnp.dtype(dtype)))


def assert_close(ours, theirs, rtol=1e-5):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, b), a in zip(jax.tree.leaves_with_path(theirs), jax.tree.leaves(ours), strict=True):
        if is_key(b):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert (np.shape(a), a.dtype) == (np.shape(b), b.dtype), path
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol, rtol, err_msg=str(path)
        )


def check(tx, grads, params, at, steps=2, **extra):
    """Updates and states of several steps equal one device's; the last of them."""
    split, whole = pipeline.place(params, at), jax.jit(tx.init)(params)
    state, update = pipeline.init(tx, split), jax.jit(tx.update)
    assert_close(pipeline.whole(state), whole)
    for _ in range(steps):
        expected, whole = update(grads, whole, params, **extra)
        updates, state = pipeline.update(tx, pipeline.place(grads, at), state, split, **extra)
        assert_close(pipeline.whole(updates), expected)
        assert_close(pipeline.whole(state), whole)
    return updates, state


def each(function):
    """A transformation of the gradients alone, array by array."""
    return optax.stateless_with_tree_map(lambda g, p: function(g))


# Reductions over an array in rows.

REDUCTIONS = {
    "sum": lambda g: g * jnp.sum(g),
    "maximum": lambda g: g * jnp.max(g),
    "minimum of magnitudes": lambda g: g / jnp.min(jnp.abs(g)),
    "product": lambda g: g * jnp.prod(g),
    "all": lambda g: jnp.where(jnp.all(g < 1), g, 0),
    "any": lambda g: jnp.where(jnp.any(g > 1), g, 0),
    "norm": lambda g: g / jnp.linalg.norm(g.ravel()),
    "inner product": lambda g: g * jnp.vdot(g, g + 1),
    "mean and variance": lambda g: (g - jnp.mean(g)) / jnp.var(g),
    "log of a sum of exponentials": lambda g: g - jax.nn.logsumexp(g),
    "within a row": lambda g: g.reshape(4, -1).sum(axis=1).reshape(4, *[1] * (g.ndim - 1)) * g,
    "whole arrays of constants": lambda g: (
        g * jnp.sum(jnp.ones_like(g)) + jnp.arange(g.size).reshape(g.shape)
    ),
    "a flattened array": lambda g: (
        jnp.cumprod(jnp.ones(g.shape), axis=g.ndim - 1).ravel().reshape(g.shape) * g
        if g.ndim > 1
        else g
    ),
    "a product along an axis before the rows": lambda g: (
        jax.lax.dot_general(g.T, jnp.arange(9.0).reshape(3, 3), (((0,), (0,)), ((), ())))
        if g.ndim > 1
        else g
    ),
}


def test_what_is_combined_over_rows():
    """Each of these of arrays of its own: of one axis and of two, in halves and in uneven parts."""
    cases = {
        f"{name}, {len(shape)}, {homes}": (function, shape, homes)
        for name, function in REDUCTIONS.items()
        for shape in ((4,), (4, 3))
        for homes in (HALVES, UNEVEN)
    }
    update = lambda grads, _: {key: cases[key][0](g) for key, g in grads.items()}  # noqa: E731
    grads, params = (
        {key: draw(shape, seed) for key, (_, shape, _) in cases.items()} for seed in range(2)
    )
    at = At(**{key: homes for key, (*_, homes) in cases.items()})
    check(optax.stateless(update), grads, params, at, steps=1)


REFUSED = {
    "transposed": (lambda g: g.T, "g combines arrays of several stages, or their rows"),
    "the product of rows": (lambda g: g @ g.T, "dot_general on g"),
    "a window": (
        lambda g: jax.lax.reduce_window(g, 0.0, jax.lax.add, (3, 1), (1, 1), "SAME"),
        "reduce_window_sum on g|reduce_window on g",
    ),
    "over some axes": (lambda g: g * jnp.sum(g, axis=0, keepdims=True), "reduce_sum on g"),
    "reversed": (lambda g: g[::-1], "rev on g"),
    "sorted": (lambda g: jnp.sort(g, axis=0), "sort on g"),
    "running": (lambda g: jnp.cumsum(g, axis=0), "cumsum on g"),
    "argmax": (lambda g: g * jnp.argmax(g), "on g, of which each of 2 stages holds rows"),
    "one entry": (lambda g: g * g[0, 0], "on g, of which each of 2 stages holds rows"),
    "shifted": (lambda g: jnp.roll(g, 1, axis=0), "on g, of which each of 2 stages holds rows"),
    "a loop": (
        lambda g: jax.lax.fori_loop(0, 3, lambda i, x: x @ x, g),
        "(scan|while) on g, of which each of 2 stages holds rows",
    ),
    "a callback": (
        lambda g: jax.pure_callback(lambda x: x, g, g, vmap_method="sequential"),
        "pure_callback on g",
    ),
    "a print": (lambda g: (jax.debug.print("{}", g[0, 0]), g)[1], "g|has an effect"),
}


@pytest.mark.parametrize(("function", "message"), REFUSED.values(), ids=REFUSED)
def test_what_mixes_rows_is_refused(function, message):
    params = {"g": draw((4, 4))}
    split = pipeline.place(params, At(g=HALVES))
    tx = each(function)
    with pytest.raises(ValueError, match=f"pipeline.update: .*({message})"):
        pipeline.update(tx, split, pipeline.init(tx, split), split)


@pytest.mark.parametrize("mix", ["add", "swap"])
def test_arrays_of_two_stages_do_not_meet(mix):
    params = {"a": draw((3, 3)), "b": draw((3, 3), 1)}
    split = pipeline.place(params, At(a=((0, None),), b=((1, None),)))
    swapped = optax.stateless(lambda u, p: {"a": u["b"], "b": u["a"]})
    added = optax.stateless(lambda u, p: {"a": u["a"] + u["b"], "b": u["b"]})
    tx, message = {
        "add": (added, r"add combines arrays of several stages \(a, b\)"),
        "swap": (
            swapped,
            "a combines arrays of several stages, or their rows: it would come from b",
        ),
    }[mix]
    with pytest.raises(ValueError, match=message):
        pipeline.update(tx, split, pipeline.init(tx, split), split)


# Random transformations: expressions of what is known.

UNARY = [
    jnp.tanh,
    jnp.abs,
    jnp.square,
    jnp.negative,
    lambda x: x.astype("bfloat16").astype("float32"),
]
BINARY = [jnp.add, jnp.multiply, jnp.maximum, lambda x, y: jnp.where(x > y, x, 0.5 * y)]
OVER_ALL = [jnp.sum, jnp.max, jnp.min, jnp.mean, lambda x: jnp.vdot(x, x), lambda x: x.size]
WITHIN_A_ROW = [
    lambda x: x - x.mean(axis=-1, keepdims=True),
    lambda x: jnp.flip(x, axis=-1),
    lambda x: jnp.cumsum(x, axis=1),
    lambda x: jnp.sort(x.reshape(4, -1), axis=1).reshape(x.shape),
    lambda x: jnp.einsum("lij,lkj->lik", x, x) @ x,
    lambda x: jnp.swapaxes(jnp.swapaxes(x, 0, 1) * 2, 0, 1),
    lambda x: jnp.concatenate([x[:, 1:], x[:, :1]], axis=1),
    lambda x: x + jnp.arange(x.size, dtype=x.dtype).reshape(x.shape),
    lambda x: x + jnp.arange(x.shape[2], dtype=x.dtype),
]
EXPRESSIONS = st.recursive(
    st.sampled_from(["g", "p"]),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(UNARY), inner),
        st.tuples(st.sampled_from(BINARY), inner, inner),
        st.tuples(st.just(jnp.multiply), inner, st.tuples(st.sampled_from(OVER_ALL), inner)),
        st.tuples(st.sampled_from(WITHIN_A_ROW), inner),
        st.tuples(st.just("cond"), inner, inner, inner),
    ),
    max_leaves=6,
)


def evaluate(expression, g, p):
    if isinstance(expression, str):
        return {"g": g, "p": p}[expression]
    function, *parts = expression
    if function == "cond":
        test, one, other = parts
        taken = jnp.sum(evaluate(test, g, p)) > 0
        return jax.lax.cond(taken, lambda: evaluate(one, g, p), lambda: evaluate(other, g, p))
    return function(*(evaluate(part, g, p) for part in parts))


HOMES = [HALVES, UNEVEN, ((1, None),), ((0, None), (1, None))]
# Five at a time, each of arrays of its own: one update.
SEVERAL = st.lists(st.tuples(EXPRESSIONS, st.sampled_from(HOMES)), min_size=5, max_size=5)


@given(SEVERAL, st.integers(0, 99))
@settings(max_examples=2)
def test_random_transformations_equal_one_device(cases, seed):
    check_random(cases, seed)


@pytest.mark.slow
@given(SEVERAL, st.integers(0, 99))
@settings(max_examples=20)
def test_many_random_transformations_equal_one_device(cases, seed):
    check_random(cases, seed)


def check_random(cases, seed):
    names = [f"w{i}" for i in range(len(cases))]
    grads, params = (
        {name: draw((4, 2, 3), seed + more + 2 * i) for i, name in enumerate(names)}
        for more in range(2)
    )
    each = {name: expression for name, (expression, _) in zip(names, cases, strict=True)}
    at = At(**{name: homes for name, (_, homes) in zip(names, cases, strict=True)})
    with jax.numpy_rank_promotion("allow"):
        tx = optax.stateless(lambda g, p: {k: evaluate(each[k], g[k], p[k]) for k in names})
        check(tx, grads, params, at, steps=1)


# Conditions.


def test_a_condition_is_one_for_each_stage():
    """Both branches have sums over stages; the predicate has one too. Only one branch is run."""

    def update(grads, state, params):
        norm = optax.tree.norm(grads)
        clipped = lambda: jax.tree.map(lambda g: g * 3 / optax.tree.norm(grads), grads)  # noqa: E731
        kept = lambda: jax.tree.map(lambda g: g + jnp.max(grads["w"]), grads)  # noqa: E731
        grads = jax.lax.cond(norm > state, clipped, kept)
        return grads, jnp.where(norm > state, state * 100, state / 100)

    tx = optax.GradientTransformation(lambda params: jnp.float32(1), update)
    shapes = {"w": (4, 3), "v": (5,), "s": ()}
    grads = {k: draw(shape) for k, shape in shapes.items()}
    params = {k: draw(shape, 1) for k, shape in shapes.items()}
    at = At(w=UNEVEN, v=((1, None),), s=((0, None), (1, None)))
    check(tx, grads, params, at, steps=3)
    split, state = (
        pipeline.place(params, at),
        pipeline.place(jnp.float32(1), pipeline.place(params, at)),
    )
    kinds = tuple((t.layout, t.structure, t.meshes) for t in (split, state, split))
    program = optimizing.program(tx, (), kinds)
    assert {len(step.guards) for step in program.steps} == {0, 1}
    assert len({step.guards[0] for step in program.steps if step.guards}) == 2


def test_a_nested_condition_with_numbers_alone():
    def update(grads, state, params):
        def inner(x):
            return jax.lax.cond(state % 2 == 0, lambda: x * jnp.sum(x), lambda: x)

        grads = jax.tree.map(
            lambda g: jax.lax.switch(state, [inner, lambda x: -x, jnp.zeros_like, inner], g), grads
        )
        return grads, state + 1

    tx = optax.GradientTransformation(lambda params: jnp.int32(0), update)
    grads, params = {"w": draw((4, 3))}, {"w": draw((4, 3), 1)}
    check(tx, grads, params, At(w=HALVES), steps=4)


# Shapes, dtypes and places of what comes out.


def test_noise_of_the_whole_shape_is_cut_to_the_rows():
    """A row of one entry would broadcast with all of the noise, and the norm count it twice."""
    params = {"w": draw((2, 1))}
    at = At(w=((0, (0, 1)), (1, (1, 2))))
    tx = optax.chain(optax.add_noise(1.0, 0.5, 3), optax.normalize_by_update_norm())
    check(tx, params, params, at, steps=1)


@pytest.mark.parametrize("name", [pytest.param("dadapt_adamw", marks=pytest.mark.slow), "prodigy"])
def test_a_state_whose_dtype_changes(name):
    tx = getattr(optax.contrib, name)()
    params = {"w": draw((4, 3), 1, "bfloat16"), "s": draw((), 2, "bfloat16")}
    grads = {"w": draw((4, 3), 3), "s": draw((), 4)}
    at = At(w=HALVES, s=((1, None),))
    split, whole = pipeline.place(params, at), tx.init(params)
    state = pipeline.init(tx, split)
    dtypes = [[x.dtype for x in jax.tree.leaves(whole)]]
    for _ in range(2):
        _, whole = jax.jit(tx.update)(grads, whole, params)
        _, state = pipeline.update(tx, pipeline.place(grads, at), state, split)
        dtypes.append([x.dtype for x in jax.tree.leaves(whole)])
        assert dtypes[-1] == [piece.dtype for piece in state.layout]
        assert_close(pipeline.whole(state), whole, rtol=0.02)
    assert dtypes[0] != dtypes[1]


@pytest.mark.parametrize(
    "name", ["lamb", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lars", "fromage"))]
)
def test_empty_arrays_and_constants(name):
    shapes = {"empty": (0, 3), "rows": (4, 0), "w": (4, 3)}
    grads = {k: draw(shape) for k, shape in shapes.items()}
    params = {k: draw(shape, 1) for k, shape in shapes.items()}
    at = At(empty=((0, None),), rows=HALVES, w=HALVES)
    check(getattr(optax, name)(1e-2), grads, params, at)


def test_dtypes_that_must_agree():
    """What adds up parts of several stages brings no dtype of its own."""
    with jax.numpy_dtype_promotion("strict"):
        params = {"w": draw((4, 3)), "s": draw(()), "n": jnp.arange(4, dtype="int32")}
        tx = optax.chain(optax.zero_nans(), each(lambda g: g * jnp.sum(g)))
        check(tx, params, params, At(w=HALVES, s=((1, None),), n=HALVES))


def test_keys_in_a_state_are_merged():
    tx = optax.add_noise(1.0, 0.5, 3)
    params = pipeline.place({"w": draw((4, 3))}, At(w=HALVES))
    merged = pipeline.whole(pipeline.init(tx, params))
    expected = tx.init({"w": draw((4, 3))})
    assert jax.tree.structure(merged) == jax.tree.structure(expected)
    again = pipeline.whole(pipeline.place(merged, params))
    for tree in (merged, again):
        keys = [jax.random.key_data(x) for x in jax.tree.leaves(tree) if is_key(x)]
        assert len(keys) == 1
        np.testing.assert_array_equal(keys[0], jax.random.key_data(expected.rng_key))


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def test_moments_of_nested_names_live_with_their_own_parameters():
    """The tail of the path of Adam's `mu` of `w` is `mu/w`, another parameter's path."""
    params = {"w": draw((4, 3)), "mu": {"w": draw((4, 3), 1)}}

    class Nested(At):
        def homes(self, tree, batch, key=None):
            return [((0, None),), ((1, None),)], super().homes({}, batch)[1]

    split = pipeline.place(params, Nested())
    state = pipeline.init(optax.adam(1e-2), split)
    homes = {piece.path: piece.homes for piece in state.layout}
    for moment in ("mu", "nu"):
        assert homes[f"0/{moment}/w"] == ((1, None),)
        assert homes[f"0/{moment}/mu/w"] == ((0, None),)
    updates, _ = pipeline.update(optax.adam(1e-2), split, state, split)
    tx = optax.adam(1e-2)
    expected, _ = jax.jit(lambda x: tx.update(x, tx.init(x), x))(params)
    assert_close(pipeline.whole(updates), expected, rtol=1e-4)


def test_factored_moments_lie_in_rows_where_they_have_them():
    params = {"w": draw((4, 5, 6), 1)}
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=5)
    _, state = check(tx, {"w": draw((4, 5, 6))}, params, At(w=UNEVEN))
    homes = {piece.path: piece.homes for piece in state.layout if len(piece.shape) == 2}
    assert len(homes) == 2 and set(homes.values()) == {UNEVEN}


def test_layouts_within_a_stage_are_kept():
    grid = mesh.make(stage=2, fsdp=2)

    class Both(At):
        def homes(self, tree, batch, key=None):
            return [HALVES], pipeline.placing.stage_meshes(grid, "stage", (0, 1))

    params = {"w": draw((4, 6, 8))}
    split = pipeline.place(params, Both(), rule=P(None, "fsdp"))
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=5)
    state = pipeline.init(tx, split)
    updates, state = pipeline.update(
        tx, pipeline.place(params, Both(), rule=P(None, "fsdp")), state, split
    )
    for tree in (updates, state):
        for piece in tree.layout:
            if len(piece.shape) > 1:
                assert piece.spec == (P(None, "fsdp") if piece.shape[1] == 6 else P(None, None))
            for stage, x in tree.tree[piece.path].items():
                laid = jax.sharding.NamedSharding(tree.meshes[stage], piece.spec)
                assert x.sharding.is_equivalent_to(laid, x.ndim)


# Further arguments.


def test_further_arguments():
    at, shapes = At(w=HALVES, v=((1, None),)), {"w": (4, 3), "v": (5,)}
    grads = {k: draw(shape) for k, shape in shapes.items()}
    params = {k: draw(shape, 1) for k, shape in shapes.items()}

    def update(updates, state, params, *, value, other, tables, **_):
        return jax.tree.map(
            lambda u, o: u * value + o + jnp.sum(tables["a"]), updates, other
        ), state

    tx = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    split = pipeline.place(params, at)
    tables = {"a": jnp.arange(3.0), "none": None}
    expected, _ = tx.update(grads, tx.init(params), params, value=2.0, other=params, tables=tables)
    updates, _ = pipeline.update(
        tx, pipeline.place(grads, at), pipeline.init(tx, split), split,
        value=jnp.float32(2), other=split, tables=tables,
    )  # fmt: skip
    assert_close(pipeline.whole(updates), expected)


def test_lbfgs_of_whole_arrays():
    at, shapes = At(a=((0, None),), b=((1, None),)), {"a": (4, 3), "b": (5,)}
    grads = {k: draw(shape) for k, shape in shapes.items()}
    params = {k: draw(shape, 1) for k, shape in shapes.items()}
    tx = optax.lbfgs(1e-2, memory_size=2, linesearch=None)
    split = pipeline.place(params, at)
    with pytest.raises(ValueError, match=r"scan combines arrays of several stages \(0/diff_par"):
        check(tx, grads, params, at)
    one = At(a=((1, None),), b=((1, None),))
    check(tx, grads, params, one, steps=3)
    searching = optax.lbfgs(memory_size=2)
    with pytest.raises(ValueError, match="value_fn= is a function of whole parameters"):
        pipeline.update(
            searching, split, pipeline.init(searching, split), split,
            value=1.0, grad=split, value_fn=lambda p: 0.0,
        )  # fmt: skip


MATRIX = optax.contrib.MuonDimensionNumbers()


def test_muon_takes_whole_matrices_and_matrices_of_a_stack():
    """Its tables of numbers are on every stage; what lies in rows has no such update."""
    shapes = {"a": (4, 3), "b": (3, 4), "rows": (4, 6), "v": (5,)}
    params = {k: draw(shape, 1) for k, shape in shapes.items()}
    at = At(a=((0, None),), b=((1, None),), rows=HALVES, v=((1, None),))
    split = pipeline.place(params, at)
    every = optax.contrib.muon(1e-2)
    with pytest.raises(
        ValueError, match="on rows, of which each of 2 stages holds rows, works nei"
    ):
        pipeline.update(every, split, pipeline.init(every, split), split)
    of = {"a": MATRIX, "b": MATRIX, "rows": None, "v": None}
    some = optax.contrib.muon(1e-2, muon_weight_dimension_numbers=lambda params: of)
    check(some, {k: draw(shape) for k, shape in shapes.items()}, params, at)


# Memory, programs, mistakes.


def test_only_numbers_cross():
    tx = optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2))
    at = At(w=HALVES, v=((1, None),))
    params, grads, state = state_of(tx, at, {"w": draw((4, 3)), "v": draw((5,))})
    kinds = tuple((tree.layout, tree.structure, tree.meshes) for tree in (grads, state, params))
    program = optimizing.program(tx, (), kinds)
    crossing = [v for step in program.exchanges for found in step.values() for v in found]
    assert crossing and all(getattr(v, "variable", v).aval.shape == () for v in crossing)


def state_of(tx, at, params):
    split = pipeline.place(params, at)
    return split, pipeline.place(params, at), pipeline.init(tx, split)


def deleted(tree):
    return [x.is_deleted() for x in jax.tree.leaves(tree) if x.ndim]


def test_old_state_and_gradients_are_used_up_and_parameters_are_not():
    at = At(w=HALVES, v=((1, None),))
    params, grads, state = state_of(optax.adam(1e-2), at, {"w": draw((4, 3)), "v": draw((5,))})
    updates, new = pipeline.update(optax.adam(1e-2), grads, state, params)
    assert all(deleted(grads)) and all(deleted(state))
    assert not any(deleted((params, updates, new)))
    # The same arrays given twice are nobody's to use up.
    updates, newer = pipeline.update(optax.adam(1e-2), params, new, params)
    assert not any(deleted((params, new, newer)))


def test_a_state_that_is_the_parameters_has_its_own_memory():
    """Lookahead and averages start as the parameters themselves."""
    tx = optax.GradientTransformation(
        lambda params: params, lambda u, s, p: (u, jax.tree.map(lambda s, u: s + u, s, u))
    )
    at, whole = At(w=HALVES), {"w": draw((4, 3))}
    params, grads, state = state_of(tx, at, whole)
    pipeline.update(tx, grads, state, params)
    np.testing.assert_array_equal(pipeline.whole(params)["w"], whole["w"])
    _, grads, _ = state_of(tx, at, whole)
    given = pipeline.place(jax.tree.map(jnp.asarray, whole), params)
    pipeline.update(tx, grads, given, params)
    assert not any(deleted(whole))


def test_programs_are_not_kept_for_ever():
    params, _, state = state_of(optax.sgd(1e-2), At(w=HALVES), {"w": draw((4, 3))})
    most = optimizing.program.cache_info().maxsize
    kinds = tuple((t.layout, t.structure, t.meshes) for t in (params, state, params))
    for i in range(most + 4):
        optimizing.program(optax.sgd(1e-2 / (i + 1)), (), kinds)
    assert optimizing.program.cache_info().currsize <= most
    before = optimizing.program.cache_info().hits
    tx = optax.sgd(1e-2)
    for _ in range(3):
        _, state = pipeline.update(tx, params, state, params)
    assert optimizing.program.cache_info().hits == before + 2


def test_other_mistakes_are_named():
    params, grads, state = state_of(optax.adam(1e-2), At(w=HALVES), {"w": draw((4, 3))})
    plain = optax.adam(1e-2).init({"w": draw((4, 3))})
    for args, message in [
        ((grads, plain, params), r"opt_state is a tuple; expected .* pipeline.init\(tx, params\)"),
        (({"w": draw((4, 3))}, state, params), r"grads is a dict; .* pipeline.place\("),
    ]:
        with pytest.raises(TypeError, match=message):
            pipeline.update(optax.adam(1e-2), *args)
    with pytest.raises(TypeError, match=r"pipeline\.init: params is a dict"):
        pipeline.init(optax.adam(1e-2), {"w": draw((4, 3))})
