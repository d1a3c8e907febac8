import threading

import jax
import jax.numpy as jnp
import pytest

from shardwise import marks


def test_unbound_marks_are_identities_that_leave_no_trace():
    tree = {"w": jnp.ones(2)}
    assert marks.use(tree) is tree
    x = jnp.ones(3)
    assert marks.constrain(x, "logits") is x and marks.stage_boundary(x) is x
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
