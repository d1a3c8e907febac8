import dataclasses
import functools
import gc
import re
import threading
import weakref
from fractions import Fraction

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardwise import marks


def test_unbound_marks_are_identities_that_leave_no_trace():
    tree = {"w": jnp.ones(2)}
    assert marks.use(tree) is tree
    x = jnp.ones(3)
    assert marks.constrain(x, "logits") is x and marks.stage_boundary(x) is x
    assert marks.local(tree) is tree
    assert marks.index("rows", 3).tolist() == [0, 1, 2]
    assert not jax.make_jaxpr(lambda x: marks.stage_boundary(marks.constrain(x, "a")))(x).eqns


def test_bindings_act_within_the_block_and_nest():
    seen = []
    with marks.bind(constrain=lambda x, name: seen.append(name) or x + 1):
        assert marks.constrain(1, "outer") == 2
        with marks.bind(use=lambda w: w * 10):
            assert (marks.use(1), marks.constrain(1, "both")) == (10, 2)
        with marks.bind(constrain=lambda x, name: x):
            assert marks.constrain(1, "inner") == 1
        assert marks.use(1) == 1
    assert marks.constrain(1, "after") == 1
    assert seen == ["outer", "both"]


def test_a_binding_ends_with_an_exception():
    with pytest.raises(KeyError), marks.bind(use=lambda w: w["missing"]):
        marks.use({})
    assert marks.use({}) == {}


def test_another_thread_does_not_see_the_binding():
    found = []
    with marks.bind(use=lambda w: "bound"):
        thread = threading.Thread(target=lambda: found.append(marks.use("unbound")))
        thread.start()
        thread.join()
        assert marks.use("unbound") == "bound"
    assert found == ["unbound"]


def test_an_unknown_mark_is_named():
    with pytest.raises(ValueError, match=r"no such mark \['gather'\]; there are .*'use'"):
        with marks.bind(gather=lambda x: x):
            pass


def _marked(x):
    TRACED.append(1)
    return marks.constrain(x, "here")


TRACED = []
CARRIED = lambda x, _: (_marked(x), None)  # noqa: E731
ONCE = lambda x: _marked(x) + 1  # noqa: E731
BELOW = lambda x: x < 1  # noqa: E731


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return _marked(x)


LINEN = nn.remat(Linen)()
JITTED, VMAPPED = jax.jit(_marked), jax.vmap(jax.jit(_marked))

# Each is one object, whose trace JAX keeps; `while` adds 1 so that it ends.
KEPT = {
    "jit": (JITTED, 0),
    "vmap of jit": (lambda x: VMAPPED(x[None])[0], 0),
    "scan": (lambda x: jax.lax.scan(CARRIED, x, jnp.zeros(1))[0], 0),
    "remat": (jax.checkpoint(_marked), 0),
    "cond": (lambda x: jax.lax.cond(x < 1, _marked, _marked, x), 0),
    "while": (lambda x: jax.lax.while_loop(BELOW, ONCE, x), 1),
    "nnx.jit": (nnx.jit(_marked), 0),
    "nnx.remat": (nnx.remat(_marked), 0),
    "linen.remat": (lambda x: LINEN.apply({}, x), 0),
    "gradient": (lambda x: jax.value_and_grad(JITTED)(x)[0], 0),
}


