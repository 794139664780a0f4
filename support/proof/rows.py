"""What must be true of an update whatever code made it, computed again from the samples, in the plainest way."""

import zlib
from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch
from numpy import ndarray

from config import AlgoConfig, Config, EvalConfig, RankError, RolloutConfig, TrainingError
from support.base.require import require
from support.data.ends import Ends
from support.data.prompts import Prompt
from support.proof import formulas
from support.step.grading import Outcome, checksum
from support.step.named_rewards import OWN_PARTS, weights_of
from support.step.records import Batch, MicroBatch, Sample

FIELDS = ("tokens", "targets", "mask", "position_ids", "rollout_logp", "advantages", "weights")  # of a packed row
LEAST = 0.01  # temperature in vLLM, but for 0
CLOSE = 1e-4  # advantages and weights in fp32, relative
PARTS = 1e-5  # of a token and of the parts of the loss, which fp32 rounds
OWN_NAME = "; a formula of your own needs a name of its own in algo (docs/forking.md)"


def match_outcomes(
    samples: list[Sample], prompts: dict[int, Prompt], outcomes: list[Outcome]
) -> Iterator[tuple[Sample, Outcome]]:
    """Yield samples with their outcomes; RankError for one computed for another text or against another answer."""
    for sample, outcome in zip(samples, outcomes, strict=True):
        answer = prompts[sample.group].answer
        if outcome.graded not in (None, checksum(sample.text, answer)):
            raise RankError(
                f"the reward of another answer was given to the answer {sample.text[:80]!r}, or it was graded against "
                f"another row's answer than {str(answer)[:80]!r}"
            )
        sample.raw = outcome.raw
        yield sample, outcome


def check_samples(samples: list[Sample], cfg: Config) -> None:
    """TrainingError unless groups are whole, ends and rewards fit, and groups of equal rewards were sampled again."""
    algo, r = cfg.algo, cfg.rollout
    check_sizes(samples, r.group_size, "rollout.group_size")
    for s in samples:
        check_reward(s, cfg, formulas.length_penalty(len(s.response_ids), r.max_new_tokens, algo))
    different = set()  # without the penalty on length, which makes no group a mixed one
    for s in samples:
        different.add((s.group, sum(value for name, value in s.reward_parts.items() if name not in OWN_PARTS)))
    rewards = Counter(group for group, _ in different).values()
    require(
        algo.max_rounds == 1 or min(rewards) > 1 or max(rewards) == 1,
        "a group of equal rewards is trained on beside others, which algo.max_rounds leaves out",
        TrainingError,
    )


def check_sizes(samples: list[Sample], size: int, key: str) -> None:
    """Raise TrainingError unless every group has the number of answers that `key` says."""
    sizes = set(Counter(s.group for s in samples).values())
    require(sizes == {size}, f"groups have {sorted(sizes)} answers, {key} is {size}", TrainingError)


