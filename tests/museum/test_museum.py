"""The checks that the museum relies on hold healthy steps to be healthy, and each exhibit is still one line away."""

import contextlib
import dataclasses
import re
import zlib
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

import train_grpo
from config import TrainingError, UserError
from support.data import prompts
from support.data.ends import Ends
from support.proof import graded
from support.proof.checks import UpdateChecks
from support.proof.rows import check_ends, check_requests, check_samples, check_update, match_outcomes, seed_of
from support.step.grading import Outcome, checksum
from support.step.packing import pack
from support.step.records import Batch, Sample
from tests.conftest import tiny_config, wrap
from tests.museum import Exhibit, runs
from tests.museum.exhibits import EXHIBITS, SETTINGS
from tests.run.test_forks import server_of
from tests.step.test_step import build  # noqa: F401, a fixture

# ---------------------------------------------------------------- the exhibits


@pytest.mark.parametrize("exhibit", EXHIBITS.values(), ids=EXHIBITS)
def test_an_exhibit_finds_its_line(exhibit):
    assert exhibit.compile() != exhibit.find().__code__
    assert exhibit.setting in SETTINGS and exhibit.seen in ("run", "start", "test", "nothing")


def put_in(monkeypatch, function: str, before: str, after: str) -> None:
    """Change a function, "module:function", until the test ends."""
    exhibit = Exhibit("", "", function, before, after)
    monkeypatch.setattr(exhibit.find(), "__code__", exhibit.compile())


# ---------------------------------------------------------------- the loss against its formula, at every start


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo", "ipo", "dppo_tv", "reinforce"])
@pytest.mark.parametrize("correction", ["none", "tis", "icepop", "seq_mask"])
def test_the_formula_of_every_loss(loss, correction):
    names = (f"algo.loss={loss}", f"algo.correction={correction}")
    for others in (
        (), ("algo.kl=k1", "algo.advantage=max_rl"), ("algo.kl=k2", "algo.dual_clip=1.1", "algo.advantage=grpo_loo"),
        ("algo.kl=k3+", "algo.kl_in=reward", "algo.advantage=dr_grpo", "algo.overlong_buffer=2"),
        ("algo.loss_norm=seq_mean_token_sum", "algo.advantage=rloo", "algo.correction_low=0.5"),
        ("algo.correction_low=0.5", "algo.correction_high=2"), ("algo.clip_low=0.01", "algo.clip_high=0.01"),
        ("schedule.lr.to=1e-7", "schedule.lr.steps=3"),
    ):  # fmt: skip
        train_grpo.rehearse(tiny_config(*names, *others))
    if correction in ("tis", "icepop"):
        train_grpo.rehearse(tiny_config(*names, "algo.correction_level=sequence", "algo.correction_high=1.07"))
    if correction == "none":
        train_grpo.rehearse(tiny_config(*names, "algo.old_logp=rollout"))


# What the rehearsal says → function, piece of its source, what a bug has there, keys. Exhibits have more.
BRANCHES = {
    "the gradient is 0, by its formula": ("train_grpo:grpo_loss", "loss = (loss_T *", "loss = (loss_T.detach() *", ""),
    "config_at gives lr=0 in place of 0.004 at step 1": (
        "train_grpo:config_at", "(step / cfg.train", "((step - 1) / cfg.train", ""),
    "config_at gives lr=.* at step 1": ("support.step.schedule:scheduled_values", "(step - 1) / max", "step / max", ""),
    "an answer of 6 tokens has the reward": (
        "train_grpo:penalize_length", "(limit - algo.overlong_buffer)", "limit", "algo.overlong_buffer=2"),
    "advantages are not those of the rewards": (
        "train_grpo:group_advantages", "r.std(ddof=1)", "r.std()", ""),
}  # fmt: skip


@pytest.mark.parametrize("message", BRANCHES)
def test_a_mistake_in_any_branch_is_refused_at_the_start(monkeypatch, message):
    *place, keys = BRANCHES[message]
    put_in(monkeypatch, *place)
    with pytest.raises((UserError, TrainingError), match=message):
        train_grpo.rehearse(tiny_config(*keys.split()))


