"""How a configuration is read: the defaults, under YAML files, under `section.key=value` overrides."""

import difflib
import functools
import re
import typing
from pathlib import Path
from typing import Any

import omegaconf
import pydantic
import yaml

from config import Config, Section, UserError

SECTIONS = {key: kind for key, kind in Config.__annotations__.items() if isinstance(kind, type(Section))}
KEYS = [*Config.model_fields, *(f"{section}.{key}" for section, kind in SECTIONS.items() for key in kind.model_fields)]


def load_config(path: str, overrides: list[str]) -> Config:
    """The defaults, under the YAML file `path`, under `section.key=value` overrides. Raises UserError."""
    layers = [read_file(Path(path)), *map(read_override, overrides)]
    tree = omegaconf.OmegaConf.create(functools.reduce(merged, layers))
    try:
        unset = sorted(omegaconf.OmegaConf.missing_keys(tree))
        tree = omegaconf.OmegaConf.to_container(tree, resolve=True)
    except omegaconf.errors.OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    if unset:
        raise UserError(f"{', '.join(unset)}: set to ???; give a value")
    return validated(tree, path)


def with_sections(layer: dict) -> dict:
    """The layer, whose sections hold keys. Raises UserError."""
    for name in SECTIONS.keys() & layer.keys():
        if not isinstance(layer[name], dict):
            inside = next(iter(SECTIONS[name].model_fields))
            raise UserError(f"{name}={layer[name]!r}: this is a section; give its keys, such as {name}.{inside}")
    return layer


def merged(tree: Any, layer: Any) -> Any:
    """A tree of settings under another one that changes it."""
    if not (isinstance(tree, dict) and isinstance(layer, dict)):
        return layer
    return tree | {key: merged(tree.get(key), value) for key, value in layer.items()}


def read_file(path: Path, above: tuple[Path, ...] = ()) -> dict:
    """What a YAML file says, over what the file says that its `base` names, seen from its folder. Raises UserError.

    `above`: the files that lead to it.
    """
    where = "--config " + ", its base ".join(map(str, (*above, path)))
    try:
        layer = omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.load(path))
    except FileNotFoundError:
        raise UserError(f"{where}: no such file") from None
    except Exception as error:  # PyYAML's and OmegaConf's own errors share no base class
        raise UserError(f"{where}: cannot read the configuration: {error}") from None
    base = layer.pop("base", None) if isinstance(layer, dict) else None
    if not isinstance(layer, dict) or not isinstance(base, str | None):
        raise UserError(f"{where}: legal are keys with values, where `base` is the path of a file")
    if len(above) == 10:
        raise UserError(f"{where}: the `base` files go round in a circle")
    # A section whose keys are all commented out is null in YAML.
    layer = with_sections({key: value for key, value in layer.items() if value is not None or key not in SECTIONS})
    return merged(read_file(path.parent / base, (*above, path)), layer) if base else layer


def read_override(override: str) -> dict:
    """{section: {key: value}} of `section.key=value`. Raises UserError."""
    if not re.fullmatch(r"[^.=\[\]]+(\.[^.=\[\]]+)*=.*", override, re.DOTALL):
        raise UserError(f"override {override!r} is not of the form section.key=value")
    try:
        layer = omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.from_dotlist([override]))
    except Exception as error:  # as above
        raise UserError(f"override {override!r}: its value is not YAML: {' '.join(str(error).split())}") from None
    return with_sections(layer)


def to_yaml(cfg: Config) -> str:
    """The configuration as YAML, every key in it."""
    return yaml.safe_dump(cfg.model_dump(), sort_keys=False, allow_unicode=True)


# ---------------------------------------------------------------- values for the keys


def changed(cfg: Config, values: dict[str, Any]) -> Config:
    """A copy of the configuration with other values at dotted keys: {"train.lr": 1e-5}. Raises UserError."""
    tree = cfg.model_dump()
    for key, value in values.items():
        *sections, name = key.split(".")
        functools.reduce(lambda node, section: node.setdefault(section, {}), sections, tree)[name] = value
    return validated(tree, "the file")


def validated(tree: dict, path: str) -> Config:
    """The configuration of a tree of plain values. Raises UserError that names the key and what is legal."""
    try:
        return Config.model_validate(tree)
    except pydantic.ValidationError as error:
        errors = [(".".join(map(str, problem["loc"])), problem) for problem in error.errors()]
    missing = sorted(name for name, problem in errors if problem["type"] == "missing")
    wrong = [(name, problem) for name, problem in errors if problem["type"] != "missing"]
    if not wrong:
        raise UserError(f"{', '.join(missing)}: not set; give it in {path} or as {missing[0]}=...")
    name, problem = wrong[0]
    if problem["type"] == "extra_forbidden":
        raise UserError(f"unknown key {name!r}; the nearest legal key is {nearest(name.lower(), KEYS)!r}")
    key = max((key for key in KEYS if f"{name}.".startswith(f"{key}.")), key=len)  # beyond it stand types of a union
    section, _, inside = key.rpartition(".")
    kind = (SECTIONS[section] if section else Config).model_fields[inside].annotation
    if typing.get_origin(kind) is dict and name != key:  # of one of its entries
        key = f"{key}.{name.removeprefix(f'{key}.').split('.')[0]}"
    legal = dict.fromkeys(other["msg"] for place, other in wrong if f"{place}.".startswith(f"{key}."))
    raise UserError(f"{key}={problem['input']!r}: {' or '.join(legal).replace('Input should', 'must')}")


def nearest(name: str, legal: list[str]) -> str:
    """The legal name most like `name`."""
    return difflib.get_close_matches(name, legal, n=1, cutoff=0.0)[0]
