"""What the ledger of costs adds up is what programs send, and the same for arrays and for sizes."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from shardwise import measure, mesh, model, plan, tensor
from shardwise.costs.arrays import parts
from shardwise.costs.ledger import Ledger
from shardwise.costs.sent import sent
from shardwise.costs.stages import of_stages
from shardwise.layouts.placing import array_layouts
from shardwise.layouts.sent import LayoutLedger
from shardwise.measure.counts import Collectives
from shardwise.plan import arrays, compiling

mesh.simulate(8)


def test_gathers_scatters_and_sums_are_those_of_a_program():
    """Of shares of 4×16 numbers, on 2×3 devices."""
    grid, ledger = mesh.make(data=2, fsdp=3), Ledger({"data": 2, "fsdp": 3})

    def function(x):
        whole = jax.lax.all_gather(x, "fsdp", tiled=True)
        part = jax.lax.psum_scatter(whole, "fsdp", tiled=True)
        return jax.lax.psum(jax.lax.psum(part, ("fsdp", "data")), "data")

    run = jax.shard_map(function, mesh=grid, in_specs=P(), out_specs=P(), check_vma=False)
    found = measure.by_axis(measure.collectives(jax.jit(run).lower(jnp.zeros((4, 16)))), grid)
    ledger.sum("gradients", ("fsdp", "data"), 4 * 4 * 16)
    ledger.sum("gradients", ("data",), 4 * 4 * 16)
    ledger.weights(("fsdp",), 3 * 4 * 16, 4, 4, (1, 1))
    ledger.sum("loss", (), 8)  # along no axis nothing is sent
    assert list(ledger.along) == list(found)
    assert ledger.along == pytest.approx({axes: part.ring_bytes for axes, part in found.items()})
    assert [s.roles for s in ledger.sent] == [("data", "fsdp"), ("data",), ("fsdp",)]


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [dict(fsdp=2, context=2, tensor=2), dict(data=2, fsdp=3), dict(fsdp=2, expert=2)],
    ids=str,
)
def test_arrays_and_a_decoder_s_sizes_send_as_much_of_each_kind(sizes, remat):
    mixed = dict(experts=4, capacity_factor=1.0) if "expert" in sizes else {}
    config = model.Config(embed=24, layers=2, heads=4, kv_heads=2, head_dim=6, mlp=36, **mixed)
    each = plan.Roles(**sizes, microbatches=2, remat=remat)
    layout = compiling.layout_of(each, config, mesh.make(**sizes))
    program = compiling.program_of(each, config, 24, 32)
    ledger = LayoutLedger(layout)
    ledger.parameters(array_layouts(layout, program.params), program.params, remat)
    ledger.activations(program.params, program.batch, remat)
    (part,) = parts(each, config, arrays.of_decoder(config), 24, 32)
    # In arrays no router is seen.
    ours = {(s.roles, s.kind): s.bytes for s in sent(part) if s.kind not in ("tokens", "counts")}
    assert {kind for _, kind in ours} >= {"weights", "gradients", "loss"}
    assert ours == pytest.approx(dict(ledger))


@pytest.mark.parametrize("form", ["plain", "sequence", "again"])
def test_bytes_along_tensor_are_those_of_its_collectives(form):
    """A layer has four sums, or four gathers and scatters; and two gathers more, done again."""
    options = dict(sequence=form != "plain", gathers_again=form == "again")
    found = tensor.collectives(4, 2, 32, 24, 3, **options, normed_heads=2)
    counts = {op.kind: op.trips / 3 for op in found["layers"] if len(op.arrays[0].dims) == 3}
    assert (
        counts
        == {
            "plain": {"all-reduce": 4},
            "sequence": {"all-gather": 4, "reduce-scatter": 4},
            "again": {"all-gather": 6, "reduce-scatter": 4},
        }[form]
    )
    told = tensor.bytes_sent(4, 2, 32, 24, 3, **options, normed_heads=2)
    assert len(found["head"]) == {"plain": 1, "sequence": 2, "again": 3}[form]
    for of, ops in found.items():
        assert math.isclose(getattr(told, of), Collectives(ops).ring_bytes)


def test_all_stages_need_as_much_since_they_run_one_program():
    """Dense first layers lie in the first stage alone, and all devices have their tasks."""
    mixed = dict(experts=4, experts_per_token=2, capacity_factor=1.0)
    config = model.Config(embed=64, layers=6, heads=4, kv_heads=4, head_dim=16, mlp=32, **mixed)
    config = dataclasses.replace(config, dense_layers=3, dense_mlp=512)
    each = plan.Roles(stage=2, fsdp=2, microbatches=2, remat=True)
    first, last = (
        of_stages(part, gpu=False) for part in parts(each, config, arrays.of_decoder(config), 8, 32)
    )
    assert first.layer == last.layer > 0 and first.copied == last.copied > 0
