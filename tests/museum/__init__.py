"""A museum of silent bugs: failures of real trainers, each as a one-line mutant of this one.

An exhibit names a function, a piece of its source and what the bug writes there instead. `apply` compiles the function
anew with that piece exchanged and gives the result to the function that runs, wherever it was imported. So a mutant is
the real system with one line changed. If that line is gone, the mutant says so instead of passing.
"""

import dataclasses
import importlib
import inspect
import textwrap
from collections.abc import Mapping
from types import CodeType, FunctionType

VARIABLE = "MUTANT"  # environment variable with the name of the exhibit that a run or a test has


@dataclasses.dataclass(frozen=True)
class Exhibit:
    """One failure and what is expected to notice it."""

    name: str
    what: str  # the failure, in a sentence without its full stop
    function: str  # "module:function" or "module:Class.method" that has the bug
    before: str  # a piece of its source, once in it
    after: str  # what the bug has there
    seen: str = "check"  # who notices it, of runs.RANKING: the "run", by an error, its "start", "check", on its folder
    message: str = ""  # a piece of the error; of `make check` the first item that parts; of a test its id, file::name
    where: str = ""  # trackers' issues, "owner/name#number" or "name#number"; empty: a class of failures without one
    setting: str = "plain"  # key of SETTINGS: the options of the run
    by_bits: bool = False  # whether it is noticed where trainer and vLLM have equal bits alone

    def apply(self):
        """Put the bug into the running process. Raises LookupError where the function lacks the line."""
        self.find().__code__ = self.compile()

    def compile(self) -> CodeType:
        """The code of the function with the bug. Raises LookupError where the function lacks the line."""
        function = self.find()
        source = textwrap.dedent(inspect.getsource(function))
        if source.count(self.before) != 1:
            raise LookupError(f"{self.name}: {source.count(self.before)} times in {self.function}: {self.before}")
        made = {}
        source = source.replace(self.before, self.after)
        exec(compile(source, inspect.getfile(function), "exec"), function.__globals__, made)
        return unwrapped(made[function.__name__]).__code__

    def find(self) -> FunctionType:
        """The function that has the bug."""
        module, _, path = self.function.partition(":")
        found = importlib.import_module(module)
        for name in path.split("."):
            found = inspect.getattr_static(found, name)
        return unwrapped(found)


def put_in(env: Mapping[str, str]):
    """Apply the exhibit or fork that the environment variable MUTANT names, if any, to what this process imported."""
    if env.get(VARIABLE):
        from tests.museum.exhibits import EXHIBITS  # both import this file
        from tests.museum.forks import FORKS

        for exhibit in [EXHIBITS[env[VARIABLE]]] if env[VARIABLE] in EXHIBITS else FORKS[env[VARIABLE]].exhibits():
            exhibit.apply()


def unwrapped(found) -> FunctionType:
    """The function itself, without decorators."""
    if isinstance(found, property):
        found = found.fget
    return inspect.unwrap(getattr(found, "__func__", found))
