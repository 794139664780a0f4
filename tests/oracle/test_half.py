"""What bf16 and fp16 hide is found: by twins in fp32, and by how far weights went along the way they should go."""

import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

from grpo.parts.base.read_config import load_config
from grpo.run.preflight import configuration
from oracle import twin
from oracle.exports import ELEMENTS, judge_weights, tensor_problem
from oracle.models import Model, read_weights, rounded
from oracle.report import ITEMS, Report
from oracle.run import Recorded
from oracle.trainer import Answer, known_loss
from oracle.updates import judge_scale
from tests import hub_models
from tests.conftest import tiny_config, tiny_model, write_rows


def report_in(dtype):
    """The report of a run in this dtype."""
    return Report(Recorded(Path(), tiny_config(f"model.dtype={dtype}"), {}, [1], []))


def state_of(report, doubt):
    """What a judgement of bf16 weights needs of a State."""
    cfg = SimpleNamespace(model=SimpleNamespace(dtype="bf16"))
    return SimpleNamespace(cfg=cfg, report=report, doubt=doubt, theirs=set())


LAYOUTS = {  # of a dense model and of one with experts
    False: ({}, {"tp": 2}, {"tp": 2, "pp": 2, "vpp": 2}, {"tp": 2, "cp": 2}),
    True: ({}, {"ep": 4, "etp": 2}, {"tp": 2, "pp": 4}),
}


@pytest.mark.parametrize("name", hub_models.SHAPES)
def test_a_twin_is_small_and_the_layouts_of_its_run_divide_it(name, tmp_path):
    config = transformers.AutoConfig.from_pretrained(hub_models.model_folder(name, tmp_path)).get_text_config()
    for layout in LAYOUTS[hasattr(config, "num_experts")]:
        cfg = tiny_config(*[f"parallel.{key}={value}" for key, value in layout.items()])
        small = twin.small_config(config, cfg)
        small.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(small)].__name__]
        configuration.check_layout(small, cfg.parallel, cfg.rollout.tp)
        configuration.check_stages(small.num_hidden_layers, cfg)
        assert {*(getattr(small, "layer_types", None) or [])} == {*(getattr(config, "layer_types", None) or [])}
        assert (small.vocab_size, small.tie_word_embeddings) == (config.vocab_size, config.tie_word_embeddings)
        assert small.num_hidden_layers <= 4 and small.hidden_size <= 512


def test_a_twin_has_the_configuration_of_its_run_but_what_makes_it_small(tmp_path):
    tiny_model(tmp_path / "model", "qwen3_moe", hidden=64)
    cfg = tiny_config(
        f"model.path={tmp_path}/model", "model.dtype=fp16", "algo.loss=gspo", "lora.rank=4", "train.updates_per_step=8",
        "rollout.prompts_per_step=16", "parallel.ep=2", "algo.overlong_buffer=40", "rollout.max_new_tokens=100",
    )  # fmt: skip
    (tmp_path / "rollouts").mkdir()
    write_rows(tmp_path / "rollouts/step_000001.jsonl", [{"prompt_ids": [1] * length} for length in (3, 5, 9)])

    seen = []
    begun = twin.begin_twins(Recorded(tmp_path, cfg, {}, [1], []), lambda *given: partial(read, seen, *given))
    twins = [end() for end in begun]
    assert [(one.name, one.missing) for one in twins] == [("twin in fp32", "no GPU"), ("twin in fp16", "no GPU")]
    (small, model, ranks), _ = seen
    assert ranks % 2 == 0 and small.model.dtype == "fp32" and model["num_hidden_layers"] == 2
    assert (small.algo.loss, small.lora, small.parallel) == (cfg.algo.loss, cfg.lora, cfg.parallel)
    assert (small.rollout.prompts_per_step, small.data.max_prompt_tokens, small.algo.overlong_buffer) == (8, 5, 16)


def read(seen, config, ranks, printed):
    """Add to `seen` what a starter is given, a configuration that keeps all rules; print an error."""
    printed.write_text("error: no GPU\n")
    cfg = load_config(str(config), [])
    configuration.check_config(cfg, ranks)
    seen.append((cfg, json.loads((config.parent / "model/config.json").read_text()), ranks))
    return 1


