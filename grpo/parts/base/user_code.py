"""Functions and classes of the user's own, named as path/to/file.py:function in the configuration."""

import functools
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType


def load_function(key: str, place: str | None) -> Callable:
    """The function or class of "path/to/file.py:function", given at `key` of the configuration. Raises ValueError."""
    path, _, name = (place or "").rpartition(":")
    if not path or not os.path.isfile(path):
        raise ValueError(f"{key}={place!r}: give path/to/file.py:function, a file that exists")
    try:
        function = getattr(load_module(path), name, None)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{key}={place}: importing it failed: {last_line(error)}") from error
    if not callable(function):
        raise ValueError(f"{key}={place}: {path} has no function {name!r}")
    if inspect.isclass(function) and not any("__call__" in vars(base) for base in function.__mro__):
        raise ValueError(f"{key}={place}: the class has no __call__, to be used as a function")
    return function


@functools.lru_cache
def load_module(path: str) -> ModuleType:
    """The module of a file, executed once a process: of its package or, without one, of its folder.

    It finds the modules beside it after all others. Where another module has its name, it is named by its path.
    """
    file = Path(path).resolve()
    folder, name = file.parent, file.stem
    while (folder / "__init__.py").exists():
        folder, name = folder.parent, f"{folder.name}.{name}"
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    spec = importlib.util.find_spec(name)
    if spec and spec.origin == str(file):
        return importlib.import_module(name)
    name = str(file).replace(".", "_")
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and pickle look it up
    spec.loader.exec_module(module)
    return module


@functools.cache
def instance(kind: type, options: str) -> Callable:
    """The object of a class, made once a process with its options, a JSON text."""
    return kind(**json.loads(options))


def last_line(error: BaseException) -> str:
    """The last line of the traceback, with file and line of the raise."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno})"
