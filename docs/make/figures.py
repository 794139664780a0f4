"""Draw the pictures of docs/why.md from small simulations that call the functions of train_grpo.py.

    make figures        or: python docs/make/figures.py [folder]

Writes docs/pictures/why_*.svg, the same bytes each time: seeds are fixed, and everything is float64 on the CPU.
"""

import sys
from collections.abc import Callable
from math import comb
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(REPO))

import matplotlib  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from config import AlgoConfig  # noqa: E402
from train_grpo import group_advantages, loss_weights, mismatch_weight, policy_loss, token_kl  # noqa: E402

PICTURES = REPO / "docs/pictures"
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "why", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
Curves = dict[str, list[float]]  # {label: y at each x}


# ---------------------------------------------------------------- a group in place of a critic


def gradient_noise(chance: float, group: int) -> dict[str, float]:
    """Noise of a prompt's gradient for each answer, exact, by what is subtracted from the rewards.

    There are far more possible answers than are sampled, so each answer's gradient points in a direction of its own:
    the noise is the root mean square of what multiplies them. An answer is right with probability `chance`; equal
    numbers of right answers have equal advantages, so the mean is a sum over that number.
    """
    squares = {"nothing": 0.0, "mean of the others in the group": 0.0, "a perfect critic": 0.0}
    for k in range(group + 1):
        probability = comb(group, k) * chance**k * (1 - chance) ** (group - k)
        right_N = np.array([1.0] * k + [0.0] * (group - k))
        by_group_N = group_advantages(right_N, np.zeros(group, int), "rloo")
        for kind, credit_N in zip(squares, (right_N, by_group_N, right_N - chance), strict=True):
            squares[kind] += probability * (credit_N**2).mean().item()
    return {kind: square**0.5 for kind, square in squares.items()}


def noise_by_chance() -> tuple[list[float], Curves]:
    """Share of right answers, and the noise of groups of 8."""
    chances = [round(0.05 * n, 2) for n in range(1, 20)]
    return chances, collect(gradient_noise(chance, group=8) for chance in chances)


def noise_by_group() -> tuple[list[int], Curves]:
    """Group sizes, and the noise where 3 of 4 answers are right."""
    sizes = [2, 4, 8, 16, 32, 64]
    return sizes, collect(gradient_noise(0.75, size) for size in sizes)


def collect(points) -> Curves:
    """{label: values} of a sequence of {label: value}."""
    rows = list(points)
    return {label: [row[label] for row in rows] for label in rows[0]}


# ---------------------------------------------------------------- division by the standard deviation


def weight_of_prompts(kind: str, group: int = 8) -> list[float]:
    """Mean size of the advantages in a group with 0, 1, ... all answers right."""
    found = []
    for right in range(group + 1):
        rewards_N = np.array([1.0] * right + [0.0] * (group - right))
        advantages_N = group_advantages(rewards_N, np.zeros(group, int), kind)
        found.append(np.abs(advantages_N).mean().item())
    return found


# ---------------------------------------------------------------- estimates of the KL


