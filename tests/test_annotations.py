"""What people import says its types: every public function, and every public class's methods."""

import importlib
import inspect
import pkgutil

import pytest

import shardwise

ROOMS = [f"shardwise.{module.name}" for module in pkgutil.iter_modules(shardwise.__path__)]
ROOMS += ["shardwise_book.figures", "shardwise_book.puzzles"]


def public(room):
    """{name: function} of what the room offers: functions, methods, constructors written out."""
    module = importlib.import_module(room)
    own = [n for n, x in vars(module).items() if getattr(x, "__module__", "") == module.__name__]
    names = getattr(module, "__all__", [name for name in own if not name.startswith("_")])
    found = {}
    for name in names:
        thing = getattr(module, name)
        if inspect.isfunction(thing):
            found[name] = thing
        elif inspect.isclass(thing):
            made = {"__init__"} if not hasattr(thing, "__dataclass_fields__") else set()
            for key, member in vars(thing).items():
                member = getattr(member, "__func__", member)
                if inspect.isfunction(member) and (not key.startswith("_") or key in made):
                    found[f"{name}.{key}"] = member
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_public_signatures_have_types(room):
    missing = []
    for name, function in public(room).items():
        signature = inspect.signature(inspect.unwrap(function))
        given = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
        missing += [f"{name}({p.name})" for p in given if p.annotation is p.empty]
        if signature.return_annotation is signature.empty and not name.endswith("__init__"):
            missing.append(f"{name}() -> ?")
    assert missing == []
