"""A sum over chunks: that of all at once, with its derivatives, and nothing twice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import jaxprs, layouts, measure, mesh, model, objective

CHUNKS, ROWS, WIDTH, WORDS = 4, 6, 5, 7
RNG = np.random.default_rng(0)
HEAD, X, WEIGHT = (
    jnp.asarray(RNG.normal(size=shape), jnp.float32)
    for shape in ((WIDTH, WORDS), (CHUNKS, ROWS, WIDTH), (CHUNKS, ROWS))
)
CODES = jnp.asarray(RNG.integers(-2, 3, (WIDTH, WORDS)), jnp.int8)  # a quantised part of the head
TARGETS = jnp.asarray(RNG.integers(0, WORDS, (CHUNKS, ROWS)))


def nats(head, codes, x, targets, weight):
    found = jax.nn.log_softmax(x @ (head + codes))
    return -jnp.sum(weight * jnp.take_along_axis(found, targets[..., None], -1)[..., 0])


def in_chunks(head, codes, *chunks):
    return objective.chunked_sum(lambda chunk: nats(head, codes, *chunk), chunks)


def plain(loss, head, x, weight):
    return loss(head, CODES, x, TARGETS, weight)


def scanned(loss, head, x, weight):
    """As in a loop over microbatches: traced once, then differentiated."""

    def body(total, factor):
        return total + loss(head * factor, 2 * CODES, x, TARGETS, weight), None

    return jax.lax.scan(body, jnp.float32(0), jnp.arange(1.0, 4.0))[0]


def again(loss, *given):
    return jax.checkpoint(functools.partial(scanned, loss))(*given)


def mapped(loss, head, x, weight):
    def one(factor, codes, targets):
        return loss(head * factor, codes, x, targets, weight)

    each = jnp.arange(1.0, 3.0), jnp.stack([CODES, -CODES]), jnp.stack([TARGETS, 6 - TARGETS])
    return jnp.sum(jax.vmap(one)(*each))


@pytest.mark.parametrize("use", [plain, scanned, again, mapped])
def test_it_is_the_sum_at_once_in_every_mode(use):
    """Also of integers that the function closes over, in loops and maps around it."""

    def found(loss):
        of = functools.partial(use, loss)
        of_head = lambda head: of(head, X, WEIGHT)  # noqa: E731
        moves = jnp.cos(HEAD), jnp.sin(X), WEIGHT
        return (
            jax.jit(jax.value_and_grad(of, (0, 1, 2)))(HEAD, X, WEIGHT),
            jax.jit(lambda *at: jax.jvp(jax.grad(of, (0, 1, 2)), at, moves))(HEAD, X, WEIGHT),
            jax.jit(jax.hessian(of_head))(HEAD),
            jax.jit(jax.jacrev(jax.grad(of_head)))(HEAD),
        )

    ours, expected = found(in_chunks), found(nats)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6 * np.abs(b).max())


def test_no_product_is_computed_twice_and_one_chunk_is_there_at_a_time():
    """By the compiled program: as many FLOPs as at once, and a part of the memory."""
    shapes = (64, 4096), (64, 4096), (16, 256, 64), (16, 256), (16, 256)
    dtypes = jnp.float32, jnp.int8, jnp.float32, jnp.int32, jnp.float32
    given = map(jax.ShapeDtypeStruct, shapes, dtypes)
    head, codes, *rest = given
    both = []
    for loss in (in_chunks, nats):
        program = jax.jit(jax.grad(loss, (0, 2))).lower(head, codes, *rest).compile()
        both.append((measure.flops(program), program.memory_analysis().temp_size_in_bytes))
    (flops, memory), (at_once, whole) = both
    assert flops == at_once and memory < whole / 4
    alone = jax.jit(in_chunks).lower(head, codes, *rest).compile()
    assert measure.flops(alone) == at_once / 3


def test_no_array_of_a_chunk_is_made_before_the_loop():
    """JAX takes what reads no input out of a loop that it differentiates; compilers write it."""

    def of_chunk(chunk):
        x, targets = chunk
        logits = x @ HEAD
        chosen = jax.lax.broadcasted_iota(int, logits.shape, 1) == targets[:, None]
        return jnp.sum(jnp.where(chosen, logits, 0))

    loss = lambda x: objective.chunked_sum(of_chunk, (x, TARGETS))  # noqa: E731
    traced = jax.make_jaxpr(jax.value_and_grad(loss))(X).jaxpr
    of_a_chunk = [e for e in jaxprs.every(traced) if e.outvars[0].aval.shape == (ROWS, WORDS)]
    assert {"iota", "eq", "select_n"} <= {e.primitive.name for e in of_a_chunk}
    assert not any(e in traced.eqns for e in of_a_chunk)


@pytest.mark.parametrize("cotangent", [1.0, 1 / 3000])
def test_gradients_are_summed_and_multiplied_in_float32(cotangent):
    """In bfloat16, of eight bits, 1 + 1/500 is 1, and a product of two rounded numbers another."""
    x = jnp.full((501, 1), 1 / 500, jnp.bfloat16).at[0].set(1)

    def loss(head, x):
        return cotangent * objective.chunked_sum(lambda row: jnp.sum(head * row), x)

    of_head, of_x = jax.grad(loss, (0, 1))(jnp.ones(1, jnp.bfloat16), x)
    assert of_head.dtype == of_x.dtype == jnp.bfloat16
    total = np.float32(cotangent) * np.float32(np.float64(x).sum())
    assert of_head[0] == jnp.bfloat16(total) and of_x[0, 0] == jnp.bfloat16(cotangent)


def test_only_what_moves_is_differentiated():
    """So that a frozen head costs no product."""
    of_x = lambda x: in_chunks(HEAD, CODES, x, TARGETS, WEIGHT)  # noqa: E731
    traced = jax.make_jaxpr(jax.value_and_grad(of_x))(X)
    products = [e for e in jaxprs.every(traced.jaxpr) if e.primitive.name == "dot_general"]
    assert len(products) == 2  # of the value, and of x's gradient


def test_a_function_is_traced_anew_each_time():
    held = {"weight": 1.0}
    function = lambda chunk: jnp.sum(held["weight"] * chunk)  # noqa: E731
    assert objective.chunked_sum(function, jnp.ones((2, 3))) == 6
    held["weight"] = 10.0
    assert objective.chunked_sum(function, jnp.ones((2, 3))) == 60


@pytest.mark.parametrize("checked", [False, True])
def test_within_a_shard_map_devices_sum_once(checked):
    grid, by_row = mesh.make(data=2), P(None, "data")

    def loss(head, x):
        def here(head, *chunks):
            return jax.lax.psum(in_chunks(varying(head), CODES, *chunks), "data")

        specs = dict(in_specs=(P(), *[by_row] * 3), out_specs=P(), check_vma=checked)
        return jax.shard_map(here, mesh=grid, **specs)(head, x, TARGETS, WEIGHT)

    varying = lambda head: head  # noqa: E731
    if checked:
        with pytest.raises(ValueError, match="does not vary over the mesh axes 'data'"):
            jax.grad(loss)(HEAD, X)
        if not hasattr(jax.lax, "pcast"):
            return
        varying = lambda head: jax.lax.pcast(head, ("data",), to="varying")  # noqa: E731
    found = jax.jit(jax.grad(loss, (0, 1)))(HEAD, X)
    expected = jax.grad(functools.partial(plain, nats), (0, 1))(HEAD, X, WEIGHT)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "function, chunks, error, told",
    [
        (lambda x: (x.sum(), x.sum()), X, TypeError, r"float32\[\], float32\[\]; expected one"),
        (lambda x: x, X, TypeError, "expected one scalar"),
        (lambda x: None, X, TypeError, "returned nothing"),
        (jnp.sum, X[:0], ValueError, "a chunk or more"),
        (lambda chunk: 0.0, {}, ValueError, "expected arrays"),
    ],
)
def test_what_is_no_sum_of_chunks_is_named(function, chunks, error, told):
    with pytest.raises(error, match=told):
        objective.chunked_sum(function, chunks)


def test_where_there_is_nothing_to_differentiate_it_is_a_sum():
    assert objective.chunked_sum(jnp.sum, jnp.arange(12).reshape(4, 3)) == 66


def test_a_layout_sends_as_much_in_chunks():
    """The decoder's loss, around tensor too: counted in the compiled programs, by mesh axis."""
    grid = mesh.make(fsdp=2, context=2, tensor=2)
    roles = {role: role for role in grid.shape}
    again = jax.checkpoint_policies.nothing_saveable
    layout = layouts.Layout(grid, **roles, sequence=True, attention="zigzag", remat=again)
    sizes = dict(vocab=256, embed=64, layers=2, heads=8, kv_heads=4, head_dim=16, mlp=128)
    place = NamedSharding(grid, P(layout.rows, layout.context))
    shaped = functools.partial(jax.ShapeDtypeStruct, (8, 64), sharding=place)
    batch = dict(tokens=shaped("int32"), targets=shaped("int32"), mask=shaped("float32"))
    found = []
    for chunks in (1, 4):
        create, loss, _ = model.program(model.Config(**sizes, loss_chunks=chunks))
        params = jax.eval_shape(create, jax.random.key(0))
        laid = jax.tree.map(
            lambda x, to: x.update(sharding=to), params, layouts.shardings(layout, params)
        )
        step = layouts.value_and_grad(layout, loss, check=False)
        counted = measure.collectives(jax.jit(step).lower(laid, batch).compile())
        found.append({k: v.ring_bytes for k, v in measure.by_axis(counted, grid).items()})
    assert found[0] == found[1] and ("tensor",) in found[0] and ("fsdp",) in found[0]