def two_policies(distance: float, tokens: int = 50, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Log-probs of a policy and of a reference over `tokens` tokens; `distance` scales what their logits differ by."""
    rng = torch.Generator().manual_seed(seed)
    reference, change = torch.randn(2, tokens, generator=rng, dtype=torch.float64)
    return (reference + distance * change).log_softmax(0), reference.log_softmax(0)


def spread_of_estimates() -> tuple[list[float], Curves]:
    """True KL(policy || reference), and the standard deviation of each estimate for one sampled token, both exact."""
    true, points = [], []
    for distance in (0.1, 0.2, 0.4, 0.7, 1.0, 1.4):
        logp, ref_logp = two_policies(distance)
        chance = logp.exp()
        true.append((chance * (logp - ref_logp)).sum().item())
        points.append({})
        for kind in ("k1", "k2", "k3"):
            estimate = token_kl(logp, ref_logp, kind)
            mean = (chance * estimate).sum()
            points[-1][kind] = (chance * (estimate - mean) ** 2).sum().sqrt().item()
    return true, collect(points)


def gradients_of_estimates() -> tuple[list[float], Curves]:
    """Probability of the first of two tokens, and the expected gradient with respect to its logit; reference 1/2."""
    chances = [round(0.02 * n, 2) for n in range(2, 49)]  # beyond, the clamp of k3 binds
    reference = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    points = []
    for chance in chances:
        point = {}
        for kind in ("k1", "k2", "k3", "k3+"):
            point[kind] = expected_gradient(chance, lambda logp, kind=kind: token_kl(logp, reference, kind))
        point["KL(policy ‖ reference)"] = chance * (1 - chance) * np.log(chance / (1 - chance))
        points.append(point)
    return chances, collect(points)


def expected_gradient(chance: float, loss: Callable[[Tensor], Tensor]) -> float:
    """The gradient of `loss` of a sampled token's log-prob, its mean over the two tokens as the policy samples them."""
    logit = torch.tensor(np.log(chance / (1 - chance)), requires_grad=True)
    logp = torch.stack([logit, torch.zeros_like(logit)]).log_softmax(0)
    (logp.detach().exp() * loss(logp)).sum().backward()
    return logit.grad.item()


# ---------------------------------------------------------------- means over tokens and over answers


def weights_by_length(kind: str, lengths: list[int]) -> tuple[list[float], list[float]]:
    """Weight of a token of each of these answers, and the share of the loss that the whole answer has."""
    seq_id_F = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    weight_F = loss_weights(torch.ones(sum(lengths)), seq_id_F, list(range(len(lengths))), kind, max(lengths))
    whole = torch.zeros(len(lengths)).index_add(0, seq_id_F, weight_F)
    return (whole / torch.tensor(lengths)).tolist(), (whole / whole.sum()).tolist()


# ---------------------------------------------------------------- the clip


def gradient_by_ratio(advantage: float, algo: AlgoConfig) -> tuple[list[float], list[float]]:
    """Ratios of new to old probability, and the gradient of the policy loss with respect to the log-prob there."""
    ratios = np.linspace(0.4, 4.0, 181)
    logp_T = torch.from_numpy(np.log(ratios)).requires_grad_()
    ones_T = torch.ones_like(logp_T)
    loss_T, _ = policy_loss(logp_T, torch.zeros_like(logp_T), advantage * ones_T, ones_T, ones_T.long(), algo)
    loss_T.sum().backward()
    return ratios.tolist(), logp_T.grad.tolist()


def clipped_shares(updates: int, tokens: int = 2000, choices: int = 10, seed: int = 0) -> list[float]:
    """Share of tokens that the clip holds in each of several updates on the same sampled tokens.

    Each token has logits of its own for its `choices`; Adam moves a logit by about 0.05 an update.
    """
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, choices, generator=rng, dtype=torch.float64).requires_grad_()
    chosen = torch.multinomial(logits.detach().softmax(-1), 1, generator=rng)
    advantages_T = torch.randn(tokens, generator=rng, dtype=torch.float64)
    ones_T = torch.ones_like(advantages_T)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    old_logp_T = logits.detach().log_softmax(-1).gather(1, chosen)[:, 0]
    shares = []
    for _ in range(updates):
        logp_T = logits.log_softmax(-1).gather(1, chosen)[:, 0]
        loss_T, clipped_T = policy_loss(logp_T, old_logp_T, advantages_T, ones_T, ones_T.long(), AlgoConfig())
        optimizer.zero_grad()
        loss_T.mean().backward()
        optimizer.step()
        shares.append(clipped_T.mean().item())
    return shares


# ---------------------------------------------------------------- samples of another policy

CORRECTIONS = {
    "none": AlgoConfig(),
    "w": AlgoConfig(correction="tis", correction_high=float("inf")),
    "tis": AlgoConfig(correction="tis"),
    "icepop": AlgoConfig(correction="icepop"),
}


def errors_of_gradient(distance: float, policies: int = 20) -> tuple[dict[str, float], dict[str, float]]:
    """(error of the mean gradient, noise of a token's) by the correction, both over the size of the true gradient.

    Tokens are sampled by a policy whose logits differ by a normal error of size `distance`; 3 of 10 tokens have reward
    1, and the true mean is subtracted. Exact sums over 50 tokens; the mean over some policies.
    """
    errors = {name: 0.0 for name in CORRECTIONS}
    noises = {name: 0.0 for name in CORRECTIONS}
    for seed in range(policies):
        rollout_logp, logp = two_policies(distance, seed=seed)
        rng = torch.Generator().manual_seed(seed)
        reward = (torch.rand(len(logp), generator=rng) < 0.3).double()
        advantage = reward - (logp.exp() * reward).sum()
        score = torch.eye(len(logp), dtype=torch.float64) - logp.exp()  # of each token: gradient of its log-prob
        true = (logp.exp() * advantage) @ score
        sampled = rollout_logp.exp()
        ones = torch.ones_like(logp)
        for name, algo in CORRECTIONS.items():
            weight, _ = mismatch_weight(logp, rollout_logp, ones, torch.arange(len(logp)), algo)
            mean = (sampled * weight * advantage) @ score
            square = (sampled * (weight * advantage) ** 2) @ (score**2).sum(1)
            errors[name] += ((mean - true).norm() / true.norm()).item() / policies
            noises[name] += ((square - mean.square().sum()).sqrt() / true.norm()).item() / policies
    return errors, noises


def gradient_of_other_samples() -> tuple[list[float], Curves, Curves]:
    """Sizes of the error in the logits; error and noise of the gradient."""
    distances = [0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.4, 2.0]
    points = [errors_of_gradient(distance) for distance in distances]
    return distances, collect(errors for errors, _ in points), collect(noises for _, noises in points)


