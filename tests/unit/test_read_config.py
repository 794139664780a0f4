"""What YAML values become, in a file and as an override, and which texts are refused."""

import math

import pytest
import yaml

from config import UserError
from grpo.parts.base.read_config import KEYS, SECTIONS, Loader, foreign_keys, load_config
from megatron_bridge import megatron_fields


@pytest.mark.parametrize(
    "text, value",
    [
        ("1e-6", 1e-6), ("-.5e3", -500.0), ("1_0e2", 1000.0), (".inf", math.inf), ("1e5m", "1e5m"), ("on", True),
        ("", None), ("2024-01-01", "2024-01-01"), ("'1e-6'", "1e-6"), ("[1e-6, a]", [1e-6, "a"]),
        ("{a: {b: ~}}", {"a": {"b": None}}),
    ],
)  # fmt: skip
def test_a_yaml_value(text, value):
    found = yaml.load(text, Loader)
    assert found == value and type(found) is type(value)


@pytest.fixture
def file(tmp_path):
    """Write a file over one with the keys that have no default; returns its path."""
    (tmp_path / "base.yaml").write_text("model: {path: m}\ndata: {train: d}\ntrain: {lr: 1e-5}\n")

    def write(text=""):
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
    assert load_config(file(), ["data.system_prompt=a: b"]).data.system_prompt == "a: b"
    stops = {r"rollout.stop=\n\nQuestion:": r"\n\nQuestion:", r'rollout.stop="\n\nQuestion:"': "\n\nQuestion:"}
    assert [load_config(file(), [text]).rollout.stop for text in stops] == [[stop] for stop in stops.values()]


@pytest.mark.parametrize(
    "text, message",
    [
        ("seed: 1\nseed: 2\n", "found duplicate key seed"),
        ("train: {lr: 1, 'lr': 2}\n", "found duplicate key lr"),
        ("1: 2\n", "the file must hold keys with values"),
        ("train: 3\n", "train=3: this is a section; give its keys, train.KEY=VALUE"),
    ],
)
def test_what_is_refused(file, text, message):
    with pytest.raises(UserError, match=message):
        load_config(file(text), [])


# ---------------------------------------------------------------- unknown keys


def test_the_table_of_other_trainers_names_keys_of_ours():
    foreign = foreign_keys()
    assert len(foreign) > 100
    for theirs, ours in foreign.items():
        for key in ours:
            assert key in KEYS or key.removeprefix("megatron.") in megatron_fields(), (theirs, ours)


@pytest.mark.parametrize(
    "key, said",
    [
        ("actor_rollout_ref.rollout.n", "here rollout.group_size"),
        ("tp", "here rollout.tp, parallel.tp"), ("ETP_SIZE", "here parallel.ep, parallel.etp"),
        ("parallel.dp", "here none"),
        ("evall.halt", "the nearest legal key is 'eval'"),
        ("schedule.lr.sahpe", "the nearest legal key is 'schedule.lr.shape'"),
        ("train.Epoch", "the nearest legal key is 'train.epochs'"),
        ("lora.start", "there is profile.start; legal in lora are rank, alpha, targets"),
        ("algo.group_size", "here rollout.group_size"),
        ("halt", "legal are output_dir, seed, resume, model, data, rollout, eval, reward, algo, "),
    ],
)  # fmt: skip
def test_an_unknown_key_is_answered(file, key, said):
    with pytest.raises(UserError) as error:
        load_config(file(), [f"{key}=1"])
    unknown = key if said.startswith("here") or key.split(".")[0] in SECTIONS else key.split(".")[0]
    assert str(error.value).startswith(f"unknown key {unknown!r}; {said}")


def test_a_section_of_another_trainer_is_answered_key_by_key(file):
    with pytest.raises(UserError) as error:
        load_config(file("actor:\n  clip_ratio_high: 0.28\n  made_up: 1\nnum_iterations: 2\n"), [])
    assert str(error.value).splitlines() == [
        "unknown key 'actor.clip_ratio_high'; here algo.clip_high",
        "       unknown key 'actor.made_up'; here none",
        "       unknown key 'num_iterations'; here train.epochs_per_step",
        "       docs/from-other-trainers.md says what else differs",
    ]
