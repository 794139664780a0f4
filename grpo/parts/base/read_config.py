"""How a configuration is read: YAML files lie over the defaults, and `section.key=value` overrides over the files."""

import difflib
import functools
import re
import typing
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pydantic
import yaml

from config import Config, Course, Section, UserError
from grpo.parts.base.require import require

SECTIONS = {key: kind for key, kind in Config.__annotations__.items() if isinstance(kind, type(Section))}
KEYS = [*Config.model_fields, *(f"{section}.{key}" for section, kind in SECTIONS.items() for key in kind.model_fields)]
TABLES = yaml.safe_load((Path(__file__).parent / "options.yaml").read_text())  # of options of Megatron-core and vLLM
LIKE = 0.75  # of difflib's ratio, 1 for equal names: "sahpe" and "shape" have 0.8, "stop" and "top_p" 0.67


def load_config(path: str, overrides: list[str]) -> Config:
    """The configuration of the YAML file `path` under `section.key=value` overrides. Raises UserError."""
    layers = read_files(Path(path)) + [read_override(override) for override in overrides]
    tree = {}
    wrong = []
    for layer in layers:
        for name in SECTIONS.keys() & layer.keys():
            if not isinstance(layer[name], dict):
                keys = ", ".join(SECTIONS[name].model_fields)
                wrong.append(f"{name}={layer.pop(name)!r}: this is a section; its keys are {keys}")
        tree = merge(tree, layer)

    try:
        cfg = validate(tree, path)
    except UserError as error:
        wrong.append(str(error))
    if wrong:
        raise UserError("\n       ".join(wrong))
    return cfg


def override(cfg: Config, values: dict) -> Config:
    """A copy of the configuration with other values at dotted keys: {"train.lr": 1e-5}. Raises UserError."""
    tree = cfg.model_dump()
    for key, value in values.items():
        tree = merge(tree, nest(key, value))
    return validate(tree, "the file")


def validate(tree: dict, path) -> Config:
    """The configuration of a tree of plain values. Raises UserError that names the key and what is legal."""
    try:
        return Config.model_validate(tree)
    except pydantic.ValidationError as error:
        problems = error.errors()

    missing, unknown, wrong = [], {}, []
    for problem in problems:
        name = ".".join(map(str, problem["loc"]))
        # A key of ours may be a section of another trainer.
        section = problem["input"] if name in KEYS and isinstance(problem["input"], dict) else {}
        if problem["type"] == "missing":
            missing.append(name)
        elif problem["type"] == "extra_forbidden" or any(here(f"{name}.{key}") for key in section):
            unknown[name] = problem["input"]
        else:
            wrong.append(problem)

    if unknown:
        raise UserError(explain_unknown(unknown))
    if wrong:
        raise UserError(explain_wrong(wrong))
    raise UserError(f"{', '.join(missing)}: not set; give it in {path} or as {missing[0]}=...")


# ---------------------------------------------------------------- trees of settings


def merge(tree, layer):
    """The tree of settings, changed by the settings of `layer`. Sections are merged, all else is replaced."""
    if not (isinstance(tree, dict) and isinstance(layer, dict)):
        return layer
    return tree | {key: merge(tree.get(key), value) for key, value in layer.items()}


def nest(key: str, value) -> dict:
    """{section: {key: value}} of a dotted key."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def dotted_items(tree: dict, above="") -> Iterator[tuple]:
    """(dotted key, value) of every value in a tree of mappings. An empty mapping is a value."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from dotted_items(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


# ---------------------------------------------------------------- YAML


class Loader(yaml.SafeLoader):
    """YAML where 1e-6 is a number, a date is text, and no key may stand twice."""

    def construct_mapping(self, node, deep=False):
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


def read_files(path: Path) -> list[dict]:
    """The settings of a YAML file, after the settings of its `base`, a path relative to its folder, and so on.

    Raises UserError.
    """
    layers = []
    where = f"--config {path}"
    for _ in range(10):
        try:
            layer = yaml.load(path.read_bytes(), Loader) or {}
        except Exception as error:  # PyYAML fails in any way if a value does not have the form of its tag
            raise UserError(f"{where}: cannot read the configuration: {error}") from None

        named = isinstance(layer, dict) and all(isinstance(name, str) for name in layer)
        require(
            named and isinstance(layer.get("base"), str | None),
            f"{where}: the file must hold keys with values, where `base` is the path of a file",
        )
        base = layer.pop("base", None)
        # A section whose keys are all commented out is null in YAML.
        layers.insert(0, {key: value for key, value in layer.items() if value is not None or key not in SECTIONS})
        if not base:
            return layers
        path = path.parent / base
        where += f", its base {path}"
    raise UserError(f"{where}: the `base` files go round in a circle")


