"""Keys of verl, TRL and ROLL are answered with ours, and the page says the same as the tables."""

import pytest

import megatron_bridge as bridge
from config import UserError
from support.from_other_trainers import PAGE, TRAINERS, load, page, translation
from support.read_config import KEYS, SECTIONS, load_config
from support.vllm_process import engine_options
from tests.conftest import REPO

CONFIG = str(REPO / "configs/tiny.yaml")
ROWS = [(trainer, theirs, *answer) for trainer, table in TRAINERS.items() for theirs, answer in table.items()]


def test_the_page_shows_the_tables():
    assert PAGE.read_text() == page(), "python -m support.from_other_trainers writes it anew"


def test_every_key_of_ours_exists():
    legal = {*KEYS, *(f"megatron.{key}" for key in bridge.megatron_fields())} - SECTIONS.keys()
    legal |= {f"rollout.vllm.{key}" for key in engine_options()}
    assert {ours for _, _, ours, _ in ROWS if ours} <= legal
    assert all(ours or note for _, _, ours, note in ROWS)
    assert all(len(table) >= 40 for table in TRAINERS.values())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}: {row[1]}")
def test_each_key_of_theirs_is_answered(row):
    _, theirs, ours, _ = row
    answer = translation(theirs)
    if theirs == ours or theirs in KEYS:
        assert answer is None
    else:
        assert answer.startswith(f"unknown key '{theirs}', of ") and (f"here {ours}" in answer) == (ours is not None)


def test_a_key_with_the_same_end_is_answered_too():
    assert translation("algo.kl_loss_coef").endswith("; here algo.kl_coef: with algo.kl_in=loss")
    assert "here rollout.group_size" in translation("rollout.n") and translation("train.n") is None
    assert translation("evall.max_new_tokens") is None  # a misspelt key of ours
    assert "there is no critic" in translation("critic.optim.lr")
    assert translation("train.lr") is translation("megatron.num_generations") is translation("trian.lr") is None


def refused(*overrides: str, config: str = CONFIG) -> str:
    with pytest.raises(UserError) as error:
        load(config, list(overrides))
    return str(error.value)


def test_all_keys_of_a_configuration_are_answered_at_once(tmp_path):
    path = tmp_path / "verl.yaml"
    path.write_text(
        "data: {train_files: a.parquet, prompt_key: q}\nactor_rollout_ref:\n  rollout: {n: 5}\n"
        "  actor: {kl_loss_coef: 0.001, use_dynamic_bsz: true, made_up: 3}\n"
    )
    lines = refused("num_iterations=2", config=str(path)).split("\n       ")
    keys = [line.split("'")[1] for line in lines]
    assert keys == [
        "data.train_files", "actor_rollout_ref.rollout.n", "actor_rollout_ref.actor.kl_loss_coef",
        "actor_rollout_ref.actor.use_dynamic_bsz", "num_iterations",
    ]  # fmt: skip
    assert lines[0].endswith("here data.train") and lines[3].endswith("nothing to set here: always")


def test_other_mistakes_are_said_as_ever():
    for override in ("rollout.group_sise=4", "train.lr=fast", "model=m", "a.b.c=1"):
        with pytest.raises(UserError) as error:
            load_config(CONFIG, [override])
        assert refused(override) == str(error.value)
    assert load(CONFIG, ["train.lr=0.5"]) == load_config(CONFIG, ["train.lr=0.5"])
