"""Divergences over the whole vocabulary on every layout: loss and gradients are those of plain transformers in float64,
where each answer has the logits of the policy, a reference and a teacher side by side.
"""

import functools
import itertools
import json

import make_tiny
import pytest

from tests.oracle.layouts import LAYOUTS, MOE_LAYOUTS, make_model, make_plan, run_worker
from tests.oracle.reference import make_samples, reference, worst_gradient

KINDS = {
    "reverse": {},
    "forward": {},
    "jsd": {"teacher_beta": 0.3},
    "reverse of 5 tokens": {"teacher_top_k": 5},
    "forward of 5 tokens": {"teacher_top_k": 5},
    "jsd of 5 tokens": {"teacher_beta": 0.7, "teacher_top_k": 5},
}
ON = LAYOUTS | MOE_LAYOUTS | {"TP4, answers apart": ["parallel.tp=4", "train.share_prompts=false"]}
WHOLE = ("DP4", "TP2·DP2", "TP4", "PP2·DP2", "CP2·DP2", "TP2·PP2")
CASES = [  # family, layout, kind; tests/unit/test_head.py has all kinds
    *itertools.product(["qwen2"], (*WHOLE, "TP4, answers apart", "PP2·VPP2·DP2"), ["reverse"]),
    *itertools.product(["qwen2"], ["TP4", "CP2·DP2"], [kind for kind in KINDS if kind != "reverse"]),
    ("qwen2", "TP2·PP2", "forward"),
    ("qwen3_moe", "EP2·DP4", "reverse"),
]
QUICK = {("TP4", "jsd of 5 tokens"), ("CP2·DP2", "reverse of 5 tokens"), ("TP2·PP2", "forward")}
GIVEN = [pytest.param(*case, marks=[] if case[1:] in QUICK else pytest.mark.slow) for case in CASES]


@pytest.fixture(scope="module")
def results(request, fork_server, tmp_path_factory):
    """{family: (what each case gave, its reference as a function of the kind)}."""
    chosen = {}
    for item in request.session.items:
        if item.module is request.module:
            family, layout, kind = (item.callspec.params[name] for name in ("family", "layout", "kind"))
            keys = [f"algo.{key}={value}" for key, value in algo_of(kind).items()]
            chosen.setdefault(family, {})[f"{layout}, {kind}"] = [*ON[layout], *keys]

    found = {}
    for family, cases in chosen.items():
        folder = tmp_path_factory.mktemp(family)
        # A teacher of another width, whose vocabulary has more rows; it sees hints before the prompts.
        larger = make_tiny.char_tokenizer("0123456789>+-=abcdefgh")
        other = "qwen3" if family == "qwen2" else family  # layouts of experts need some
        make_tiny.save_model(folder / "teacher", larger, other, hidden=256, layers=4, kv_heads=4, seed=3, std=0.1)
        keys = (f"algo.teacher={folder / 'teacher'}", "algo.teacher_coef=0.7", "algo.kl=full", "data.hint_key=hint")
        plan = make_plan(folder, family, *keys, layouts=cases, reference=str(folder / "reference"))
        make_model(folder / "reference", family, seed=4)
        (folder / "samples.json").write_text(json.dumps(hinted_samples()))
        (own,) = run_worker(fork_server, folder, 4, plan)
        found[family] = own, functools.cache(functools.partial(wanted_of, folder, next(iter(own.values()))))
    return found


def wanted_of(folder, given, kind):
    """The reference of a kind, the same for all layouts."""
    others = {"ref_kl": folder / "reference", "teacher_kl": folder / "teacher"}
    algo = {"kl": "full", "teacher_coef": 0.7} | algo_of(kind)
    return reference(folder / "model", given, hinted_samples(), others=others, **algo)


def algo_of(kind):
    return {"teacher_kl": kind.partition(" ")[0], **KINDS[kind]}


def hinted_samples():
    return [sample | {"asked": [7, 3, 9, *sample["prompt_ids"]]} for sample in make_samples()]


@pytest.mark.parametrize(("family", "layout", "kind"), GIVEN)
def test_divergences_are_those_of_float64(results, family, layout, kind):
    cases, reference_of = results[family]
    found, wanted = cases[f"{layout}, {kind}"], reference_of(kind)
    assert found["loss"].item() == pytest.approx(wanted["loss"], rel=1e-5)
    error, name = worst_gradient(found, wanted)
    assert error < 1e-5, name
