"""The price of the same bits: exact layouts beside the ordinary ones, in one process.

Run from the project's root: `pip install -e . -r benchmarks/requirements.txt`, then
`python benchmarks/exact.py`, some five minutes on two cores.

Full training steps (loss, gradients, AdamW) of one decoder on eight simulated CPU devices, the two
in turn. Ratios are of processor time, of a step and up to the end of the first one, in which every
device compiles its own copy of an exact step's programs; bytes sent are by formula, which
`tests/test_exact.py` counts in the compiled programs. Ends with an error if the bits of the exact
layouts differ from each other.
"""

import argparse
import dataclasses
import time

import decoders
import jax

from shardwise import layouts, mesh
from shardwise.run import hashes

DEVICES, BLOCKS = 8, 8


def trained(layout, steps):
    """(hashes of the parameters, seconds to the end of the first step, of a later one)."""
    bench, times = decoders.of(layout), []
    given = bench.create, decoders.OPTIMIZER, jax.random.key(decoders.SEED)
    begun = time.process_time()
    params, state = layouts.init(layout, *given)
    step = layouts.step(layout, bench.loss, decoders.OPTIMIZER, has_aux=bench.mixed, check=False)
    for _ in range(steps):
        params, state, *_ = step(params, state, decoders.batch())
        jax.block_until_ready((params, state))
        times.append(time.process_time())
    return hashes.hashes(params), times[0] - begun, (times[-1] - times[0]) / (steps - 1)


def sent(layout):
    """The bytes that a device sends in a step, by formula."""
    bench = decoders.of(layout)
    given = layout, bench.abstract, decoders.batch(), decoders.OPTIMIZER, bench.config.remat
    return sum(layouts.predict(*given).sent.values())


def main():
    mesh.simulate(DEVICES)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=["data", "hybrid", "fsdp"])
    parser.add_argument("--steps", type=int, default=6)
    options, found = parser.parse_args(), []
    print(f"{'layout':16} {'sent':>6} {'first step':>11} {'step':>6}   exact / ordinary")
    for name in options.only:
        ordinary = layouts.LAYOUTS[name](DEVICES)
        exact = dataclasses.replace(ordinary, exact=BLOCKS)
        (_, first, each), (bits, *times) = (trained(x, options.steps) for x in (ordinary, exact))
        found.append(bits)
        bytes_of = sent(exact) / sent(ordinary)
        print(f"{name:16} {bytes_of:6.2f} {times[0] / first:11.2f} {times[1] / each:6.2f}")
    if any(bits != found[0] for bits in found):
        raise SystemExit("the exact layouts have different bits")


if __name__ == "__main__":
    main()
