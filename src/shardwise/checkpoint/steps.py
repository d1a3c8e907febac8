"""The steps in a directory, and the one that is read."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from shardwise.processes.system import of_all, together

_LISTED = 64  # newest steps that processes tell each other


class Steps:
    """Orbax's names of steps; a folder with a number for a name is one only if Orbax wrote it."""

    def __init__(self):
        self._plain = ocp.path.step.standard_name_format()
        self.build_name = self._plain.build_name
        self.find_step = self._plain.find_step

    def find_all(self, base_path: Any) -> Iterator[Any]:
        for found in self._plain.find_all(base_path):
            if (found.path / "_CHECKPOINT_METADATA").exists():
                yield found


def reader(where: str, items: dict[str, bool] | None = None) -> ocp.CheckpointManager:
    """Orbax's manager; `items` says of each item whether its metadata is to be read."""
    kinds = {True: ocp.PyTreeCheckpointHandler, False: ocp.JsonCheckpointHandler}
    handlers = items and {name: kinds[is_tree]() for name, is_tree in items.items()}
    options = ocp.CheckpointManagerOptions(
        create=False, save_interval_steps=0, step_name_format=Steps()
    )
    return ocp.CheckpointManager(where, options=options, item_handlers=handlers or None)


def find(manager: ocp.CheckpointManager, step: int | None) -> tuple[int, list[str]]:
    """The step to read (None: the newest that all processes see), and the names of its items."""
    with together("checkpoint.restore") as facts:
        facts |= {"step": str(step)}
        if not manager.directory.exists():
            raise FileNotFoundError(
                f"checkpoint.restore: no directory {manager.directory}; give the one that "
                f"checkpoint.save wrote to."
            )
        steps = sorted(manager.all_steps())
    common = _common(steps, step)
    newest = common[-1] if common and step is None else step
    if newest in common and not isinstance(newest, bool):
        newest = int(newest)
        return newest, [p.name for p in (manager.directory / str(newest)).iterdir() if p.is_dir()]
    cut_off = [p.name for p in manager.directory.iterdir() if ocp.utils.is_tmp_checkpoint(p)]
    raise FileNotFoundError(
        f"checkpoint.restore: no {'step' if step is None else f'step {step}'} is complete in "
        f"{manager.directory}. Complete steps: {common or 'none'}; incomplete, cut off while "
        f"saving: {sorted(cut_off) or 'none'}."
    )


def _common(steps, step):
    """The steps that all processes see, who may look while another program saves or deletes.

    Of several processes, the newest steps, and the one asked for.
    """
    if jax.process_count() == 1:
        return steps
    near = sorted({*steps[-_LISTED + 1 :], *({step} & set(steps))})
    listed = np.full((_LISTED, 2), -1, np.int32)
    listed[: len(near)] = [(each >> 31, each & (2**31 - 1)) for each in near]
    each = [{(int(a) << 31) | int(b) for a, b in rows if b >= 0} for rows in of_all(listed)]
    return sorted(set.intersection(*each))
