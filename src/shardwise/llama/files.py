"""The files of a folder: which array is in which, and what their headers say."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SHOWN = 10  # of the names that differ; whole models may


def library() -> Any:
    """The module safetensors.

    Raises:
      ImportError: it is not installed.
    """
    try:
        import safetensors
    except ImportError:
        raise ImportError(
            "llama: needs safetensors: pip install 'shardwise[safetensors]'"
        ) from None
    return safetensors


@contextlib.contextmanager
def opened(folder: str | Path) -> Iterator[dict[str, Any]]:
    """{name: the array in its file}, of which slices are read as they are asked for.

    Raises:
      FileNotFoundError: no weights, or not all files that the index names.
      ValueError: the index and the files do not have the same names.
    """
    with contextlib.ExitStack() as stack:
        found, index = {}, _index(Path(folder))
        for path in _paths(Path(folder), index):
            file = stack.enter_context(library().safe_open(path, framework="np"))
            found |= {name: file.get_slice(name) for name in file.keys()}
        if index is not None:
            check_names(str(Path(folder, INDEX)), set(index), set(found))
        yield found


def _index(folder):
    """{name: file} of the index, None where there is none."""
    path = folder / INDEX
    return json.loads(path.read_text())["weight_map"] if path.exists() else None


def _paths(folder, index):
    names = [_SINGLE] if index is None else sorted(set(index.values()))
    for name in names:
        if not (folder / name).exists() or Path(name).name != name:
            there = sorted(p.name for p in folder.glob("*.*") if p.name != "config.json")
            raise FileNotFoundError(
                f"llama: no {folder / name}{'' if index is None else f', which {INDEX} names'}. "
                f"There are {', '.join(there[:_SHOWN]) or 'no other files'}; weights are read from "
                f"{_SINGLE}, or from the files that {INDEX} names."
            )
    return [folder / name for name in names]


def check_names(label: str, wanted: set[str], found: set[str]) -> None:
    """Raise ValueError if names differ, with what is missing and what is too much."""
    if wanted == found:
        return
    told = [
        f"{what} {', '.join(sorted(names)[:_SHOWN])}"
        + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        for what, names in (("missing", wanted - found), ("unexpected", found - wanted))
        if names
    ]
    raise ValueError(f"llama: {label}, names of arrays: " + "; ".join(told) + ".")


def check_arrays(label: str, shapes: Mapping[str, tuple[int, ...]], found: dict[str, Any]) -> None:
    """Raise ValueError for an array of another shape, or of numbers that are not floating."""
    told = []
    for name, shape in shapes.items():
        theirs, dtype = tuple(found[name].get_shape()), found[name].get_dtype()
        if theirs != shape:
            told.append(f"{name} is {list(theirs)}, expected {list(shape)}")
        elif dtype not in ("F64", "F32", "BF16", "F16"):
            told.append(f"{name} is of {dtype}, expected F32, BF16 or F16")
    if told:
        more = f"; and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
        raise ValueError(f"llama: {label}: " + "; ".join(told[:_SHOWN]) + f"{more}.")


def write(path: Path, arrays: dict[str, Any]) -> None:
    """Write one file, said to be of PyTorch, whose axes these are: transformers asks."""
    from safetensors.numpy import save_file

    save_file(arrays, path, metadata={"format": "pt"})