STEPS = {  # what a run says in its first or second step → the same, and how it is stopped
    "step 1: after 1 prompts of an epoch row": (
        "support.data.prompts:prompt_batch", "in range(taken, taken + size)]", "in [taken] * size]", ""),
    "its functions returned .'custom': .* by reward=custom the parts": (
        "train_grpo:sample_and_grade", "= sum(outcome.parts.values())", "= 2 * sum(outcome.parts.values())", ""),
    "4 answers of the step before were in no update": (
        "train_grpo:update_order", "np.array_split(order, updates)", "np.array_split(order[1:], updates)", ""),
    "the text that was graded has special tokens in it": (
        "train_grpo:sample_and_grade", "skip_special_tokens=True", "skip_special_tokens=False", ""),
    "the old log-probs are not the policy's": (
        "train_grpo:with_logprobs", "old_logp=score(run.model, batch, cfg)", "old_logp=batch.rollout_logp * 1.01",
        "train.updates_per_step=2"),
    "adapters have the scales": (
        "support.model.lora:adapt", "cfg.alpha / cfg.rank", "cfg.alpha / math.sqrt(cfg.rank)", "lora.rank=4"),
    "weights are not trained, though others are": (
        "support.model.lora:adapt", "(zeros(out, cfg.rank))", "(zeros(out, cfg.rank), target != 'fc2')", "lora.rank=4"),
    "no end token .* is their last: truncated answers count as finished": (
        "tests.step.test_step:PlainEngine.answer", "ids[-1] == self.model.config.eos_token_id)", "True)", ""),
}  # fmt: skip


@pytest.mark.parametrize("message", STEPS)
def test_a_mistake_between_steps_is_told(build, monkeypatch, capsys, message):  # noqa: F811
    *place, keys = STEPS[message]
    put_in(monkeypatch, *place)
    run = build("train.lr=0.01", *keys.split())
    try:
        for step in (1, 2):
            train_grpo.train_step(run, step)
        told = capsys.readouterr().out
    except TrainingError as error:
        told = str(error)
    assert re.search(message, told), told


# ---------------------------------------------------------------- the update against its samples


