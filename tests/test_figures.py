"""docs/why.md: its pictures come out the same, and what it says of them holds for the numbers behind them."""

import re

import figures
import numpy as np
import pytest
import torch

from config import AlgoConfig
from tests.conftest import REPO
from train_grpo import policy_loss

PAGE = (REPO / "docs/why.md").read_text()
NUMBER = re.compile(r"\d+\.\d+")


def numbers_in(text: str) -> list[float]:
    return [float(number) for number in NUMBER.findall(text)]


@pytest.mark.parametrize("name", figures.DRAWINGS)
def test_a_picture_is_drawn_anew_the_same(name, tmp_path):
    assert f"pictures/why_{name}.svg" in PAGE
    (path,) = figures.draw(tmp_path, [name])
    drawn, kept = path.read_text(), (REPO / "docs/pictures" / path.name).read_text()
    assert NUMBER.sub("", drawn) == NUMBER.sub("", kept), "make figures"
    np.testing.assert_allclose(numbers_in(drawn), numbers_in(kept), atol=1e-4)  # CPUs differ in the last digit
    assert path.stat().st_size < 60_000


def test_a_group_is_nearly_a_perfect_critic():
    """By hand: √p without a baseline, √(p (1 - p)) with the true mean, √(G / (G - 1)) times that with the others'."""
    chances, curves = figures.noise_by_chance()
    p = np.array(chances)
    nothing, group, critic = curves.values()
    np.testing.assert_allclose(nothing, p**0.5, rtol=1e-12)
    np.testing.assert_allclose(critic, (p * (1 - p)) ** 0.5, rtol=1e-12)
    np.testing.assert_allclose(group, (p * (1 - p) * 8 / 7) ** 0.5, rtol=1e-12)
    sizes, curves = figures.noise_by_group()
    _, group, critic = (np.array(values) for values in curves.values())
    np.testing.assert_allclose(group / critic, [(g / (g - 1)) ** 0.5 for g in sizes], rtol=1e-12)


def test_the_division_favours_easy_and_hard_prompts():
    """By hand: with k of 8 right, mean |A| is 2 k (8 - k) / 64, and the std (k (8 - k) / 56) ** 0.5."""
    plain, divided = figures.weight_of_prompts("dr_grpo"), figures.weight_of_prompts("grpo")
    for k in range(1, 8):
        assert plain[k] == pytest.approx(2 * k * (8 - k) / 64)
        assert divided[k] / plain[k] == pytest.approx((56 / (k * (8 - k))) ** 0.5, rel=1e-5)
    assert plain[0] == divided[0] == plain[8] == divided[8] == 0
    assert plain[1] < plain[4] / 2 and divided[1] > 0.6 * divided[4]
    assert divided[1] / plain[1] == pytest.approx(2.8, abs=0.05) and divided[4] / plain[4] == pytest.approx(
        1.9, abs=0.05
    )


def test_what_the_estimates_of_the_kl_do():
    true, curves = figures.spread_of_estimates()
    assert true[0] < 0.01 and curves["k1"][0] > 5 * curves["k3"][0]
    logp, ref_logp = figures.two_policies(0.7)
    for kind in ("k1", "k3"):
        assert (logp.exp() * figures.token_kl(logp, ref_logp, kind)).sum().item() == pytest.approx(true[3], rel=1e-12)
    chances, curves = figures.gradients_of_estimates()
    np.testing.assert_allclose(curves["k1"], 0, atol=1e-12)
    np.testing.assert_allclose(curves["k2"], curves["KL(policy ‖ reference)"], atol=1e-12)
    np.testing.assert_allclose(curves["k3+"], curves["KL(policy ‖ reference)"], atol=1e-12)
    np.testing.assert_allclose(curves["k3"], np.array(chances) - 0.5, atol=1e-12)  # of KL(reference ‖ policy)


def test_what_an_answer_weighs_by_its_length():
    lengths = [20, 50, 100, 200, 400]
    token, whole = figures.weights_by_length("token_mean", lengths)
    assert token == [1.0] * 5 and whole == pytest.approx(np.array(lengths) / 770)
    token, whole = figures.weights_by_length("seq_mean_token_mean", lengths)
    assert whole == pytest.approx([0.2] * 5, rel=1e-5) and token[0] == pytest.approx(20 * token[-1], rel=1e-5)


def test_a_first_update_is_never_clipped():
    shares = figures.clipped_shares(8)
    assert shares[0] == 0 and shares[-1] > 0.3
    logp_T = torch.randn(9, dtype=torch.float64).requires_grad_()
    ones_T = torch.ones_like(logp_T)
    advantages_T = torch.linspace(-2, 2, 9, dtype=torch.float64)
    for clip in (0.0001, 0.2, 5.0):
        algo = AlgoConfig(clip_low=min(clip, 1.0), clip_high=clip)
        loss_T, _ = policy_loss(logp_T, logp_T.detach(), advantages_T, ones_T, ones_T.long(), algo)
        (gradient,) = torch.autograd.grad(loss_T.sum(), logp_T)
        assert torch.equal(gradient, -advantages_T)


def test_what_samples_of_another_policy_do():
    distances, errors, noises = figures.gradient_of_other_samples()
    at = distances.index(1.0)
    np.testing.assert_allclose(errors["w"], 0, atol=1e-12)  # unbiased, and the noisiest
    assert noises["w"][-1] == max(max(values) for values in noises.values())
    assert noises["w"][-1] > 3 * noises["tis"][-1]
    assert all(errors[name][at] < 0.6 * errors["none"][at] for name in ("tis", "icepop"))
    small = distances.index(0.2)
    assert errors["none"][small] > 0.1 > errors["icepop"][small] and noises["tis"][small] < 1.1 * noises["none"][small]