@pytest.mark.parametrize(("function", "extra"), KEPT.values(), ids=KEPT)
def test_what_jax_keeps_of_a_trace_is_not_used_under_other_meanings(function, extra):
    add = [lambda x, name, y=y: x + y for y in (0, 10, 20)]
    for y in (0, 10, 20, 10, 0):
        with marks.bind(constrain=add[y // 10]):
            assert function(jnp.float32(0)) == y + extra, y
        assert function(jnp.float32(0)) == extra


def test_equal_meanings_trace_once():
    block = jax.jit(_marked)
    for _ in range(3):
        with marks.bind(constrain=_Add(2)):
            assert block(jnp.float32(1)) == 3
    before = len(TRACED)
    with marks.bind(constrain=_Add(2)):
        block(jnp.float32(1))
    assert len(TRACED) == before
    with marks.bind(constrain=_Add(2), use=lambda w: w):
        block(jnp.float32(1))
    assert len(TRACED) == before + 1


@dataclasses.dataclass(frozen=True)
class _Add:
    number: int

    def __call__(self, x, name):
        return x + self.number


def test_a_meaning_without_a_hash_is_named():
    with pytest.raises(TypeError, match=r"a meaning of \['constrain'\] has no hash \(unhashable"):
        with marks.bind(constrain=_Add([1])):
            pass


def test_what_jax_keeps_of_a_trace_keeps_no_function_alive():
    meaning = lambda x, name: x + 1  # noqa: E731
    alive = weakref.ref(meaning)
    with marks.bind(constrain=meaning):
        assert JITTED(jnp.float32(0)) == 1
    del meaning
    gc.collect()
    assert alive() is None


def test_places_are_those_of_single_documents_where_a_batch_says_nothing():
    for batch in (None, {"tokens": jnp.zeros((2, 3))}):
        found = marks.places(batch, 2, 3)
        assert found.positions.tolist() == found.index.tolist() == [[0, 1, 2]] * 2
        assert found.documents.tolist() == [[0] * 3] * 2
    with marks.bind(index=lambda axis, size: jnp.arange(size) + {"sequence": 10}[axis]):
        assert marks.places(None, 1, 2).index.tolist() == [[10, 11]]


def test_places_come_from_the_batch_where_it_has_them():
    given = {"positions": [[0, 1, 0]], "documents": [[4, 4, 7]]}
    found = marks.places({k: jnp.array(x) for k, x in given.items()}, 1, 3)
    assert [x.tolist() for x in found] == [[[0, 1, 0]], [[4, 4, 7]], [[0, 1, 2]]]
    moved = marks.places({"index": jnp.array([[5, 2]])}, 1, 2)  # as a cut batch has it
    assert moved.index.tolist() == moved.positions.tolist() == [[5, 2]]
    with pytest.raises(ValueError, match=r"'documents' of the batch is \[3\]; .* token, \[1, 3\]"):
        marks.places({"documents": jnp.zeros(3, int)}, 1, 3)


def qkv(rows=2, length=5, heads=6, kv_heads=2, size=4):
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(k, (rows, length, n, size)) for k, n in zip(
        keys, (heads, kv_heads, kv_heads), strict=True)]  # fmt: skip


def test_unbound_attention_agrees_with_jax():
    theirs = jax.jit(functools.partial(jax.nn.dot_product_attention, is_causal=True))(*qkv())
    ours = jax.jit(lambda *qkv: marks.attend(*qkv, marks.places(None, 2, 5)))(*qkv())
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_attention_sees_what_the_mask_says_of_the_places():
    order = np.array([3, 0, 4, 1, 2])
    documents = np.array([[0, 0, 0, 1, 1], [2, 2, 2, 2, 2]])
    places = marks.places({"documents": documents}, 2, 5)
    window = lambda q, k: marks.causal(q, k) & (q.index - k.index < 3)  # noqa: E731
    near = np.subtract.outer(range(5), range(5))
    near = ((near >= 0) & (near < 3))[None] & (documents[:, :, None] == documents[:, None, :])
    theirs = jax.nn.dot_product_attention(*qkv(), mask=near[:, None])
    ours = marks.attend(*qkv(), places, window)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    moved = [x[:, order] for x in qkv()]  # the order in memory does not matter
    elsewhere = marks.Places(*(x[:, order] for x in places))
    ours = marks.attend(*moved, elsewhere, window)
    np.testing.assert_allclose(ours, theirs[:, order], rtol=1e-5, atol=1e-6)


def test_bound_attention_receives_what_the_model_gave():
    given = (*qkv(), marks.places(None, 2, 5))
    with marks.bind(attend=lambda *args: args):
        assert marks.attend(*given) == (*given, marks.causal)


def test_totals_carry_no_gradient():
    x = jnp.array([2.0, 3.0])
    product = lambda x: jnp.sum(marks.total(x) * x)  # noqa: E731
    assert jax.grad(product)(x).tolist() == [2, 3]
    with marks.bind(total=lambda x, axes: 10 * x if axes == ("rows", "sequence") else None):
        assert jax.grad(product)(x).tolist() == [20, 30]


@pytest.mark.parametrize("times, of, told", [(8, 22, [Fraction(4, 11)]), ([3, 0], 1, [3, 0])])
def test_the_name_of_a_loop_says_how_often_it_turns(times, of, told):
    def run(n, x):
        with marks.turns(times, of):
            return jax.lax.fori_loop(0, n, lambda i, x: jnp.sin(x), x)

    wrapped = jax.vmap(run, in_axes=(None, 0))
    for f, x in [(run, jnp.ones(2)), (wrapped, jnp.ones((2, 2)))]:
        text = jax.jit(f).lower(1, x).compile().as_text()
        names = re.findall(r' while\(.*op_name="([^"]*)"', text)
        assert [list(marks.turns_said(name)) for name in names] == [told]
    assert marks.turns_said("jit(f)/turns 8 of 22/while/body/while") is None


def test_the_name_of_a_kernel_says_its_flops():
    name = "jit(f)/kernels fwd=12 dq=34/vmap(jit(g))/transpose(jvp(splash_{}_mha))/pallas_call"
    told = [marks.kernel_said(name.format(part)) for part in ("fwd", "dq", "dkv")]
    assert told == [12, 34, None] and marks.kernel_said("jit(f)/fwd") is None

    def f(x):
        with marks.kernels(fwd=12, dq=34):
            return jnp.sin(x)

    assert "kernels fwd=12 dq=34/sin" in jax.jit(f).lower(1.0).compile().as_text()