def test_what_a_twin_says():
    report = report_in("fp32")
    for item in ITEMS:
        report.say(item)
    assert twin.Twin("", report).verdict() == (0, f"agrees: {len(ITEMS)}")
    assert twin.Twin("", missing="no vLLM").verdict() == (3, "not judged: no vLLM")
    assert twin.Twin("", fault="step 1: x").verdict() == (1, "PARTS: its run ended in step 1: x")


PRINTED = {  # by a run and torchrun → what ended it
    "warning: a\nerror: another rank is gone\nerror: step 2: b\n[rank1]: OSError: c\n": "step 2: b",
    "Traceback\n[rank0]: ValueError: c\nFAILED\n": "ValueError: c",
    "Killed\n": "Killed",
    "": "it printed nothing",
}


@pytest.mark.parametrize("text", PRINTED)
def test_the_last_error_of_a_twin(text):
    assert twin.last_error(text) == PRINTED[text]


# ---------------------------------------------------------------- rounding


def test_a_value_may_be_three_times_as_far_as_rounding_moved_it():
    report = report_in("bf16")
    for moved in (1.0, 0.1):
        report.measure("loss/total", moved)
    assert report.check("loss", "loss/total", 12.9, 10.0) and not report.check("loss", "loss/total", 13.1, 10.0)
    assert not report.check("loss", "loss/policy", 12.9, 10.0), "which it did not move"


def test_a_shadow_is_as_far_as_a_model_in_half_precision(tmp_path):
    tiny_model(tmp_path)
    weights = {name: rounded(w, "bf16") for name, w in read_weights(tmp_path, "fp32", tied=True).items()}
    halves = {name: w.bfloat16() for name, w in weights.items()}
    rows = [[1, 2, 3, 4]], [[5, 6, 7, 8, 9]], 1.0
    exact = Model(tmp_path).logits(weights, *rows)
    in_bf16 = (Model(tmp_path).logits(halves, *rows).float() - exact).norm()
    by_shadow = (Model(tmp_path, "bf16").logits(weights, *rows) - exact).norm()
    assert 0.5 < by_shadow / in_bf16 < 2


# ---------------------------------------------------------------- the way of weights


UPDATES = 20


def weights_in_bf16(ways):
    """Two tensors after some updates from the same initial weights, rounded to bf16."""
    torch.manual_seed(0)
    found = {name: torch.randn(4000) * 0.06 for name in ("one", "other")}
    for way in ways:
        found = {name: w + way[name] for name, w in found.items()}
    return {name: w.bfloat16().float() for name, w in found.items()}


def updates(scale=1.0, **factors):
    """Updates by a learning rate, of a scale; factors are of one tensor."""
    generator = torch.Generator().manual_seed(1)
    ways = []
    for _ in range(UPDATES):
        signs = {name: torch.randn(4000, generator=generator).sign() for name in ("one", "other")}
        ways.append({name: w * 1e-3 * scale * factors.get(name, 1.0) for name, w in signs.items()})
    return ways


PLANTED = {  # updates of a run → what parts
    "healthy": (updates(), ""),
    "a learning rate 1.3 times too high": (updates(1.3), "slope: weights on ours"),
    "one update behind": (updates()[:-1], "slope: weights on our last update: the run has 0,"),
    "a tensor that never moves": (updates(other=0.0), "other moved 0.00 times as far as ours"),
}


def judge(state, made):
    """Judge an export that these updates made."""
    ways = weights_in_bf16(updates()), weights_in_bf16([]), weights_in_bf16(updates()[:-1])
    judge_weights(state, "weights", weights_in_bf16(made), None, *ways)


@pytest.mark.parametrize("bug", PLANTED)
def test_weights_are_projected_on_the_way_that_ours_went(bug):
    made, message = PLANTED[bug]
    report = report_in("bf16")
    judge(state_of(report, doubt=""), made)
    problems = "; ".join(report.items["weights"].problems.values())
    assert message in problems if message else not problems, problems


