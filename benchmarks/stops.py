"""Stops runs by every signal on one, two and four processes; each must end as if never stopped.

Each cell of signal × processes has a run that is stopped at random steps, at one random process,
and goes on: its losses equal those of the uninterrupted run on as many processes, bit for bit. The
stops beyond one for each cell fall on random cells. SIGKILL may cost what came after the last
checkpoint; the other signals nothing.

    python benchmarks/stops.py --stops 20 --seed 1
"""

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from shardwise.run import notes, reports
from shardwise.run.signals import STOPPED

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGKILL)
PROCESSES = (1, 2, 4)
STEPS, EVERY, LEFT = 120, 20, 25  # steps of a run, between checkpoints, after the last stop
SMALL = f"""--steps {STEPS} --save-every {EVERY} --batch 8 --sequence 32 --devices 4
--model.embed 32 --model.layers 2 --model.mlp 64 --model.dropout 0.1 --evaluation.every 0""".split()
ROW = "{:8} {:>9} {:>8} {:>8} {:>7} {:>10} {:>10}"


def start(folder: Path, count: int) -> subprocess.Popen:
    """`shardwise train`, alone or under the launcher; from the newest checkpoint, if any."""
    words = ["train", "--run", str(folder), *SMALL, "--resume"]
    if count > 1:
        words = ["launch", "local", "--processes", str(count), "--", *words]
    own = {"JAX_PLATFORMS": "cpu"}
    with open(f"{folder}.log", "a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "shardwise", *words],
            env=os.environ | own,
            stdout=log,
            stderr=log,
        )


def steps(folder: Path) -> list[tuple[int, float]]:
    """The steps that are done, and their losses."""
    return [(x["step"], x["loss"]) for x in reports.read(folder / "metrics.jsonl")]


def stop(folder: Path, count: int, number: int, draw: random.Random) -> tuple:
    """(process, step, status) of a run that gets a signal after a random step.

    Raises:
      RuntimeError: it was over before, or ended with another status than it should.
    """
    first = len(steps(folder)) + 1  # some of which are done again
    last, which = draw.randint(first, max(first, STEPS - LEFT)), draw.randrange(count)
    child = start(folder, count)
    try:
        while len(found := steps(folder)) < last:
            if child.poll() is not None:
                raise RuntimeError(f"{folder} ended by itself, with {child.returncode}.")
            time.sleep(0.02)
        os.kill(notes.read(folder)[which].pid, number)
        status = child.wait(600)
    finally:
        child.kill()
    killed = -number if count == 1 else 128 + number
    expected = killed if number == signal.SIGKILL else STOPPED
    if status != expected:
        raise RuntimeError(f"{folder} ended with {status}; expected {expected}.")
    return which, len(found), status


def whole(folder: Path, count: int) -> list[tuple[int, float]]:
    """The losses of a run that goes on to its end."""
    if (status := start(folder, count).wait(1200)) != 0:
        raise RuntimeError(f"{folder} ended with {status}:\n{Path(f'{folder}.log').read_text()}")
    return steps(folder)


def cell(root: Path, number: int, count: int, stops: int, wanted: Sequence, draw: random.Random):
    """Stop a run so many times, let it end, and say whether it is the one that was not stopped."""
    name = signal.Signals(number).name.removeprefix("SIG")
    folder, rows = root / f"{name}{count}", []
    for _ in range(stops):
        which, step, status = stop(folder, count, number, draw)
        saved = [int(p.name) for p in (folder / "checkpoints").glob("[0-9]*") if p.name.isdigit()]
        rows.append((name, count, which, step, status, max(saved, default=0)))
    equal = whole(folder, count) == wanted
    for row in rows:
        print(ROW.format(*row, "yes" if equal else "NO"), flush=True)
    return equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    draw = random.Random(options.seed)
    cells = list(itertools.product(SIGNALS, PROCESSES))
    stops = Counter(cells)
    stops.update(draw.choice(cells) for _ in range(options.stops - len(cells)))
    print(json.dumps({"seed": options.seed, "stops": stops.total()}))
    print(ROW.format("signal", "processes", "process", "at step", "status", "goes on at", "equal"))
    with tempfile.TemporaryDirectory() as folder:
        root, wrong = Path(folder), 0
        for count in PROCESSES:
            wanted = whole(root / f"whole{count}", count)
            for number in SIGNALS:
                wrong += not cell(root, number, count, stops[number, count], wanted, draw)
    print(f"{stops.total()} stops in {len(cells)} cells; {wrong} runs differ.")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