def read_override(override) -> dict:
    """{section: {key: value}} of `section.key=value`, where the value is YAML. Raises UserError."""
    require(
        bool(re.fullmatch(r"[^.=\[\]]+(\.[^.=\[\]]+)*=.*", override, re.DOTALL)),
        f"override {override!r} is not of the form section.key=value",
    )
    key, _, text = override.partition("=")
    try:
        value = yaml.load(text, Loader)
    except Exception as error:  # as above
        raise UserError(f"override {override!r}: its value is not YAML: {' '.join(str(error).split())}") from None

    # To YAML a text with a colon is a mapping, and "#" begins a comment. Here a mapping has braces, and "#" stays.
    is_plain = not text.lstrip().startswith(("{", "[", '"', "'"))
    if is_plain and (isinstance(value, dict) or ("#" in text and isinstance(value, str | None))):
        value = text
    return nest(key, value)


# ---------------------------------------------------------------- what is wrong

LEGAL = {  # of keys whose type does not say it
    "resume": "must be none, auto, or the folder of a checkpoint (YAML reads no and off as false)",
    "reward.functions": "must be file.py:function, or the name of a reward, whose options go into reward.options, "
    "and whose weight into reward.default",
}


def explain_wrong(problems: list[dict]):
    """What the first key with a wrong value must be, from pydantic's errors."""
    loc = problems[0]["loc"]  # names of the key; then entries, and the types of a union
    place = loc[:2] if loc[0] in SECTIONS else loc[:1]
    must = LEGAL.get(".".join(place))

    # If the key's value is a dictionary, the entry is named too.
    fields = SECTIONS[place[0]].model_fields if len(place) == 2 else Config.model_fields
    if typing.get_origin(fields[place[-1]].annotation) is dict:
        place = loc[: len(place) + 1]
    if must is None:
        messages = [problem["msg"] for problem in problems if problem["loc"][: len(place)] == place]
        must = " or ".join(dict.fromkeys(messages)).replace("Input should", "must")
    return f"{'.'.join(map(str, place))}={problems[0]['input']!r}: {must}"


def explain_unknown(unknown: dict):
    """What is right in place of unknown keys, in a line each. For a section of another trainer, a line for each key."""
    lines, last = [], []
    for name, value in unknown.items():
        ours = {key: here(key) for key, _ in dotted_items({name: value})}
        if any(ours.values()):
            lines += [f"unknown key {key!r}; here {found or 'no key of this name'}" for key, found in ours.items()]
            last = ["docs/from-other-trainers.md says what else differs"]
        else:
            lines.append(f"unknown key {name!r}; {suggest(name.lower())}")
    return "\n       ".join(lines + last)


def here(key: str) -> str:
    """What there is here for a key of another trainer, from the longest ending that `foreign_keys` has; "" if none."""
    parts = key.lower().replace("-", "_").split(".")
    for start in range(len(parts)):
        for end in range(len(parts), start, -1):
            whole = [] if end == len(parts) else ["*"]
            found = foreign_keys().get(".".join(parts[start:end] + whole))
            if found:
                return ", ".join(found)
    return ""


@functools.cache
def foreign_keys() -> dict[str, list[str]]:
    """{key of another trainer, or its last parts, in lower case: our keys, or words}. section.* is all of a section."""
    found = defaultdict(list)
    for ours, trainers in yaml.safe_load((Path(__file__).parent / "other_trainers.yaml").read_text()).items():
        for theirs in set(" ".join(trainers.values()).lower().split()):
            found[theirs].append(ours)

    # What is not in the table may be called as one of our keys, or as Megatron or vLLM call it.
    named = defaultdict(list)
    for key in KEYS:
        named[key.rpartition(".")[2]].append(key)
    megatron = {name: [f"megatron.{name}"] for name in TABLES["megatron_works"]}
    owned = {name: [ours] for name, ours in TABLES["megatron_owned"].items()}
    vllm = {name: [owner] for owner, names in TABLES["vllm_owned"].items() for name in names}
    return vllm | owned | megatron | named | found


def suggest(name):
    """The answer to an unknown key: the nearest key of its section, or else all of them."""
    section, _, own = name.rpartition(".")
    kind = Course if section.startswith("schedule.") else SECTIONS.get(section, Config)
    near = nearest(own, kind.model_fields)
    if near:
        key = f"{section}.{near}" if section else near
        return f"the nearest legal key is {key!r}"

    where = f"in {section} " if section else ""
    return f"legal {where}are {', '.join(kind.model_fields)}"


def nearest(name: str, legal: Iterable[str]) -> str | None:
    """The legal name that is most like `name`; None if none differs as little as a slip of the keys does."""
    near = difflib.get_close_matches(name, legal, n=1, cutoff=LIKE)
    return near[0] if near else None
