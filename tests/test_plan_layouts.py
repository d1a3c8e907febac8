"""The planner proposes what `layouts.LAYOUTS` has, or it is said here why it does not."""

import dataclasses

import pytest

from shardwise import layouts, mesh, model, plan
from shardwise.layouts.layout import ROLES
from shardwise.plan import compiling, roles

mesh.simulate(8)
ROWS, LENGTH = 64, 128
CONFIG = model.Config(layers=8, heads=8, kv_heads=8, head_dim=8)
MIXTURE = dict(experts=8, experts_per_token=2, capacity_factor=1.25)
# {(setting, value): why no candidate has it}.
NOT_PLANNED = {
    ("by", "compiler"): "formulas are of what is written out; what is inserted has to be compiled",
    ("zero", 1): "weights and gradients whole in a step: the fitted formula of memory has neither",
    ("zero", 2): "weights whole in a step: the fitted formula of memory has none",
    ("sequence", False): "beside tensor it sends as many bytes, and keeps activations whole",
    ("attention", "ring"): "zigzag sends as many bytes, and divides causal work evenly",
    ("attention", "striped"): "zigzag sends as many bytes, and divides causal work as evenly",
    ("attention", "all_gather"): "it keeps K and V of the whole sequence",
    ("attention", "ulysses"): "its limit is the kv heads left by tensor; seconds are of rings",
    ("dispatch", "gather"): "it sends more, while choices times capacity are below the devices",
    (
        "dispatch",
        "ragged",
    ): "what it sends depends on data; it was never run where it pays",
    ("kernel", None): "attention keeps all of its scores",
    ("schedule", "zb_h1"): "seconds and memory are those of 1f1b",
}


@pytest.fixture(scope="module")
def proposed():
    """{whether with experts: roles of all candidates on eight chips}."""
    configs = {False: CONFIG, True: dataclasses.replace(CONFIG, **MIXTURE)}
    plans = {mixed: plan.plan(c, "v5e:2x4", ROWS, LENGTH) for mixed, c in configs.items()}
    return {mixed: {c.roles for c in (*p.fitting, *p.too_large)} for mixed, p in plans.items()}


def others(layout, each):
    """{(setting, value)} of a layout that the planner's of these roles has otherwise."""
    theirs = compiling.layout_of(each, CONFIG, layout.mesh)
    names = [field.name for field in dataclasses.fields(layout) if field.name != "mesh"]
    found = {(n, getattr(layout, n)) for n in names if getattr(layout, n) != getattr(theirs, n)}
    cut_by_hand = layout.context and layout.by == "hand"  # else there is no form of attention
    return found if cut_by_hand else {pair for pair in found if pair[0] != "attention"}


@pytest.mark.parametrize("name", layouts.LAYOUTS)
def test_a_layout_is_proposed_but_for_what_is_said_not_to_be(name, proposed):
    layout = layouts.LAYOUTS[name](8)
    sizes = {role: layout.size(role) for role in layout.roles()}
    each = roles.Roles(**sizes, microbatches=layout.microbatches)
    assert str(each) in map(str, proposed[bool(layout.expert)])  # in any chunks of the loss
    assert list(each.sizes) == list(layout.mesh.shape)  # which is the order of the links too
    assert others(layout, each) <= NOT_PLANNED.keys()


def test_nothing_is_said_in_vain():
    found = set()
    for make in layouts.LAYOUTS.values():
        layout = make(8)
        found |= others(layout, roles.Roles(**{role: layout.size(role) for role in ROLES}))
    assert NOT_PLANNED.keys() <= found


def test_every_role_has_its_number_of_devices():
    assert set(roles.ORDER) == set(ROLES)
    assert set(ROLES) <= {field.name for field in dataclasses.fields(roles.Roles)}