def check_requests(
    step: int, samples: list[Sample], prompts: dict[int, Prompt], sampling: RolloutConfig | EvalConfig, cfg: Config,
    own_ends: frozenset[int],
) -> None:  # fmt: skip
    """TrainingError unless answers are to their groups' prompts, and vLLM was asked for each turn as `sampling` says.

    `step`: 0 for an evaluation; `own_ends`: the model's end tokens, some of which vLLM adds. An engine without
    Completion.requests is judged by the prompts alone.
    """
    ids = {group: np.array(prompt.ids, "i4") for group, prompt in prompts.items()}
    seeds = {group: seed_of(cfg.seed, step, group) for group in prompts}
    limit = sampling.max_new_tokens or cfg.rollout.max_new_tokens
    wanted = {"stop": sampling.stop, "repetition_penalty": 1.0, "temperature": sampling.temperature}
    wanted["stop_token_ids"] = own_ends.union(sampling.stop_token_ids)
    if sampling.temperature:  # else vLLM takes the likeliest token, whatever top_p and top_k say
        wanted |= {"temperature": max(sampling.temperature, LEAST), "top_p": sampling.top_p, "top_k": sampling.top_k}
    numbers = Counter()  # of answers so far, by group
    for s in samples:
        number = numbers[s.group]
        numbers[s.group] += 1
        if not np.array_equal(s.prompt_ids, ids[s.group]) or len(s.requests) not in (0, len(s.turns[::2])):
            raise TrainingError(f"step {step}: group {s.group} has answers to another prompt, or other turns")
        for turn, request in enumerate(s.requests):
            said = s.response_ids[: sum(s.turns[: 2 * turn])]  # before this turn
            wanted["prompt"] = zlib.crc32(np.append(ids[s.group], said))
            wanted["max_tokens"] = limit - len(said)
            wanted["seed"] = seed_of(seeds[s.group], number, turn) if turn else seeds[s.group] + number
            given = request | {"stop_token_ids": own_ends.union(request["stop_token_ids"])}
            wrong = [f"{name}={given[name]}, not {right}" for name, right in wanted.items() if given[name] != right]
            if wrong:
                raise TrainingError(
                    f"step {step} (0: an evaluation): vLLM was asked for answer {number} of group {s.group}, turn "
                    f"{turn + 1}, with {'; '.join(wrong)} (prompt: a checksum). Is it lost before the engine, or "
                    "another section's? A fork that asks otherwise says so in check_requests of support/proof/rows.py"
                )


