"""What has to be stored for the backward pass: by a minimum cut, beside every set there is."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.core import Literal

from shardwise.plan import residuals

X, W = jnp.zeros((8, 16)), jnp.zeros((16, 4))


def stored(program, *given):
    return residuals.stored(*residuals.opened(jax.make_jaxpr(program)(*given)))


def after_product(finish):
    return stored(lambda x, w: finish(x @ w), X, W)


@pytest.mark.parametrize(
    "finish, expected",
    [
        (lambda h: (jnp.tanh(h), jnp.tanh(h) * 2, 1 - jnp.tanh(h) ** 2), [(8, 4, "float32")]),
        (lambda h: h > 0, [(8, 4, "bool")]),  # smaller than what it follows from
        (lambda h: (h > 0, h), [(8, 4, "float32")]),
        (lambda h: h.astype(jnp.bfloat16) * 2, [(8, 4, "bfloat16")]),
        (lambda h: jnp.broadcast_to(h.sum(1)[:, None], (8, 4)) * 3, [(8, "float32")]),
        (lambda h: h * jnp.sum(h), [(8, 4, "float32")]),
        (lambda h: (h.sum(0) * 2, h.max(0)), [(4, "float32")] * 2),
        (lambda h: jax.jit(jnp.tanh)(h) * jax.checkpoint(jnp.sin)(h), [(8, 4, "float32")]),
    ],
)
def test_of_what_follows_from_a_product(finish, expected):
    found = [(*v.aval.shape, str(v.aval.dtype)) for v, *_ in after_product(finish)]
    assert sorted(found, key=str) == sorted(expected, key=str)


def test_what_goes_in_is_there_anyway():
    assert stored(lambda x: (x, x * 2, jnp.exp(x.T)), X) == []


def test_scores_of_attention_are_stored_once():
    """JAX keeps the exponentials, their sum and the quotient; one of them and rows will do."""

    def attention(q, k):
        scores = jnp.einsum("qd,kd->qk", q, k)
        return jax.vjp(lambda s: jnp.sum(jax.nn.softmax(s) ** 2), scores)[1]

    found = stored(lambda q, k: jax.tree.leaves(attention(q, k)), jnp.zeros((64, 8)), X[:, :8])
    assert [s.variable.aval.shape for s in found].count((64, 8)) == 1
    assert sum(s.bytes for s in found) <= 4 * (64 * 8 + 2 * 64)


def follows(kept, chosen, made_by):
    """Whether cheap steps lead from the chosen variables, and the program's inputs, to these."""

    def has(v):
        if isinstance(v, Literal) or v in chosen or v not in made_by:
            return True
        return made_by[v].name in residuals.CHEAP and all(map(has, made_by[v].invars))

    return all(map(has, kept))


@given(st.data())
def test_no_set_that_will_do_is_smaller(data):
    """Random programs of products, sums and cheap steps, against all sets of their variables."""
    length = data.draw(st.integers(1, 7))
    choices = [
        (data.draw(st.sampled_from("product sum tanh add narrow wide".split())),
         data.draw(st.integers(0, i)), data.draw(st.integers(0, i)))
        for i in range(length)
    ]  # fmt: skip
    wanted = data.draw(st.lists(st.integers(0, length), min_size=1, max_size=3))

    def program(x):
        made = [x]
        for name, i, j in choices:
            a, b = made[i].astype(jnp.float32), made[j].astype(jnp.float32)
            one = {"product": lambda a, b: a @ b, "sum": lambda a, b: jnp.cumsum(a, 0)}
            one |= {"tanh": lambda a, b: jnp.tanh(a), "add": lambda a, b: a + b}
            one |= {"narrow": lambda a, b: a.astype(jnp.float16), "wide": lambda a, b: a * 2}
            made.append(one[name](a, b))
        return [made[i] for i in wanted]

    jaxpr = jax.make_jaxpr(program)(jnp.zeros((3, 3)))
    found, outputs = residuals.opened(jaxpr)
    made_by = {v: step for step in found for v in step.outvars}
    ours = residuals.stored(found, outputs)
    assert follows(outputs, {s.variable for s in ours}, made_by)
    bytes_of = sum(s.bytes for s in ours)
    for n in range(len(made_by) + 1 if len(made_by) < 13 else 4):
        for chosen in itertools.combinations(made_by, n):
            if sum(map(residuals.size, chosen)) < bytes_of:
                assert not follows(outputs, set(chosen), made_by), (jaxpr, chosen)
