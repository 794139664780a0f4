"""How a configuration is read: the defaults, under YAML files, under `section.key=value` overrides."""

import difflib
import re
import typing
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pydantic
import yaml

from config import Config, Course, Section, UserError
from grpo.parts.base.require import require

SECTIONS = {key: kind for key, kind in Config.__annotations__.items() if isinstance(kind, type(Section))}
KEYS = [*Config.model_fields, *(f"{section}.{key}" for section, kind in SECTIONS.items() for key in kind.model_fields)]

LIKE = 0.75  # of difflib's ratio, 1 for equal names: "sahpe" and "shape" have 0.8, "stop" and "top_p" 0.67


def load_config(path: str, overrides: list[str]) -> Config:
    """The defaults, under the YAML file `path`, under `section.key=value` overrides. Raises UserError."""
    tree = {}
    for layer in [*read_files(Path(path)), *map(read_override, overrides)]:
        for name in SECTIONS.keys() & layer.keys():
            if not isinstance(layer[name], dict):
                inside = next(iter(SECTIONS[name].model_fields))
                raise UserError(f"{name}={layer[name]!r}: this is a section; give its keys, such as {name}.{inside}")
        tree = merge(tree, layer)
    return validate(tree, path)


def merge(tree: Any, layer: Any) -> Any:
    """The tree of settings, changed by the settings of `layer`. Sections are merged, all else is replaced."""
    if not (isinstance(tree, dict) and isinstance(layer, dict)):
        return layer
    return tree | {key: merge(tree.get(key), value) for key, value in layer.items()}


def dotted_items(tree: dict, above: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every value in a tree of mappings; an empty one is a value."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from dotted_items(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


# ---------------------------------------------------------------- YAML


class Loader(yaml.SafeLoader):
    """YAML where 1e-6 is a number, a date is text, and no key may stand twice."""

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict:
        names = [name.value for name, _ in node.value if isinstance(name, yaml.ScalarNode)]
        for name in names:
            if names.count(name) > 1:
                message = f"found duplicate key {name}"
                raise yaml.constructor.ConstructorError(None, None, message, node.start_mark)
        return super().construct_mapping(node, deep=deep)


DATE = "tag:yaml.org,2002:timestamp"
Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != DATE]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# YAML 1.1 itself wants a point in the number and a sign in the exponent.
EXPONENT = re.compile(r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9]+)[eE][-+]?[0-9]+$")
Loader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, "-+.0123456789")


def read_files(path: Path, above: tuple[Path, ...] = ()) -> list[dict]:
    """The settings of a YAML file, after those of the file that its `base` names, relative to its folder, and so on.

    `above`: the files whose `base` led here. Raises UserError.
    """
    where = "--config " + ", its base ".join(map(str, (*above, path)))
    try:
        layer = yaml.load(path.read_bytes(), Loader) or {}
    except FileNotFoundError:
        raise UserError(f"{where}: no such file") from None
    except Exception as error:  # PyYAML fails in any way where a value does not have the form of its tag
        raise UserError(f"{where}: cannot read the configuration: {error}") from None
    named = isinstance(layer, dict) and all(isinstance(name, str) for name in layer)
    require(
        named and isinstance(layer.get("base"), str | None),
        f"{where}: legal are keys with values, where `base` is the path of a file",
    )
    require(len(above) < 10, f"{where}: the `base` files go round in a circle")
    base = layer.pop("base", None)
    # A section whose keys are all commented out is null in YAML.
    layer = {key: value for key, value in layer.items() if value is not None or key not in SECTIONS}
    return [*read_files(path.parent / base, (*above, path)), layer] if base else [layer]


def read_override(override: str) -> dict:
    """{section: {key: value}} of `section.key=value`, where the value is YAML. Raises UserError."""
    require(
        bool(re.fullmatch(r"[^.=\[\]]+(\.[^.=\[\]]+)*=.*", override, re.DOTALL)),
        f"override {override!r} is not of the form section.key=value",
    )
    key, _, text = override.partition("=")
    section, _, name = key.rpartition(".")
    kind = SECTIONS[section].model_fields.get(name) if section in SECTIONS else None
    try:
        value = yaml.load(text, Loader)
        texts = kind and "str" in str(kind.annotation) and "dict" not in str(kind.annotation)
        if texts and isinstance(value, dict) and text[0] != "{":
            value = text  # that has a colon
        return nest(key, value)
    except Exception as error:  # as above
        raise UserError(f"override {override!r}: its value is not YAML: {' '.join(str(error).split())}") from None


