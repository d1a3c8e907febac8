"""What saving costs a run's loop: the same training with and without checkpoints, alternating.

Each round trains twice in one process, with a checkpoint every `--interval` seconds or so, and with
none until the end. What counts is the time from the end of the second step to that of the last.

    python benchmarks/saving.py --rounds 5 --interval 20
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from shardwise import mesh

mesh.simulate(8)

from flax import nnx  # noqa: E402

from shardwise import data, model, run, train  # noqa: E402
from shardwise.run import metrics  # noqa: E402


def seconds(folder: Path, steps: int, every: int) -> float:
    """Of a run's loop."""
    config = model.Config()
    graphdef = nnx.split(nnx.eval_shape(lambda: model.Decoder(config, nnx.Rngs(0))))[0]
    run.train(
        run.Settings(run=folder, steps=steps, save_every=every),
        create=lambda key: nnx.state(model.Decoder(config, nnx.Rngs(params=key))),
        loss=lambda params, batch: train.loss(params, batch, graphdef=graphdef),
        batches=data.rows(data.corpus(), 128),
    )
    lines = metrics.read(folder / "metrics.jsonl")
    return lines[-1]["time"] - lines[1]["time"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--interval", type=float, default=20.0)
    parser.add_argument("--saves", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        each = seconds(Path(folder) / "probe", 12, 100) / 10
        every = max(2, round(options.interval / each))
        steps = every * options.saves + every // 2
        ratios = []
        for i in range(options.rounds):
            times = {}
            for name, save in (("saving", every), ("not saving", 10 * steps)):
                times[name] = seconds(Path(folder) / f"{name} {i}", steps, save)
            ratios.append(times["saving"] / times["not saving"])
            print(f"round {i}: {times}, ratio {ratios[-1]:.3f}", flush=True)
    print(
        f"{steps} steps of {each:.2f} s, a checkpoint every {every}: the loop takes "
        f"{statistics.median(ratios):.3f} of its time without, the median of {options.rounds}"
    )


if __name__ == "__main__":
    main()