@pytest.mark.parametrize("doubt", ["", "gradient"])
def test_the_tensors_that_move_as_ours_are_still_judged(doubt):
    """One is frozen, by the gradient if that was not ours; the other has a higher rate later, by the optimizer."""
    report = report_in("bf16")
    state = state_of(report, doubt)
    judge(state, updates(other=0.0))
    judge(state, updates(other=0.0))
    assert state.theirs == {"other"} and report.parted() == [doubt or "weights"], report.table()
    assert len(report.items[doubt or "weights"].problems) == 1 and report.items["weights"].count == 8

    state.doubt = ""
    judge(state, updates(1.3, other=0.0))
    assert "slope: weights on ours" in report.table() and state.theirs == {"one", "other"}
    judge(state, updates())
    assert "no tensor moves as ours does" in report.items["weights"].notes


def test_a_tensor_is_judged_by_itself_if_enough_of_its_elements_make_its_way():
    """Of fp32 three: the decay rates of linear attention have one for each head."""
    for dtype, enough in ELEMENTS.items():
        for count in (enough - 1, enough):
            own = torch.cat([torch.ones(count), torch.full((9,), 1e-6)]).double()
            problem = tensor_problem("A_log", enough, own * 0, own)
            assert ("A_log moved 0.00 times as far" in problem) == (count == enough), (dtype, count)


# ---------------------------------------------------------------- clips and scales


def test_a_shadow_has_on_the_other_side_of_a_clip_what_rounding_may_turn():
    """Tokens whose ratios are just below a bound, just above it, and far from it."""
    algo = tiny_config("algo.entropy_coef=0").algo
    bound = math.log(1 + algo.clip_high)
    logp = torch.tensor([bound - 1e-4, bound + 1e-4, bound - 0.1, bound + 0.1])
    zero = torch.zeros(4)
    row = {"response_ids": [1] * 4, "prompt_ids": [1], "turns": [4], "rollout_logp": [0.0] * 4}
    for shift, clipped in {0.0: [0, 1, 0, 1], 1e-3: [1, 0, 0, 1]}.items():
        policy = logp.clone().requires_grad_()
        given = {"old": zero, "token_advantages": zero + 1, "weights": zero + 1}
        a = Answer(row, [0, 1, 2, 3], True, None, zero, None, {}, shift=shift, **given)
        loss, sums = known_loss(algo)(a, policy, zero, {})
        loss.backward()
        assert (policy.grad == 0).tolist() == [bool(value) for value in clipped], shift
        assert sums["clipped"] == sum(clipped)


SCALES = {  # keys, then (scale, whether the gradient overflowed) of updates in a row → the update that parts
    ((), (8.0, False), (8.0, False), (16.0, False)): None,
    ((), (8.0, False), (4.0, False)): 2,
    ((), (8.0, False), (32.0, False)): 2,
    ((), (8.0, True), (4.0, True), (2.0, False)): None,
    ((), (8.0, True), (8.0, False)): 2,
    (("megatron.hysteresis=2",), (8.0, True), (8.0, True), (4.0, False)): None,
    (("megatron.min_loss_scale=8",), (8.0, True), (8.0, False)): None,
    (("megatron.loss_scale=8",), (8.0, True), (8.0, False)): None,
}


@pytest.mark.parametrize("case", SCALES)
def test_the_loss_scale_of_fp16_is_halved_after_an_overflow_alone(case):
    keys, *updates = case
    cfg = tiny_config("model.dtype=fp16", *keys)
    report = Report(Recorded(Path(), cfg, {}, [1], []))
    state = SimpleNamespace(cfg=cfg, report=report, scale=None)
    parted = []
    for number, (scale, overflowed) in enumerate(updates, 1):
        line = {"update": number, "loss_scale": scale, "grad_norm": None if overflowed else 1.0, "loss": 0.5}
        judge_scale(state, line)
        if report.parted() and not parted:
            parted.append(number)
            assert f"update {number} has the loss scale {scale:g}" in report.first, report.first
    assert parted == [SCALES[case]] * (SCALES[case] is not None)
