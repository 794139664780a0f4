"""Keys of verl, TRL and ROLL are answered with ours, from the tables of docs/from-other-trainers.md."""

import re
import subprocess
import sys

import pytest

import megatron_bridge as bridge
from config import UserError
from support.base.from_other_trainers import PAGE, answer_keys, read_tables, translate
from support.base.read_config import KEYS, SECTIONS, load_config
from support.engine.vllm_process import engine_options
from tests.conftest import REPO

CONFIG = str(REPO / "configs/tiny.yaml")
TABLES = read_tables()
ROWS = [(trainer, theirs, *answer) for trainer, table in TABLES.items() for theirs, answer in table.items()]


def refused(*overrides: str, config: str = CONFIG) -> str:
    with pytest.raises(UserError) as error:
        load_config(config, list(overrides))
    return str(error.value)


def test_every_row_of_the_page_is_read():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert list(TABLES) == ["verl", "TRL", "ROLL"] and len(lines) == len(ROWS)
    assert all(len(table) >= 40 for table in TABLES.values())


def test_every_key_of_ours_exists():
    legal = {*KEYS, *(f"megatron.{key}" for key in bridge.megatron_fields())} - SECTIONS.keys()
    legal |= {f"rollout.vllm.{key}" for key in engine_options()}
    assert {ours for _, _, ours, _ in ROWS if ours} <= legal
    assert all(ours or note for _, _, ours, note in ROWS)


def test_every_key_of_ours_in_a_note_exists():
    known = {*KEYS, *(f"megatron.{key}" for key in bridge.megatron_fields()), *TABLES["verl"]}
    sections = "|".join(SECTIONS)
    for _, theirs, _, note in ROWS:
        for key in re.findall(rf"\b(?:{sections}|megatron)\.\w+", note):
            assert key in known or key.endswith(".md"), (theirs, key)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}: {row[1]}")
def test_each_key_of_theirs_is_answered(row):
    _, theirs, _, _ = row
    if theirs in KEYS:
        return  # one of ours as well, so it is never unknown
    answer = translate(theirs, TABLES, KEYS)
    assert answer.startswith(f"unknown key '{theirs}', of ")
    # Where two trainers have a key of this name, the first one's answer is given.
    first = next(table[theirs] for table in TABLES.values() if theirs in table)
    assert f"; here {first[0]}" in answer if first[0] else "; nothing to set here: " in answer


@pytest.mark.parametrize(
    ("key", "needle"),
    [
        ("algo.kl_loss_coef", "; here algo.kl_coef: with algo.kl_in=loss"),
        ("rollout.n", ", like actor_rollout_ref.rollout.n of verl; here rollout.group_size"),
        ("critic.optim.lr", "there is no critic"),
        ("actor_rollout_ref.actor.optim.lr_decay_style", "; here schedule.lr: "),
    ],
)
def test_a_key_like_one_of_theirs_is_answered(key, needle):
    assert needle in answer_keys({key: 1}, KEYS)[key]


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("train.n", "unknown key 'train.n'; the nearest legal key is 'train'"),
        ("evall.max_new_tokens", "unknown key 'evall'; the nearest legal key is 'eval'"),
        ("trian.lr", "unknown key 'trian'; the nearest legal key is 'train'"),
        ("rollout.group_sise", "unknown key 'rollout.group_sise'; the nearest legal key is 'rollout.group_size'"),
    ],
)
def test_a_misspelt_key_of_ours_is_not_taken_for_theirs(key, said):
    assert translate(key, TABLES, KEYS) is None
    assert refused(f"{key}=1") == said


def test_all_unknown_keys_of_a_configuration_are_answered_at_once(tmp_path):
    path = tmp_path / "verl.yaml"
    path.write_text(
        "data: {train_files: a.parquet, prompt_key: q}\nactor_rollout_ref:\n  rollout: {n: 5}\n"
        "  actor: {kl_loss_coef: 0.001, use_dynamic_bsz: true, made_up: 3}\n"
    )
    lines = refused("num_iterations=2", "train.lrr=1", config=str(path)).split("\n       ")
    answers = {line.split("'")[1]: line for line in lines}
    assert answers.keys() == {
        "data.train_files", "actor_rollout_ref.rollout.n", "actor_rollout_ref.actor.kl_loss_coef", "train.lrr",
        "actor_rollout_ref.actor.use_dynamic_bsz", "actor_rollout_ref.actor.made_up", "num_iterations",
    }  # fmt: skip
    assert answers["data.train_files"].endswith("here data.train")
    assert answers["actor_rollout_ref.actor.use_dynamic_bsz"].endswith("nothing to set here: always")
    assert answers["train.lrr"].endswith("the nearest legal key is 'train.lr'")
    assert "the nearest legal key is" in answers["actor_rollout_ref.actor.made_up"]


def test_a_key_inside_of_ours_is_answered():
    assert "unknown key 'schedule.lr.sahpe'; the nearest" in refused("schedule.lr.sahpe=linear")


def test_a_copy_without_the_page_says_the_nearest_key(monkeypatch, tmp_path):
    monkeypatch.setattr("support.base.from_other_trainers.PAGE", tmp_path / "none.md")
    assert "the nearest legal key is" in refused("num_generations=2")


def test_a_start_without_unknown_keys_does_not_read_the_tables():
    code = "import sys; from support.base.read_config import load_config; load_config('configs/tiny.yaml', [])"
    code += "; assert 'support.base.from_other_trainers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=REPO, check=True)
    assert "from_other_trainers" not in (REPO / "support/run/launch.py").read_text()
