"""What is on the objects of other libraries and of a model: every namespace of their modules, classes and functions, the tables in these,
the places of Python and PyTorch where all hooks go, and of a model its modules, configurations, parameters and their storages."""

import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

OTHERS = ("importlib", "builtins", "torch", "transformers", "trl", "peft", "accelerate", "kernels", "huggingface_hub")
# What compiles and traces keeps what it has seen, whoever made it.
CACHES = ("torch._library", "torch._dynamo", "torch._inductor", "torch.fx", "torch._subclasses")
TABLES = (dict, OrderedDict)
Space = tuple[str, Mapping[Any, Any]]


class Change(NamedTuple):
    """An entry of a namespace that came, went, or is another object. was, now: the values, None where there is none."""

    where: str
    name: Any
    was: Any
    now: Any


def of_libraries() -> Iterator[Space]:
    """The namespaces of all modules of these libraries that are loaded, and of what stands in them."""
    yield from of_thing("sys.meta_path", sys.meta_path)
    seen = set()
    for name, module in list(sys.modules.items()):
        space = getattr(module, "__dict__", None)
        if name.partition(".")[0] not in OTHERS or name.startswith(CACHES) or type(space) is not dict:
            continue
        yield name, space
        for key, thing in list(space.items()):
            if id(thing) in seen or issubclass(type(thing), types.ModuleType):
                continue
            seen.add(id(thing))
            yield from of_thing(f"{name}.{key}", thing)


def of_thing(where: str, thing: Any) -> Iterator[Space]:
    """The namespace of a class, a function or an object, with the tables in it; or a table itself."""
    if type(thing) in TABLES:
        yield where, thing
    elif type(thing) is list:
        yield where, {type(each).__qualname__: each for each in thing}
    elif "__dict__" in dir(type(thing)):
        yield where, vars(thing)
        yield from ((f"{where}.{name}", table) for name, table in list(vars(thing).items()) if type(table) in TABLES)


def of_model(model: torch.nn.Module) -> Iterator[Space]:
    """The namespaces of a model's modules, configurations, parameters and storages, with the modules' tables of hooks and parts."""
    for name, module in model.named_modules():
        for part, thing in ((name, module), (f"{name}.config", getattr(module, "config", None))):
            if thing is not None:
                yield from of_thing(f"model.{part}", thing)
                yield f"model.{part} itself", {"class": type(thing)}
    for name, parameter in model.named_parameters():
        yield from of_thing(f"model.{name}", parameter)
        yield from of_thing(f"model.{name}.storage", parameter.untyped_storage())


def footprint(*models: torch.nn.Module) -> dict[str, dict]:
    """All of it, by where it is. The values are held, so that none is taken for one that came later."""
    found = {where: dict(space) for where, space in of_libraries()}
    for number, model in enumerate(models):
        found.update((f"{number}: {where}", dict(space)) for where, space in of_model(model))
    return found


def changes(before: Mapping[str, dict], after: Mapping[str, dict]) -> list[Change]:
    """What has changed. Methods that are bound anew and equal numbers and texts are the same; what was loaded since does not count."""
    plain = (int, float, str, tuple, types.MethodType)
    found = []
    for where, old in before.items():
        new = after.get(where, {})
        for name in [*old, *(name for name in new if name not in old)]:
            was, now = old.get(name), new.get(name)
            if was is not now and not (type(was) is type(now) and isinstance(was, plain) and was == now):
                found.append(Change(where, name, was, now))
    return found
