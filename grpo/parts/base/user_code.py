"""The user's own functions and classes, which the configuration names as path/to/file.py:function."""

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
    if inspect.isclass(function) and "__call__" not in dir(function):
        raise ValueError(f"{key}={place}: the class has no __call__, to be used as a function")
    return function


FILES: list[Path] = []  # the user's, loaded so far
ADDED: list[str] = []  # their folders that sys.path did not have


@functools.cache
def load_module(path: str) -> ModuleType:
    """The module of a file, executed once a process: in its package or, without one, in its folder.

    It can import the modules beside it, which are found after all others but for those beside the user's other files.
    If another module has its name or its package's, it is named by its path.
    """
    file = Path(path).resolve()
    folder, name = file.parent, file.stem
    while (folder / "__init__.py").exists():
        name = f"{folder.name}.{name}"
        folder = folder.parent
    forget_others(folder)
    FILES.append(file)

    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # its package has the name of a module
        spec = None
    if spec and spec.origin == str(file):
        return importlib.import_module(name)

    # Execute it, or its package and then it, under a name of its own.
    package, *inner = name.split(".")
    start = folder / package / "__init__.py" if inner else file
    own = str(start).replace(".", "_")
    spec = importlib.util.spec_from_file_location(own, start)
    module = importlib.util.module_from_spec(spec)
    sys.modules[own] = module  # where dataclasses and pickle look it up
    spec.loader.exec_module(module)
    return importlib.import_module(".".join([own, *inner]))


def forget_others(folder: Path):
    """Let imports find the modules of `folder` before those of one name beside the user's other files."""
    others = [other for other in ADDED if other != str(folder)]
    for name, module in list(sys.modules.items()):
        root, place = name.partition(".")[0], getattr(module, "__file__", None) or ""
        is_beside = any(place.startswith((f"{other}/{root}.py", f"{other}/{root}/")) for other in others)
        if is_beside and Path(place) not in FILES and ((folder / root).is_dir() or (folder / f"{root}.py").exists()):
            del sys.modules[name]

    if str(folder) not in sys.path:
        ADDED.append(str(folder))
    late = sorted(ADDED, key=str(folder).__ne__)  # this one first
    sys.path[:] = [entry for entry in sys.path if entry not in ADDED] + late


@functools.cache
def instance(kind: type, options: str) -> Callable:
    """The object of a class, made once a process. Its options are a JSON text."""
    return kind(**json.loads(options))


def last_line(error: BaseException) -> str:
    """The last line of a traceback, with the file and line that raised the error."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno})"