def make_samples() -> list[Sample]:
    """Two groups of three answers, one of them a conversation, two truncated."""
    samples = []
    for number, length in enumerate((3, 1, 4, 2, 5, 3)):
        turns = [2, 2, 1] if length == 5 else [length]
        logp = -np.arange(1.0, length + 1) * np.repeat(np.arange(len(turns)) % 2 == 0, turns)
        prompt = [5, 6, 7 + number // 3]
        ids = [10 + number] * length
        finished = number not in (2, 4)
        samples.append(Sample(number // 3, prompt, ids, logp, finished, "", "", turns, reward=float(number % 3) ** 2))
    return samples


def make_update(samples: list[Sample], chosen: list[int], cfg) -> tuple[dict, list, Batch]:
    """The report, three micro-batches and the batch of an update."""
    algo = cfg.algo
    batch = train_grpo.add_advantages(samples, train_grpo.flatten(samples, algo.mask_truncated), algo)
    weights_F = train_grpo.loss_weights(batch, chosen, algo.loss_norm, cfg.rollout.max_new_tokens)
    batch = dataclasses.replace(batch, weights=weights_F)
    half = len(chosen) // 2
    rows = [pack(batch, chosen[:half], 40, "cpu"), pack(batch, chosen[half:], 40, "cpu"), pack(batch, [], 8, "cpu")]
    sums = {"loss": 0.9 + cfg.algo.kl_coef, "policy": 0.9, "k3": 1.0, "entropy": 0.0, "tokens": float(batch.mask.sum())}
    return sums | {"trained": float((weights_F > 0).sum())}, rows, batch


@pytest.mark.parametrize("norm", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"])
@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "grpo_loo", "reinforce_pp", "none"])
def test_healthy_updates_pass(norm, advantage):
    for truncated in ("true", "false"):
        cfg = tiny_config(f"algo.loss_norm={norm}", f"algo.advantage={advantage}", f"algo.mask_truncated={truncated}")
        samples = make_samples()
        for chosen in ([0, 1, 2, 3, 4, 5], [3, 4, 5]):
            report, rows, batch = make_update(samples, chosen, cfg)
            check_update(report, rows, batch, samples, chosen, cfg)


@pytest.mark.parametrize("name", ["tokens", "targets", "mask", "rollout_logp", "advantages", "weights"])
def test_a_row_that_is_not_of_its_samples_is_found(name):
    cfg, samples, chosen = tiny_config("algo.mask_truncated=true"), make_samples(), [0, 1, 2, 3, 4, 5]
    report, rows, batch = make_update(samples, chosen, cfg)
    rows[1] = dataclasses.replace(rows[1], **{name: torch.roll(getattr(rows[1], name), 1, 1)})
    with pytest.raises(TrainingError, match=f"^{name} of the update are not those of the samples"):
        check_update(report, rows, batch, samples, chosen, cfg)


WRONG = {  # what the check says of it → numbers of the report, columns of the batch, samples that are trained
    "an update trains answers again": ({}, {}, [0, 1, 2, 3, 4, 5, 0]),
    "the old log-probs of an update are not those": ({}, {"old_logp": torch.zeros(27)}, [0, 1, 2, 3, 4, 5]),
    "the entropy of a token is 3, above": ({"entropy": 3.0 * 16}, {}, [0, 1, 2, 3, 4, 5]),
    "its policy, KL and entropy make 1": ({"loss": 1.1}, {}, [0, 1, 2, 3, 4, 5]),
    "the loss counts 17 tokens, the answers have 16 to train on": ({"trained": 17.0}, {}, [0, 1, 2, 3, 4, 5]),
}


@pytest.mark.parametrize("message", ["", *WRONG])
def test_identities_of_an_update(message):
    cfg, samples = tiny_config("algo.kl_coef=0.1"), make_samples()
    wrong_report, columns, chosen = WRONG.get(message, ({}, {}, [0, 1, 2, 3, 4, 5]))
    report, rows, batch = make_update(samples, [0, 1, 2, 3, 4, 5], cfg)
    model = [SimpleNamespace(hf_config=SimpleNamespace(vocab_size=16))]
    checks = UpdateChecks(mock.Mock(model=model), 1, samples, batch, cfg)
    with pytest.raises(TrainingError, match=message) if message else contextlib.nullcontext():
        assert checks.before_step(report | wrong_report, dataclasses.replace(batch, **columns), chosen, rows)


ANSWERS = {  # what the check says of it → index of the answer, attributes of it that are wrong
    "": (0, {}),
    r"1 answers shorter than rollout.max_new_tokens=4 count as truncated": (0, {"finished": False}),
    "an answer of 3 tokens has the reward 3, its parts are": (0, {"reward": 3.0}),
    r"groups have \[1, 3\] answers, rollout.group_size is 2": (0, {"group": 1}),
    "an answer of 4 tokens has the reward 0.75, its parts are": (3, {"reward_parts": {"r": 0.5, "overlong": 0.25}}),
    "a group of equal rewards is trained on": (
        2, {"reward": 1.0, "reward_parts": {"r": 1.0, "overlong": 0.0}, "raw": {"custom": {"r": 1.0}}}),
}  # fmt: skip


@pytest.mark.parametrize("message", ANSWERS)
def test_answers_end_and_are_rewarded_as_they_say(message):
    cfg = tiny_config("rollout.group_size=2", "algo.max_rounds=2", "algo.overlong_buffer=1", "algo.overlong_coef=0.25")
    samples = []
    for number, (length, reward) in enumerate(((3, 1.0), (2, 0.0), (3, 0.0), (4, 1.0))):
        ids = [6, 7, 8][: 3 if length == 4 else length - 1]
        ids.append(7 if length == 4 else 0)
        penalty = -0.25 if length == 4 else 0.0
        parts = {"r": reward, "overlong": penalty}
        sample = Sample(number // 2, [5], ids, [-1.0] * length, length < 4, "", "", reward=reward + penalty)
        samples.append(dataclasses.replace(sample, reward_parts=parts, raw={"custom": {"r": reward}}))
    wrong, attributes = ANSWERS[message]
    samples[wrong] = dataclasses.replace(samples[wrong], **attributes)
    with pytest.raises(TrainingError, match=message) if message else contextlib.nullcontext():
        check_samples(samples, cfg)
        assert check_ends(samples, 4, Ends({0}, [], None)) is None


@pytest.mark.parametrize(
    ("text", "finished", "stops", "message"),
    [
        ("67", False, [], None),  # vLLM aborted it
        ("67", True, [], "their end token is dropped"),
        ("6<eos>7", True, [], r"1 of 1 answers go on after an end token \(\[0\]\)"),
        ("6789", True, ["98", "89"], None),
        ("689", False, ["89"], r"count as truncated, though their last token ends an answer \(\[0\] or text \['89'\]"),
        ("6789", True, ["78"], "go on after an end token"),
        ("67", True, ["78"], r"no end token \(\[0\] or text \['78'\]\) is their last"),
    ],
)
def test_what_is_said_of_an_end(tokenizer, text, finished, stops, message):
    ids = tokenizer(text)["input_ids"]
    sample = Sample(0, [5], ids, [-1.0] * len(ids), finished, "", "")
    try:
        said = check_ends([sample], 4, Ends({0}, stops, tokenizer))
    except TrainingError as error:
        said = str(error)
    assert said is None if message is None else re.search(message, said)


def test_a_reference_that_moves_or_is_not_used_is_found(build, monkeypatch):  # noqa: F811
    run = build("train.lr=0.01", "algo.kl_coef=0.05")
    for step in (1, 2):
        train_grpo.train_step(run, step)
    with monkeypatch.context() as planted:
        wrap(planted, train_grpo, "score", lambda score, model, batch, cfg, weights=None: score(model, batch, cfg))
        with pytest.raises(TrainingError, match="the reference has the log-probs of the policy"):
            train_grpo.train_step(run, 3)
    run.reference[0][0] += 0.1
    with pytest.raises(TrainingError, match="the reference is not the initial model"):
        train_grpo.train_step(run, 4)


def test_a_reward_of_another_answer_is_found():
    samples = make_samples()[:2]
    samples[0].text, samples[1].text = "one", "two"
    rows = {0: prompts.Prompt([5], "1", "", {})}
    outcomes = [Outcome({"r": 1.0}, graded=checksum(text, "1")) for text in ("one", "two")]
    assert [outcome for _, outcome in match_outcomes(samples, rows, outcomes)] == outcomes
    late = Outcome(status="timeout")  # nobody graded it
    assert len(list(match_outcomes(samples, rows, [late, outcomes[1]]))) == 2
    with pytest.raises(TrainingError, match="the reward of another answer was given to the answer 'one'"):
        list(match_outcomes(samples, rows, outcomes[::-1]))
    with pytest.raises(TrainingError, match="graded against another row's answer than '2'"):
        list(match_outcomes(samples, {0: prompts.Prompt([5], "2", "", {})}, outcomes))
    samples[1].graded = "timeout"
    with pytest.raises(TrainingError, match=r"has the reward 1, .*: its functions returned .* \(timeout\)"):
        graded.RewardChecks(None).rewards(samples[1:], {}, tiny_config())


# ---------------------------------------------------------------- the start, against the data


def test_a_template_applied_twice_is_refused(tmp_path, offline):
    runs.write_models(tmp_path)
    (tmp_path / "twice.jsonl").write_text('{"prompt": "<12=", "answer": "1"}\n')
    tokenizer = prompts.load_tokenizer(str(tmp_path / "chat"))
    data = tiny_config("data.chat_template=true").data
    for file, error in (("train", None), ("twice", "a prompt begins with '<<', the chat template's opening twice")):
        found = prompts.load_prompts(data.model_copy(update={"train": str(tmp_path / f"{file}.jsonl")}), tokenizer, 99)
        with pytest.raises(ValueError, match=error) if error else contextlib.nullcontext():
            prompts.check_opening(found[0], data, tokenizer)
    with pytest.raises(ValueError, match="begins with '1', not with the chat template's opening '<'"):
        prompts.check_opening(prompts.Prompt(tokenizer("12")["input_ids"], "", "", {"prompt": "12"}), data, tokenizer)
    tokenizer.bos_token = "<eos>"
    with pytest.raises(ValueError, match="begins with two '<eos>'"):
        prompts.check_opening(prompts.Prompt([0, 0, 5], "", "", {}), data, tokenizer)


# ---------------------------------------------------------------- tests that exhibits name as what notices them


def test_updates_begin_without_a_gradient(build, monkeypatch):  # noqa: F811
    """The gradient of the second update of a step is that of its own micro-batches."""
    norms = []

    def repeated(forward_backward, model, optimizer, *args) -> dict:
        for _ in range(2):
            report = forward_backward(model, optimizer, *args)
            norms.append(sum(parameter.main_grad.norm().item() for chunk in model for parameter in chunk.parameters()))
        return report

    wrap(monkeypatch, train_grpo, "forward_backward", repeated)
    train_grpo.train_step(build("train.updates_per_step=2"), 1)
    assert len(norms) == 6 and min(norms) > 0  # of some answers, which the first update's check compares; two updates
    assert norms[::2] == norms[1::2]


# ---------------------------------------------------------------- what vLLM was asked


REQUEST = {
    "prompt": zlib.crc32(np.array([5, 6], "i4")), "seed": 5, "temperature": 0.5, "top_k": -1, "max_tokens": 9,
    "stop": ["b"], "stop_token_ids": [3, 0], "top_p": 1.0, "repetition_penalty": 1.0,
}  # fmt: skip
WRONG_REQUESTS = {  # what the check says → what vLLM was asked
    "": {},
    "seed=7, not 6": {"seed": 7},
    "temperature=1.0, not 0.5": {"temperature": 1.0},
    r"stop_token_ids=frozenset\(\{0, 4\}\), not frozenset\(\{0, 3\}\)": {"stop_token_ids": [4, 0]},
    r"stop=\[\], not \['b'\]": {"stop": []},
    "max_tokens=16, not 9": {"max_tokens": 16},
    "repetition_penalty=1.1, not 1.0": {"repetition_penalty": 1.1},
    "prompt=.*, not": {"prompt": 1},
}


@pytest.mark.parametrize("message", WRONG_REQUESTS)
def test_what_vllm_was_asked_is_compared_with_the_configuration(message):
    """Two answers, the second a conversation; the model's own end token 0, which vLLM adds, does not count."""
    cfg = tiny_config("eval.temperature=0.5", "eval.max_new_tokens=9", "eval.stop=b", "eval.stop_token_ids=[3]")
    first = seed_of(cfg.seed, 4, 0)
    one, two = ({**REQUEST, "seed": first + number} for number in (0, 1))
    said = {"max_tokens": 6, "prompt": zlib.crc32(np.array([5, 6, 7, 0, 8], "i4"))}
    again = {**two, "seed": seed_of(first, 1, 1), **said}
    given = WRONG_REQUESTS[message]
    two |= given | ({"seed": first + 2} if "seed" in given else {})
    samples = [
        Sample(0, [5, 6], [7], [-1.0], True, "", "", requests=[one]),
        Sample(0, [5, 6], [7, 0, 8, 0], [-1.0] * 4, True, "", "", [2, 1, 1], requests=[two, again]),
    ]
    message = message and re.sub("7, not 6", f"{first + 2}, not {first + 1}", message)
    with pytest.raises(TrainingError, match=message) if message else contextlib.nullcontext():
        check_requests(4, samples, {0: prompts.Prompt([5, 6], "", "", {})}, cfg.eval, cfg, frozenset({0}))


# ---------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def hall(tmp_path_factory, fork_server) -> runs.Museum:
    """The museum, on the fork server of all tests."""
    folder = tmp_path_factory.mktemp("museum")
    runs.write_models(folder)
    return runs.Museum(folder, fork_server)


@pytest.fixture(scope="module")
def page(request):
    """({exhibit: outcome}, {setting: outcome without one}), written to docs/dev/museum.md with --museum-page."""
    outcomes, controls = {}, {}
    yield outcomes, controls
    if request.config.getoption("--museum-page"):
        assert (outcomes.keys(), controls.keys()) == (EXHIBITS.keys(), SETTINGS.keys()), "some did not run"
        runs.PAGE.write_text(runs.write_page(outcomes, controls))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXHIBITS)
def test_an_exhibit_is_noticed_as_its_record_says(hall, page, name):
    outcome = hall.visit(EXHIBITS[name])
    page[0][name] = outcome
    assert not runs.judge(EXHIBITS[name], outcome), outcome.text


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_run_without_the_bug_is_not_stopped(hall, page, setting):
    outcome = hall.run(setting)
    page[1][setting] = outcome
    assert outcome.seen == runs.healthy(setting), outcome.text


def test_the_page_has_every_exhibit_and_its_score():
    page = runs.PAGE.read_text()
    by_run = sum(exhibit.seen in ("run", "start") for exhibit in EXHIBITS.values())
    assert f"**{by_run} of {len(EXHIBITS)} are noticed by the run itself" in page
    assert all(exhibit.what in page for exhibit in EXHIBITS.values())


@pytest.mark.slow
def test_a_fork_notices_them_too(tmp_path):
    """The fork changes the advantages of its own batch; what it did not change is held as in the original."""
    runs.write_models(tmp_path)
    with server_of("clip_cov", tmp_path / "fork") as server:
        forked = runs.Museum(tmp_path, server)
        assert forked.run("plain").seen == "nothing"
        for name in ("advantages_of_another", "end_token_masked", "half_a_push", "entropy_sign", "not_reduced"):
            outcome = forked.visit(EXHIBITS[name])
            assert not runs.judge(EXHIBITS[name], outcome), outcome.text
