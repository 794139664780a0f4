"""Reads a configuration: YAML files and `section.key=value` overrides over the defaults of dataclasses.

Knows no key of its own: which keys there are is for the dataclasses to say.
"""

import dataclasses
import difflib
import math
import operator
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import omegaconf


class UserError(Exception):
    """Something the user can mend: what is wrong, which key, what would be legal. Ends the program with exit code 2."""


class TrainingError(Exception):
    """The run cannot go on with right results. The message is all a user needs; exit code 1."""


class RankError(TrainingError):
    """A failure that this rank alone may know of, so this rank says it."""


def load_config(schema: type, path: str, overrides: list[str]) -> Any:
    """The defaults of `schema`, a dataclass of dataclasses, under the YAML file `path`, under the overrides.

    A file that says `base: other.yaml` (seen from its own folder) changes what that one says. Raises UserError.
    """
    found, legal = omegaconf.OmegaConf.structured(schema), dict(config_items(schema()))
    try:
        for layer in [*read_files(path), *map(read_override, overrides)]:
            for key, value in settings(layer, legal):
                if key not in legal:
                    near = nearest(key.lower(), legal)
                    raise UserError(f"unknown key {key!r}; the nearest legal key is {near!r}")
                if dataclasses.is_dataclass(legal[key]):
                    if value in (None, {}):  # a section whose keys are all commented out
                        continue
                    inside = next(iter(vars(legal[key])))
                    raise UserError(f"{key}={value!r}: this is a section; give its keys, such as {key}.{inside}")
                omegaconf.OmegaConf.update(found, key, value)
        missing = sorted(omegaconf.OmegaConf.missing_keys(found))
        if missing:
            raise UserError(f"{', '.join(missing)}: not set; give it in {path} or as {missing[0]}=...")
        return omegaconf.OmegaConf.to_object(found)
    except omegaconf.errors.OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}") from None


def read_files(path: str) -> list[dict]:
    """What the YAML file says, and before it what the files that it is based on say. Raises UserError."""
    layers, file = [], Path(path)
    while file is not None:
        where = f"--config {path}" + (f", its base {file}" if layers else "")
        try:
            layer = omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.load(file))
        except FileNotFoundError:
            raise UserError(f"{where}: no such file") from None
        except Exception as error:  # PyYAML's and OmegaConf's own errors share no base class
            raise UserError(f"{where}: cannot read the configuration: {error}") from None
        base = layer.pop("base", None) if isinstance(layer, dict) else None
        if not isinstance(layer, dict) or not isinstance(base, str | None):
            wrong = f"base={base!r}" if base else "the whole is a list"
            raise UserError(f"{where}: {wrong}; legal are keys with values, where `base` is the path of a file")
        layers.insert(0, layer)
        if len(layers) > 10:
            raise UserError(f"--config {path}: its `base` files go round in a circle")
        file = file.parent / base if base else None
    return layers


def read_override(override: str) -> dict:
    """{section: {key: value}} of `section.key=value`. Raises UserError."""
    if not re.fullmatch(r"[^.=\[\]]+(\.[^.=\[\]]+)*=.*", override, re.DOTALL):
        raise UserError(f"override {override!r} is not of the form section.key=value")
    try:
        return omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.from_dotlist([override]))
    except Exception as error:  # as above
        raise UserError(f"override {override!r}: its value is not YAML: {' '.join(str(error).split())}") from None


def settings(layer: dict, legal: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of all that a layer sets; a dict that is itself the value of a key stays whole."""
    for name, value in layer.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and (key not in legal or dataclasses.is_dataclass(legal[key])):
            yield from settings(value, legal, f"{key}.")
        else:
            yield key, value


def config_items(cfg: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every key, sections included."""
    for name, value in vars(cfg).items():
        yield f"{prefix}{name}", value
        if dataclasses.is_dataclass(value):
            yield from config_items(value, f"{prefix}{name}.")


def check_choices(cfg: Any, choices: dict[str, tuple]) -> None:
    """Raises UserError for a key with a value that `choices`, {key: legal values}, does not list."""
    for key, legal in choices.items():
        if get(cfg, key) not in legal:
            raise UserError(f"{key}={get(cfg, key)!r}: legal here is {' | '.join(map(str, legal))}")


def check_numbers(cfg: Any, limit: float, may_be_inf: tuple[str, ...], **bounds: dict[float, str]) -> None:
    """Raises UserError for a number outside ±limit (inf is legal for the keys `may_be_inf`), or outside its bounds:
    `at_least`, `at_most`, `above` or `below`, each {bound: keys with spaces between}. None is within all of them."""
    for key, value in config_items(cfg):
        unbounded = type(value) not in (int, float) or (value == math.inf and key in may_be_inf)
        if not (unbounded or abs(value) <= limit):
            raise UserError(f"{key}={value}: must be a number within ±{limit}")
    holds = {"at_least": operator.ge, "at_most": operator.le, "above": operator.gt, "below": operator.lt}
    for word, keys_of in bounds.items():
        for bound, keys in keys_of.items():
            for key in keys.split():
                value = get(cfg, key)
                if value is not None and not holds[word](value, bound):
                    raise UserError(f"{key}={value}: must be {word.replace('_', ' ')} {bound}")


def nearest(name: str, legal: Iterable[str]) -> str:
    """The legal name most like `name`."""
    return difflib.get_close_matches(name, legal, n=1, cutoff=0.0)[0]


def get(cfg: Any, key: str) -> Any:
    """Value at a dotted key."""
    for part in key.split("."):
        cfg = getattr(cfg, part)
    return cfg


def to_yaml(cfg: Any) -> str:
    """The configuration as YAML, every key in it."""
    return omegaconf.OmegaConf.to_yaml(omegaconf.OmegaConf.structured(cfg))
