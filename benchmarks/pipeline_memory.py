"""Bytes that each device of a pipeline holds, beside those that the table of tasks says it holds.

A small decoder on four devices. `pairs` is the simulator's `peak_live`: of how many (stage,
microbatch) pairs a device holds activations at once. `predicted` is the most that the residuals of
such pairs take, with what waits between I and W, by the shapes that the stages' programs return.
`held` is what is alive on the device after any program of a run, beyond weights and sums of
gradients: also activations and cotangents on their way. `temporary` is the most that a program of
the second stage takes beyond that while it runs: what remat computes again is there.
"""

import functools

import jax
from flax import nnx

from shardwise import cut, data, measure, mesh, model, pipeline, schedules
from shardwise.model import Config, Decoder

DEVICES, MICROBATCHES, ROWS, LENGTH = 4, 8, 2, 128
HEAD = ("schedule", "remat", "pairs", "predicted kB", "held kB", "temporary kB")


def report():
    """The table of all schedules, without and with remat; numbers for each device."""
    rows = [row(name, remat) for name in schedules.SCHEDULES for remat in (False, True)]
    title = f"{DEVICES} devices, {MICROBATCHES} microbatches of {ROWS} rows of {LENGTH} bytes"
    return title, [HEAD, *rows]


def row(name, remat):
    """The cells of one schedule; asserts that what is held is what the table says, and a little.

    Raises:
      AssertionError: a device holds less than the residuals, or more than these and everything
        that can be on its way.
    """
    schedule = schedules.spread(name, DEVICES, MICROBATCHES)
    function, params, batch = _decoder(schedule, remat)
    plan = function.plan(params, batch)
    predicted = [_predicted(plan, order) for order in schedule.tasks]
    function(params, batch)
    temporary = _temporary(function, params, batch)
    held = _held(function, plan, params, batch)
    for device, (low, found) in enumerate(zip(predicted, held, strict=True)):
        stages = [s for s, home in enumerate(schedule.device_of) if home == device]
        way = 2 * sum(MICROBATCHES * _bytes(_crossing(plan, s)) for s in stages)
        assert low <= found <= low + way, f"{name}, device {device}: {low}, {found}, {low + way}"
    live = schedules.timeline(schedule).peak_live
    return (
        name,
        "remat" if remat else "",
        _listed(live),
        *map(_kb, (predicted, held, [temporary])),
    )


def _decoder(schedule, remat):
    """(function, params, batch): a decoder in as many stacks of layers as there are stages."""
    graphdef, flat = _weights(schedule.stages, remat)
    loss = functools.partial(model.loss, graphdef=graphdef)
    batch = next(data.batches(MICROBATCHES * ROWS, LENGTH))
    grid = mesh.make(stage=DEVICES)
    function = pipeline.value_and_grad(loss, grid, schedule, MICROBATCHES)
    return function, pipeline.place(flat, function, batch), batch


@functools.cache
def _weights(stages, remat):
    config = Config(
        embed=32, layers=8, heads=2, kv_heads=1, head_dim=16, mlp=64, stages=stages, remat=remat
    )
    return nnx.split(jax.jit(lambda: Decoder(config, nnx.Rngs(0)))())


def _predicted(plan, order):
    """Bytes of one device: at most this much is live at once; its own order alone decides.

    Of a pair, from F to its last task; and what I has left for W, from I to W.
    """
    live = peak = 0
    for stage, kind, _ in order:
        kept, pending = _sizes(plan, stage)
        live += {"F": kept, "I": pending}.get(kind, 0)
        peak = max(peak, live)
        live -= {"B": kept, "W": kept + pending}.get(kind, 0)
    return peak


def _sizes(plan, s):
    """(bytes of a pair's residuals, bytes of what I leaves for W) of stage `s`."""
    stage, halves = plan.stages[s].stage, plan.stages[s].halves
    cots = _cotangents(plan, s)
    kept = jax.eval_shape(halves.forward, stage.params, stage.inputs, stage.carry)[1]
    pending = jax.eval_shape(halves.to_input, stage.params, stage.inputs, kept, cots)[1]
    return _bytes((stage.inputs, kept)), _bytes(pending)


def _cotangents(plan, s):
    """Shapes of the cotangents that stage `s` is given."""
    stage = plan.stages[s].stage
    return [stage.outputs[i] for i in cut.differentiable(stage)]


def _crossing(plan, s):
    """What can be on its way to stage `s` or from it, for each microbatch: both directions."""
    stage = plan.stages[s].stage
    return stage.carry, stage.inputs, stage.outputs


def _held(function, plan, params, batch):
    """For each rank the most bytes alive after any of its programs, in one run."""
    devices = [stage.mesh.devices.item() for stage in plan.stages]
    peaks, before = dict.fromkeys(devices, 0), _alive(set(devices))
    for device, stage in zip(devices, plan.stages, strict=True):
        before[device] += _bytes(jax.eval_shape(stage.zeros))

    def counted(device, program):
        def run(*values):
            out = jax.block_until_ready(program(*values))
            peaks[device] = max(peaks[device], _alive({device})[device] - before[device])
            return out

        return run

    for device, stage in zip(devices, plan.stages, strict=True):
        stage.kinds.update({kind: counted(device, f) for kind, f in stage.kinds.items()})
    function(params, batch)
    return [peaks[device] for device in mesh.devices()[:DEVICES]]


def _alive(devices):
    """{device: bytes} of all arrays that Python can still reach; two of one buffer count once.

    Arrays of other devices are not looked into: their threads may be deleting them.
    """
    buffers = {}
    for x in jax.live_arrays():
        if x.sharding.device_set.isdisjoint(devices) or x.is_deleted():
            continue
        # Not by addressable_shards: on some releases they keep the array alive until the next gc.
        assert len(x.sharding.device_set) == 1, "a stage of this benchmark has one device"
        (device,) = x.sharding.device_set
        buffers[device, x.unsafe_buffer_pointer()] = x.nbytes
    found = dict.fromkeys(devices, 0)
    for (device, _), size in buffers.items():
        found[device] += size
    return found


def _temporary(function, params, batch):
    """The temporaries of the second stage's program that has most of them."""
    found = pipeline.programs(function, params, batch).items()
    compiled = [lowered.compile() for (stage, _), lowered in found if stage == 1]
    return max(measure.bytes_per_device(program).temporaries for program in compiled)


def _bytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _kb(sizes):
    return _listed(round(size / 1000) for size in sizes)


def _listed(numbers):
    return " ".join(str(number) for number in numbers)