# ---------------------------------------------------------------- the pictures


def panel(axis, x: list[float], curves: Curves, title: str, xlabel: str, ylabel: str, **options) -> None:
    """Curves over x on one axis."""
    styles = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)))
    for (label, values), style in zip(curves.items(), styles, strict=False):
        axis.plot(x, values, linestyle=style, linewidth=1.4, label=label)
    axis.set(title=title, xlabel=xlabel, ylabel=ylabel, **options)
    if len(curves) > 1:
        axis.legend(fontsize=7)


def draw_group(left, right) -> None:
    """Noise of a prompt's gradient with three baselines."""
    axis_labels = ("share of right answers", "noise of an answer's gradient")
    panel(left, *noise_by_chance(), "8 answers to a prompt", *axis_labels)
    sizes, curves = noise_by_group()
    panel(
        right, sizes, curves, "3 of 4 answers right", "answers to a prompt", axis_labels[1], xscale="log", ylim=(0, 1)
    )
    right.set_xticks(sizes, sizes)
    right.minorticks_off()


def draw_std(left, right) -> None:
    """How much a prompt counts, by how many of its answers are right."""
    sizes = {"divided by the std (grpo)": "grpo", "not divided (dr_grpo)": "dr_grpo"}
    curves = {label: weight_of_prompts(kind) for label, kind in sizes.items()}
    answers = "right answers of 8"
    panel(left, list(range(9)), curves, "how much a prompt counts", answers, "mean |advantage|")
    divided, plain = curves.values()
    ratio = {"": [divided[k] / plain[k] for k in range(1, 8)]}
    panel(right, list(range(1, 8)), ratio, "what the division multiplies by", answers, "grpo ÷ dr_grpo", ylim=(0, None))


def draw_kl(left, right) -> None:
    """Spread and gradient of the estimates."""
    true, curves = spread_of_estimates()
    panel(left, true, curves, "one sampled token", "true KL", "std of the estimate", xscale="log", yscale="log")
    title = "expected gradient, two tokens"
    panel(right, *gradients_of_estimates(), title, "probability of the first token", "gradient for its logit")


def draw_means(left, right) -> None:
    """What a token and an answer weigh, by the answer's length."""
    lengths = [20, 50, 100, 200, 400]
    kinds = ("token_mean", "seq_mean_token_mean")
    tokens = {kind: weights_by_length(kind, lengths)[0] for kind in kinds}
    wholes = {kind: weights_by_length(kind, lengths)[1] for kind in kinds}
    panel(left, lengths, tokens, "one token", "tokens of its answer", "weight", ylim=(0, None))
    panel(right, lengths, wholes, "the whole answer", "tokens of the answer", "share of the loss", ylim=(0, None))


def draw_clip(left, right) -> None:
    """Where the clip takes the gradient away, and how many tokens are there."""
    algo = AlgoConfig(dual_clip=3.0)
    for advantage, label, style in ((1.0, "advantage 1", "-"), (-1.0, "advantage −1", "--")):
        left.plot(*gradient_by_ratio(advantage, algo), linestyle=style, linewidth=1.4, label=label)
    left.axvline(1.0, color="black", linewidth=0.8)
    left.set(title="clip at 0.8 and 1.2, dual clip 3", xlabel="ratio", ylabel="gradient for the log-prob")
    left.legend(fontsize=7)
    shares = clipped_shares(8)
    right.bar(range(1, 9), shares)
    right.set(title="updates on the same tokens", xlabel="update", ylabel="share of tokens that are clipped")


def draw_other(left, right) -> None:
    """What samples of another policy do to the gradient."""
    distances, errors, noises = gradient_of_other_samples()
    xlabel = "error in the sampler's logits"
    panel(left, distances, errors, "the mean gradient", xlabel, "relative error")
    panel(right, distances, noises, "one token's gradient", xlabel, "noise ÷ true gradient", yscale="log")


DRAWINGS = {
    "group": draw_group, "std": draw_std, "kl": draw_kl, "means": draw_means, "clip": draw_clip, "other": draw_other,
}  # fmt: skip


def draw(folder: Path, names=tuple(DRAWINGS)) -> list[Path]:
    """Write the pictures of these names to the folder; returns their paths."""
    paths = []
    for name in names:
        with matplotlib.rc_context(STYLE):
            figure, axes = plt.subplots(1, 2, figsize=(7.2, 2.7), constrained_layout=True)
            DRAWINGS[name](*axes)
            paths.append(folder / f"why_{name}.svg")
            figure.savefig(paths[-1], metadata={"Date": None, "Creator": None})
            plt.close(figure)
    return paths


if __name__ == "__main__":
    for path in draw(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES):
        print(path)