def seed_of(*numbers: int) -> int:
    """The seed in vLLM of a group, from (seed, step, group), and of a later turn, from (that, answer, turn)."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def check_reward(s: Sample, cfg: Config, penalty: dict[str, float]) -> None:
    """TrainingError unless the reward is what its functions returned × weights, and `penalty`, its part for length."""
    spec = cfg.reward.by_source.get(s.source, cfg.reward.default)
    weights = weights_of(spec)
    raw = s.raw if s.graded == "ok" else {name: {} for name in weights}
    parts = dict(penalty)
    for name, returned in raw.items():
        for part, number in returned.items():
            if isinstance(spec, dict):
                part = name if part == "reward" else f"{name}/{part}"
            if number is not None:
                parts[part] = weights.get(name, np.nan) * number
    given = s.reward_parts | {"": s.reward}
    parts[""] = sum(parts.values())
    same = given.keys() == parts.keys() and raw.keys() == weights.keys()
    if not same or not all(abs(given[part] - parts[part]) <= 1e-6 * (1 + abs(parts[part])) for part in parts):
        raise TrainingError(
            f"an answer of {len(s.response_ids)} tokens has the reward {s.reward:g}, its parts are {s.reward_parts}: "
            f"its functions returned {s.raw} ({s.graded}), by reward={spec} the parts {parts} ('': the sum). A fork "
            "that weighs them otherwise says so in check_reward of support/proof/rows.py"
        )


def check_ends(samples: list[Sample], limit: int, ends: Ends) -> str | None:
    """TrainingError for an answer that is truncated at one of `ends`; returns what to warn of, or None."""
    what = str(sorted(ends.tokens))
    if ends.texts:
        what += f" or text {ends.texts}"
        samples = samples[:64]  # to decode all would take seconds, and such a mistake is in all
    late = sum(ends.are_in(s.response_ids[:-1]) for s in samples)
    if late:
        return f"{late} of {len(samples)} answers go on after an end token ({what}): does the engine know it?"
    ended = [s for s in samples if ends.are_in(s.response_ids)]
    short = sum(not s.finished and len(s.response_ids) < limit for s in ended)
    require(
        not short,
        f"{short} answers shorter than rollout.max_new_tokens={limit} count as truncated, though their last token ends "
        f"an answer ({what}): is `finished` not what vLLM says?",
        TrainingError,
    )
    unlike = [s for s in samples if s.finished and not ends.are_in(s.response_ids)]
    if not unlike:
        return None
    is_cut = all(len(s.response_ids) == limit for s in unlike)
    cause = "truncated answers count as finished" if is_cut else "their end token is dropped"
    many = f"{len(unlike)} of {len(samples)} answers"
    return f"{many} count as finished, but no end token ({what}) is their last: {cause}"


def check_texts(samples: list[Sample], tokenizer) -> None:
    """RankError where graded text, of the first answers, has special tokens, which decoding leaves out; on rank 0."""
    for s in samples[:8]:
        if s.text:
            plain = tokenizer.decode(s.response_ids, skip_special_tokens=True)
            special = [token for token in tokenizer.all_special_tokens if token in s.text and token not in plain]
            require(not special, f"the text that was graded has special tokens in it: {special[:3]}", RankError)


def check_credit(samples: list[Sample], batch: Batch, cfg: Config) -> None:
    """Raise TrainingError unless the trained tokens of an answer have its advantage against its group."""
    advantages_N = expected_advantages(samples, batch, cfg.algo)
    if advantages_N is None:
        return
    judged = (batch.trained & batch.advantages.isfinite()).numpy()  # check_finite judges the others
    what = f"advantages are not those of the rewards by algo.advantage={cfg.algo.advantage}"
    check_equal(what, batch.advantages.numpy()[judged], advantages_N[batch.seq_id.numpy()][judged], CLOSE)


def check_update(
    report: dict[str, float], micro_batches: list[MicroBatch], batch: Batch, samples: list[Sample], chosen: list[int],
    cfg: Config,
) -> None:  # fmt: skip
    """Check the update on the `chosen` numbers of `samples`: this replica's rows, and the report of all replicas.

    TrainingError unless each position has what FIELDS names of its sample and the batch, and the position computed for
    it its token and place; unless trained tokens were counted once, and the reported parts make the loss.
    """
    masks = cfg.algo.mask_truncated
    trained_N = np.array([0 if masks and not s.finished else sum(s.turns[::2]) for s in samples])  # the model's own
    counted = trained_N[chosen].sum()
    require(
        report["trained"] == counted,
        f"the loss counts {report['trained']:.0f} tokens, the answers have {counted} to train on",
        TrainingError,
    )
    parts = parts_of_loss(report, cfg.algo)
    if parts and abs(report["loss"] - sum(parts)) > PARTS * (counted + sum(map(abs, parts))):
        raise TrainingError(
            f"the loss is {report['loss']:.6g}, its policy, KL and entropy make {sum(parts):.6g}{OWN_NAME}"
        )
    tokens_N = np.zeros(len(samples))
    tokens_N[chosen] = trained_N[chosen]
    weights_N = formulas.answer_weights(tokens_N, cfg.algo.loss_norm, cfg.norm_length)  # None: a rule of a fork
    advantages_F = batch.advantages.numpy()
    rows = [torch.stack([getattr(mb, name)[0].double() for name in FIELDS]) for mb in micro_batches]
    held = torch.cat(rows, dim=1).cpu().numpy()  # one copy from the GPU
    ends = np.cumsum([mb.tokens.shape[1] for mb in micro_batches])
    for mb, row in zip(micro_batches, np.split(held, ends[:-1], axis=1), strict=True):
        if len(mb.samples):
            expected = expected_row(mb, samples, cfg, advantages_F, weights_N)
            row = dict(zip(FIELDS, row, strict=True))
            check_row(row, expected)
            if mb.place is not None:
                check_row(row, {name: row[name][mb.kept][mb.place] for name in ("tokens", "position_ids")})


def expected_row(
    mb: MicroBatch, samples: list[Sample], cfg: Config, advantages_F: ndarray, weights_N: ndarray | None
) -> dict[str, ndarray]:
    """{field: values} of a packed row without its padding, from its samples and the batch's advantages, [F]."""
    packed = [samples[n] for n in mb.samples]
    ids = np.concatenate([part for s in packed for part in (s.prompt_ids, s.response_ids)])
    ends = np.cumsum([len(s.prompt_ids) + len(s.response_ids) for s in packed])
    starts = np.append(0, ends[:-1])
    counts = [count for s in packed for count in (len(s.prompt_ids), *s.turns)]
    by_model = [turn % 2 == 1 for s in packed for turn in range(1 + len(s.turns))]  # prompt, model, environment, ...
    logp = np.concatenate([part for s in packed for part in (np.zeros(len(s.prompt_ids)), s.rollout_logp)])
    sampled = np.delete(np.repeat(by_model, counts), starts)
    positions_S = ends - starts - 1
    trained = sampled & np.repeat([s.finished or not cfg.algo.mask_truncated for s in packed], positions_S)
    ends_N = np.cumsum([s.positions for s in samples])
    sized = list(zip(mb.samples, positions_S, strict=True))
    expected = {
        "tokens": np.delete(ids, ends - 1),
        "targets": np.delete(ids, starts),
        "mask": sampled,
        "position_ids": np.concatenate([np.arange(size) for size in positions_S]),
        "rollout_logp": np.delete(logp, starts).astype("f4"),
        "advantages": np.concatenate([advantages_F[ends_N[n] - size : ends_N[n]] for n, size in sized]),
    }
    if weights_N is not None:
        expected["weights"] = np.repeat(weights_N[mb.samples], positions_S) * trained
    return expected


