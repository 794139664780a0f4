"""What YAML values become, in a file and as an override, and which texts are refused."""

import math

import pytest
import yaml

from config import UserError
from support.base.read_config import Loader, load_config


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("1E5", 1e5), ("1.5e3", 1500.0), ("-.5e3", -500.0), ("1_0e2", 1000.0), ("1.0e-6", 1e-6),
        ("1_000", 1000), ("0x1F", 31), (".inf", math.inf), ("1e", "1e"), ("e5", "e5"), ("1e5m", "1e5m"),
        ("on", True), ("off", False), ("yes", True), ("No", False), ("y", "y"), ("null", None), ("~", None), ("", None),
        ("2024-01-01", "2024-01-01"), ("'1e-6'", "1e-6"), ("[1e-6, a]", [1e-6, "a"]),
        ("{a: {b: ~}}", {"a": {"b": None}}), ("&x [1]", [1]), ("{<<: {a: 1}, b: 2}", {"a": 1, "b": 2}),
    ],
)  # fmt: skip
def test_a_yaml_value(text, value):
    found = yaml.load(text, Loader)
    assert found == value and type(found) is type(value)


@pytest.fixture
def file(tmp_path):
    """Write a file over one with the keys that have no default; returns its path."""
    (tmp_path / "base.yaml").write_text("model: {path: m}\ndata: {train: d}\ntrain: {lr: 1e-5}\n")

    def write(text: str = "") -> str:
        (tmp_path / "config.yaml").write_text(f"base: base.yaml\n{text}")
        return str(tmp_path / "config.yaml")

    return write


def test_overrides_lie_over_a_file_over_its_base(file):
    cfg = load_config(
        file("train: {lr: 2e-5, steps: 7}\nrollout:\n"), ["train.lr=3e-5", "seed=1_0", "rollout.vllm.a.b={c: 1}"]
    )
    assert (cfg.train.lr, cfg.train.steps, cfg.seed) == (3e-5, 7, 10)
    assert cfg.rollout.vllm == {"a": {"b": {"c": 1}}}
    assert load_config(file(), ["data.system_prompt=a=b"]).data.system_prompt == "a=b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nseed: 2\n", "found duplicate key seed"),
        ("train: {lr: 1, 'lr': 2}\n", "found duplicate key lr"),
        ("megatron: &a {x: *a}\n", "recursive"),
        ("megatron: {x: !!set {a}}\n", "could not determine a constructor for the tag"),
        ("seed: !!int x\n", "cannot read the configuration"),
        ("1: 2\n", "legal are keys with values"),
        ("model: {path: '???'}\nmegatron:\n  a: ???\n", "^megatron.a, model.path: set to ???"),
        ("data: {train: ['${x}']}\n", r"data.train=\['\${x}'\]: values are not interpolated"),
    ],
)
def test_what_is_refused(file, text, message):
    with pytest.raises(UserError, match=message.replace("???", r"\?\?\?")):
        load_config(file(text), [])


def test_a_value_that_a_base_leaves_open(file):
    assert load_config(file("model:\n  path: ???\n"), ["model.path=n"]).model.path == "n"
