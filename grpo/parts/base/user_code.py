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


FOLDERS: list[str] = []  # of the user's files, last on sys.path


@functools.cache
def load_module(path: str) -> ModuleType:
    """The module of a file, executed once a process: in its package or, without one, in its folder.

    It can import the modules beside it, which are found after all others, but before those beside the user's other
    files. If another module has its name or its package's, it is named by its path.
    """
    file = Path(path).resolve()
    folder, name = file.parent, file.stem.replace(".", "_")
    while (folder / "__init__.py").exists():
        name = f"{folder.name}.{name}"
        folder = folder.parent
    package, *inner = name.split(".")
    prefer(str(folder), package)

    start = folder / package / "__init__.py" if inner else file
    spec = importlib.util.find_spec(package)
    if not spec or spec.origin != str(start):
        # Another module has this name: execute the file or its package under a name of its own.
        package = str(start).replace(".", "_")
        spec = importlib.util.spec_from_file_location(package, start)
        module = importlib.util.module_from_spec(spec)
        sys.modules[package] = module  # where dataclasses and pickle look it up
        spec.loader.exec_module(module)
    return importlib.import_module(".".join([package, *inner]))


def prefer(folder: str, own):
    """Let imports find the modules in `folder` before those beside the user's other files; installed ones come first.

    A loaded module from beside another file is forgotten where this folder has one of the same name; what has imported
    it keeps it. `own` is the module that is being loaded, which gets a name of its own in such a case.
    """
    sys.path[:] = [entry for entry in sys.path if entry not in FOLDERS]
    others = [other for other in FOLDERS if other != folder]
    beside = {entry.stem for entry in Path(folder).iterdir()} - {own}
    for name, module in list(sys.modules.items()):
        root = name.partition(".")[0]
        file = getattr(module, "__file__", None) or ""
        if root in beside and file.startswith(tuple(f"{other}/{root}" for other in others)):
            del sys.modules[name]

    FOLDERS[:] = others if folder in sys.path else [folder, *others]
    sys.path += FOLDERS


@functools.cache
def instance(kind: type, options: str) -> Callable:
    """The object of a class, made once a process. Its options are a JSON text."""
    return kind(**json.loads(options))


def last_line(error: BaseException) -> str:
    """The last line of a traceback, with the file and line that raised the error."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno})"