def check_row(held: dict[str, ndarray], expected: dict[str, ndarray]) -> None:
    """Compare the fields that a packed row has with what is expected of it. Raises RankError."""
    for name, values in expected.items():
        what = f"{name} of the update are not those of the samples"
        check_equal(what, held[name][: len(values)], values, CLOSE if name == "weights" else 0.0)


def check_equal(what: str, given: ndarray, right: ndarray, tolerance: float) -> None:
    """RankError with `what` and the first of the numbers that differ by more than `tolerance`, relative."""
    wrong = np.flatnonzero(~np.isclose(given, right, rtol=tolerance, atol=tolerance / 10))
    if len(wrong):
        first = wrong[0]
        raise RankError(
            f"{what}: {given[first]:g} in place of {right[first]:g} at position {first}, and {len(wrong) - 1} "
            f"more{OWN_NAME}"
        )


def expected_advantages(samples: list[Sample], batch: Batch, algo: AlgoConfig) -> ndarray | None:
    """The advantage of each answer against its group, [N]; None where more decides, or a formula of a fork."""
    kl_in_reward = algo.kl_coef > 0 and algo.kl_in == "reward"
    own_kl = kl_in_reward and algo.kl not in formulas.KLS
    if algo.advantage not in ("grpo", "dr_grpo", "rloo", "grpo_loo", "max_rl", "none") or algo.teacher or own_kl:
        return None
    reward_N = np.array([s.reward for s in samples])
    if kl_in_reward:
        kl_F = formulas.kl(batch.old_logp, batch.ref_logp, algo.kl)
        reward_N = reward_N - algo.kl_coef * batch.sums(kl_F * batch.mask)
    group_N = np.array([s.group for s in samples])
    advantages_N = np.zeros(len(samples))
    for group in np.unique(group_N):
        members = group_N == group
        advantages_N[members] = formulas.compare(reward_N[members], algo.advantage)
    return advantages_N


def parts_of_loss(report: dict[str, float], algo: AlgoConfig) -> list[float]:
    """The reported sums that make the loss; [] where they are not weighted as the loss is, or for a fork's own KL."""
    if algo.loss_norm != "token_mean" or report["trained"] != report["tokens"] or algo.kl not in formulas.KLS:
        return []
    kl = report[algo.kl.removesuffix("+")] if algo.kl_in == "loss" else 0.0
    return [report["policy"], algo.kl_coef * kl, -algo.entropy_coef * report["entropy"]]
