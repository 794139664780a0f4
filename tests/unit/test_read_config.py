"""What YAML values become, in a file and as an override, and which texts are refused."""

import math
import re

import pytest
import yaml

from config import UserError
from grpo.parts.base.read_config import KEYS, SECTIONS, TABLES, Loader, foreign_keys, load_config, nest
from tests.conftest import REPO, megatron_fields


@pytest.mark.parametrize(
    "text, value",
    [
        ("1e-6", 1e-6), ("1_0e2", 1000.0), (".inf", math.inf), ("1e5m", "1e5m"), ("on", True), ("", None),
        ("2024-01-01", "2024-01-01"), ("'1e-6'", "1e-6"), ("[1e-6, a]", [1e-6, "a"]),
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
    for text in ("a: b", "the number after ####", "#### ends it"):
        assert load_config(file(), [f"data.system_prompt={text}"]).data.system_prompt == text
    assert load_config(file(), ["train.lr=1e-6 # a comment"]).train.lr == 1e-6
    stops = {r"rollout.stop=\n\nQuestion:": r"\n\nQuestion:", r'rollout.stop="\n\nQuestion:"': "\n\nQuestion:"}
    assert [load_config(file(), [text]).rollout.stop for text in stops] == [[stop] for stop in stops.values()]


@pytest.mark.parametrize(
    "text, message",
    [
        ("seed: 1\nseed: 2\n", "found duplicate key seed"),
        ("1: 2\n", "the file must hold keys with values"),
        ("train: 3\n", "train=3: this is a section; its keys are epochs, steps, lr, "),
        ("profile: true\nclip_grad: 1\n", "unknown key 'clip_grad'; here train.clip_grad"),
    ],
)
def test_what_is_refused(file, text, message):
    with pytest.raises(UserError, match=message):
        load_config(file(text), [])


# ---------------------------------------------------------------- unknown keys


def test_answers_to_keys_of_other_trainers_name_what_is_there():
    """Keys, documents and recipes; and no key has only words for an answer."""
    ours = {*KEYS, *(f"megatron.{field}" for field in megatron_fields())}
    own = {*TABLES["megatron_works"], *(key.rpartition(".")[2] for key in KEYS)}
    assert len(foreign_keys()) > 500
    for theirs, answers in foreign_keys().items():
        text = ", ".join(answers)
        named = re.findall(rf"\b(?:{'|'.join(SECTIONS)}|megatron)\.\w+", text)
        assert ours.issuperset(named), (theirs, text)
        assert named or theirs not in own or text in KEYS, (theirs, text)
        assert all((REPO / path).exists() for path in re.findall(r"(?:docs|recipes)/\w+\.\w+", text)), text


@pytest.mark.parametrize(
    "key, said",
    [
        ("actor_rollout_ref.rollout.n", "here rollout.group_size"),
        ("actor_rollout_ref.actor.megatron.sequence_parallel", "here parallel.sp"),
        ("actor_rollout_ref.actor.strategy", "here Megatron-core to train (no FSDP"),
        ("actor_rollout_ref.actor.profiler.tool_config.npu.level", "here CUDA, or the CPU without a GPU; no NPUs"),
        ("critic.ppo_micro_batch_size_per_gpu", "here no critic; docs/recipes.md adds one"),
        ("zero_stage", "here Megatron's distributed"),
        ("actor_train.training_args.weight_decay", "here train.weight_decay"),
        ("actor_train.strategy_args.strategy_config.virtual_pipeline_model_parallel_size", "here parallel.vpp"),
        ("reference.strategy_args.strategy_config.expert_model_parallel_size", "here the policy's layout"),
        ("dry_run", "here the option --dry-run"),
        ("algo.kl.init_coef", "here algo.kl_coef"),
        ("rollout-batch-size", "here rollout.prompts_per_step"), ("parallel.dp", "here torchrun's ranks / (tp"),
        ("tp", "here rollout.tp, parallel.tp"), ("ETP_SIZE", "here parallel.etp"),
        ("schedule.lr.sahpe", "the nearest legal key is 'schedule.lr.shape'"),
        ("train.Epoch", "the nearest legal key is 'train.epochs'"),
        ("lora.halt", "legal in lora are rank, alpha, targets"),
        ("halt", "legal are output_dir, seed, resume, model, data, rollout, eval, reward, algo, "),
    ],
)  # fmt: skip
def test_an_unknown_key_is_answered(file, key, said):
    """The same on the command line and in a file."""
    unknown = key if said.startswith("here") or key.split(".")[0] in SECTIONS else key.split(".")[0]
    for text, overrides in (("", [f"{key}=1"]), (yaml.safe_dump(nest(key, 1)), [])):
        with pytest.raises(UserError) as error:
            load_config(file(text), overrides)
        assert str(error.value).startswith(f"unknown key {unknown!r}; {said}")


def test_a_section_of_another_trainer_is_answered_key_by_key(file):
    with pytest.raises(UserError) as error:
        load_config(file("actor:\n  clip_ratio_high: 0.28\n  made_up: 1\nnum_iterations: 2\n"), [])
    assert str(error.value).splitlines() == [
        "unknown key 'actor.clip_ratio_high'; here algo.clip_high",
        "       unknown key 'actor.made_up'; here no key of this name",
        "       unknown key 'num_iterations'; here train.epochs_per_step",
        "       docs/from-other-trainers.md says what else differs",
    ]
