"""benchmarks/notebook.py: its variants, its table by hand, and that a cell repeats to the same bits."""

import json

import numpy as np
import pandas
import pytest

import train_grpo
from benchmarks import notebook, notebook_page
from tests.conftest import REPO, tiny_config, write_rows


def test_every_variant_has_legal_keys():
    for name, words in notebook.VARIANTS.items():
        if not notebook.recipe_of(name):
            train_grpo.rehearse(tiny_config(*words.split()))
    assert "algo.entropy_coef" not in notebook.keys_of(notebook.VARIANTS["rloo"], "smollm2")
    assert set(notebook.variants_of("demo")) - set(notebook.variants_of("smollm2")) == {"recipe_token_rewards"}


def rows(variant, scores, areas, digests="abc"):
    """Rows of the results, a seed each."""
    cells = enumerate(zip(scores, areas, digests, strict=True))
    fixed = {"task": "demo", "variant": variant, "machine": "a", "seconds": 30.4, "curve": "0.1 0.2"}
    return [fixed | {"seed": n, "score": score, "area": area, "digest": d} for n, (score, area, d) in cells]


def test_the_table_by_hand():
    results = rows("grpo", [0.80, 0.90, 0.85], [0.5, 0.5, 0.5])
    # Gaps of 0.10, 0.10, 0.13: mean 0.11, standard error 0.01, and 11 is above 4.30. Gaps of -0.10, 0.10, 0.03: 0.2.
    results += rows("dr_grpo", [0.90, 1.00, 0.98], [0.4, 0.6, 0.53], "def")
    results += rows("rloo", [0.80, 0.90], [0.5, 0.5], "ab") + rows("gspo_4", [0.7], [0.6], "g")
    results += rows("my_branch", [0.5], [0.4], "m")
    results[3]["seconds"], results[4]["machine"] = 45.6, "b"  # of dr_grpo: 1.5 times as long, and not to compare
    found = pandas.DataFrame(results, columns=notebook.COLUMNS)
    sections = {"advantages": ["grpo", "dr_grpo", "rloo"], "losses": ["ppo_clip_4", "gspo_4"]}
    sections["added"] = ["grpo", "my_branch"]
    text = notebook_page.tables(found, sections, {"demo": ["grpo", "dr_grpo", "rloo", "rank"]}, seeds=3)
    lines = text.splitlines()
    found_lines = [line for line in lines if line.startswith("| ") and not line.startswith("| variant")]
    default = "| grpo | 3 | 0.850 (0.800–0.900) |  | 0.500 (0.500–0.500) |  | 30 (30–30) s |"
    assert found_lines == [
        default,
        "| dr_grpo | 3 | 0.960 (0.900–1.000) | **+0.110 (t 11.0)** | 0.510 (0.400–0.600) | +0.010 (t 0.2) "
        "| 1.25 (1.00–1.50) |",
        "| rloo | 2 | 0.850 (0.800–0.900) | same bits | 0.500 (0.500–0.500) | same bits | 1.00 (1.00–1.00) |",
        "| gspo_4 | 1 | 0.700 | – | 0.600 | – | – |",
        default,
        "| my_branch | 1 | 0.500 | -0.300 | 0.400 | -0.100 | 1.00 |",
    ]
    assert "8 of 12 cells were run.\n\n- None of 3 seeds: rank\n- 2 of 3 seeds: rloo\n\n" in text
    assert notebook_page.picture(found, sections, ["demo"]).count("<polyline") == 6


def test_the_curve_of_a_seed_with_fewer_steps_is_stretched():
    curves = [np.array([0.0, 1.0]), np.array([0.0, 0.0, 1.0])]
    assert notebook_page.mean_curve(curves).tolist() == [0.0, 0.25, 1.0]


def test_a_cell_counts_its_steps_until_its_answers_are_used_up(tmp_path):
    """Three steps of two groups may sample six: the second step has sampled the sixth."""
    steps = zip((1, 2, 3), (2, 4, 2), (0.25, 0.75, 1.0), strict=True)
    lines = [{"step": n, "groups/sampled": g, "reward/mean": r, "time/step": 1.5} for n, g, r in steps]
    scores = [{"step": 0, "eval/a/avg@1": 0.1}]
    lines[1]["eval/a/avg@1"], lines[2]["eval/a/avg@1"] = 0.6, 0.9
    write_rows(tmp_path / "metrics.jsonl", scores + lines)
    (tmp_path / "config.yaml").write_text(json.dumps({"rollout": {"prompts_per_step": 2}}))
    (tmp_path / "rollouts").mkdir()
    for line in lines:
        answer = {"reward": line["reward/mean"], "response_ids": [1, 2], "rollout_logp": [-0.5, -1.0]}
        write_rows(tmp_path / f"rollouts/step_{line['step']:06d}.jsonl", [answer] * line["groups/sampled"])
    cell = notebook.read_cell(tmp_path)
    numbers = ("score", "area", "last_tenth", "seconds", "answers", "tokens", "curve")
    assert [cell[name] for name in numbers] == ["0.6000", "0.5000", "0.7500", "3.0", 6, 12, "0.250 0.750"]


@pytest.mark.slow
def test_a_cell_repeats_to_the_same_bits(tiny, tmp_path):
    inputs = {"model.path": tiny / "model", "data.train": tiny / "train.jsonl", "data.eval": tiny / "train.jsonl"}
    words = "train.steps=3 train.eval_every=3 rollout.prompts_per_step=4"
    first, again, other = (
        notebook.train("demo", words, seed, REPO, inputs, tmp_path / str(number))
        for number, seed in enumerate((0, 0, 1))
    )
    assert first["digest"] == again["digest"] != other["digest"]
    assert first["answers"] == 3 * 4 * 16 and first["curve"] == again["curve"]
