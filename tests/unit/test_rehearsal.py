"""The rehearsal of a start: every name in `algo` passes, and a fork's slip is told with its line."""

import pytest

import train_grpo
from config import UserError
from tests.conftest import tiny_config
from tests.museum import Exhibit


@pytest.mark.parametrize("advantage", ["grpo", "grpo_loo", "gdpo", "reinforce_pp", "none"])
@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "reinforce"])
def test_what_the_script_has_passes(advantage, loss):
    train_grpo.rehearse(tiny_config(f"algo.advantage={advantage}", f"algo.loss={loss}", "algo.mask_truncated=true"))


SLIPS = {  # what is said → function of the script, piece of its source, what a fork has there
    r"train_grpo.py, line \d+, in grpo_loss: NameError: name 'weigth_T'": (
        "grpo_loss", "loss = (loss_T * weight_T).sum()", "loss = (loss_T * weigth_T).sum()"),
    r"train_grpo.py, line \d+, in policy_loss: RuntimeError: The size of tensor a": (
        "policy_loss", "log_ratio_T = logp_T - old_logp_T", "log_ratio_T = logp_T[1:] - old_logp_T"),
    r"grpo_loss returns the shapes {'the loss sum': \[27\], .*; legal are": (
        "grpo_loss", "loss = (loss_T * weight_T).sum()", "loss = loss_T * weight_T"),
    r"grpo_loss returns the shapes {'tokens': \[27\], 'entropy': \[27\]": (
        "grpo_loss", "values_T @ mask_T", "values_T * mask_T"),
}  # fmt: skip


@pytest.mark.parametrize("message", SLIPS)
def test_a_slip_of_a_fork_is_told_with_its_line(monkeypatch, message):
    function, before, after = SLIPS[message]
    exhibit = Exhibit("", "", f"train_grpo:{function}", before, after)
    monkeypatch.setattr(exhibit.find(), "__code__", exhibit.compile())
    with pytest.raises(UserError, match=message):
        train_grpo.rehearse(tiny_config())
