"""Empty stand-ins for packages that sglang imports and that a greedy run of a text model on one GPU never calls.

In the bundle this file is ``sitecustomize.py``, so that every process has them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

ABSENT = {"IPython", "openai_harmony", "opentelemetry", "torch_memory_saver", "watchfiles"}


class Anything:
    """An object with every attribute; called with one function alone, it is a decorator that changes nothing."""

    def __init__(self, *args: Any, **named: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *args: Any, **named: Any) -> Any:
        return args[0] if len(args) == 1 and not named and callable(args[0]) else Anything()

    def __mro_entries__(self, bases: Any) -> tuple[()]:
        return ()

    def __getitem__(self, key: Any) -> Any:
        return Anything()

    def __or__(self, other: Any) -> Any:
        return object

    __ror__ = __or__


class AbsentModule(types.ModuleType):
    """A module with every attribute."""

    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the absent packages, and all modules in them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.append(AbsentFinder())
