"""What saving costs a run's loop: the same training with and without checkpoints, alternating.

Each round trains twice in one process, with a checkpoint every `--interval` seconds or so, and with
none until the end; which comes first alternates too. What counts is the time from the end of the
second step to that of the last. A machine that others use is now faster, now slower, by more than a
save costs; so the second figure compares steps of one run, those from a save on with those before.

    python benchmarks/saving.py --rounds 5 --interval 20
"""

import argparse
import itertools
import statistics
import tempfile
from pathlib import Path

from shardwise import mesh

mesh.simulate(8)

from shardwise import data, model, run  # noqa: E402
from shardwise.run import reports  # noqa: E402

WINDOW = 15  # steps, in which what a save writes behind the loop is long done


def seconds(folder: Path, steps: int, every: int) -> list[float]:
    """Of each step of a run's loop from the third on."""
    create, loss, _ = model.program(model.Config())
    run.train(
        run.Settings(run=folder, steps=steps, save_every=every),
        create=create,
        loss=lambda params, batch: loss(params, batch),  # which has no key
        batches=data.rows(data.corpus(), 128),
    )
    lines = reports.read(folder / "metrics.jsonl")
    return [b["time"] - a["time"] for a, b in itertools.pairwise(lines[1:])]


def of_saves(each: list[float], every: int) -> list[float]:
    """Seconds that each save adds to the steps after it, against as many before it."""
    starts = range(every - 3, len(each) - WINDOW, every)  # each[0] is the third step's
    usual = (statistics.median(each[i - WINDOW : i]) for i in starts)
    return [sum(each[i : i + WINDOW]) - WINDOW * u for i, u in zip(starts, usual, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--interval", type=float, default=20.0)
    parser.add_argument("--saves", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        each = statistics.mean(seconds(Path(folder) / "probe", 12, 100))
        every = max(2, round(options.interval / each))
        steps = every * options.saves + every // 2
        ratios, added, kinds = [], [], [("saving", every), ("not saving", 10 * steps)]
        for i in range(options.rounds):
            times = {}
            for name, save in kinds[:: -1 if i % 2 else 1]:
                times[name] = seconds(Path(folder) / f"{name} {i}", steps, save)
            ratios.append(sum(times["saving"]) / sum(times["not saving"]))
            added += of_saves(times["saving"], every)
            print(f"round {i}: ratio {ratios[-1]:.3f}", flush=True)
    print(
        f"{steps} steps of {each:.2f} s, a checkpoint every {every}: the loop takes "
        f"{statistics.median(ratios):.3f} of its time without, the median of {options.rounds}.\n"
        f"A save adds {statistics.median(added):.2f} s (median of {len(added)}) to the steps after "
        f"it: {statistics.median(added) / (every * each):.2%} of the time from one to the next."
    )


if __name__ == "__main__":
    main()