def nest(key: str, value: Any) -> dict:
    """{section: {key: value}} of a dotted key."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


# ---------------------------------------------------------------- values for the keys

IN_A_RECIPE = ("algo.credit", "log.tokens")
LEGAL = {  # of keys whose type does not say it
    "resume": "none, auto, or the folder of a checkpoint; YAML reads no and off as false",
    "reward.functions": "file.py:function, or the name of a reward, whose options go into reward.options",
}


def override(cfg: Config, values: dict[str, Any]) -> Config:
    """A copy of the configuration with other values at dotted keys: {"train.lr": 1e-5}. Raises UserError."""
    tree = cfg.model_dump()
    for key, value in values.items():
        tree = merge(tree, nest(key, value))
    return validate(tree, "the file")


def validate(tree: dict, path: str) -> Config:
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
        unknown = {name: problem["input"] for name, problem in wrong if problem["type"] == "extra_forbidden"}
        raise UserError(explain_unknown(unknown))
    key = max((key for key in KEYS if f"{name}.".startswith(f"{key}.")), key=len)  # beyond it stand types of a union
    section, _, inside = key.rpartition(".")
    kind = (SECTIONS[section] if section else Config).model_fields[inside].annotation
    if typing.get_origin(kind) is dict and name != key:  # of one of its entries
        key = f"{key}.{name.removeprefix(f'{key}.').split('.')[0]}"
    legal = dict.fromkeys(other["msg"] for place, other in wrong if f"{place}.".startswith(f"{key}."))
    must = " or ".join(legal).replace("Input should", "must")
    for known, text in LEGAL.items():
        if f"{key}.".startswith(f"{known}."):
            must = f"legal is {text}"
    raise UserError(f"{key}={problem['input']!r}: {must}")


def explain_unknown(unknown: dict[str, Any]) -> str:
    """What is right in place of unknown keys, a line each; of a section, a line a key where another trainer has any."""
    foreign = foreign_keys()
    lines, more = [], []
    for name, value in unknown.items():
        ours = {key: of_other_trainers(key, foreign) for key, _ in dotted_items({name: value})}
        if name in IN_A_RECIPE:
            lines.append(f"unknown key {name!r}; docs/recipes.md has it, as recipes/token_rewards.patch")
        elif any(here is not None for here in ours.values()):
            more = ["docs/from-other-trainers.md says what else differs"]
            lines += [f"unknown key {key!r}; here {', '.join(here or ['none'])}" for key, here in ours.items()]
        else:
            lines.append(f"unknown key {name!r}; {suggest(name.lower())}")
    return "\n       ".join([*lines, *more])


def foreign_keys() -> dict[str, list[str]]:
    """{key of another trainer, or its last parts, in lower case: our keys}, [] where we have none."""
    found = defaultdict(list)
    for ours, trainers in yaml.safe_load((Path(__file__).parent / "other_trainers.yaml").read_text()).items():
        for theirs in set(" ".join(trainers.values()).lower().split()):
            found[theirs] += [] if ours == "none" else ours.split(", ")
    return found


def of_other_trainers(key: str, foreign: dict[str, list[str]]) -> list[str] | None:
    """Our keys for one of another trainer, of its longest ending in `foreign`; [] if we have none, None if unknown."""
    names = key.lower().split(".")
    endings = (".".join(names[first:]) for first in range(len(names)))
    return next((foreign[ending] for ending in endings if ending in foreign), None)


def suggest(name: str) -> str:
    """What to say to an unknown key: the nearest of its section; else all of these, and those of its name elsewhere."""
    section, _, own = name.rpartition(".")
    kind = Course if section.startswith("schedule.") else SECTIONS.get(section, Config)
    near = nearest(own, kind.model_fields)
    if near:
        return f"the nearest legal key is {f'{section}.{near}'.lstrip('.')!r}"
    elsewhere = "".join(f"there is {key}; " for key in KEYS if key.endswith(f".{own}"))
    return f"{elsewhere}legal {f'in {section} ' if section else ''}are {', '.join(kind.model_fields)}"


def nearest(name: str, legal: Iterable[str]) -> str | None:
    """The legal name that is most like `name`; None where none differs as little as a slip of the keys does."""
    return next(iter(difflib.get_close_matches(name, legal, n=1, cutoff=LIKE)), None)
