"""The panels of the page by section, with one to three metrics each. docs/metrics.md describes the metrics.

A name with a star makes one panel for every matching metric: for each source, part or layer.
"""

# Scales: 0 to 1; logarithmic; from 0; from 0 and never smoothed. None: the range of the values
FRACTION, LOG, ZERO, EXACT = "fraction", "log", "zero", "exact"

# section → (title, metrics, scale, note)
SECTIONS = {
    "Learning": [
        ("Reward", ["reward/mean"], ZERO, "mean over all samples of a step"),
        ("Spread of rewards", ["reward/std"], ZERO, "standard deviation over the samples of a step"),
        ("Entropy", ["entropy"], ZERO, "nats per token; near 0, all answers to a prompt are the same"),
        ("Gradient norm", ["grad_norm"], ZERO, "before clipping"),
        ("Policy loss", ["loss/policy"], None, "of the first update of a step; it does not have to decrease"),
        ("Learning rate", ["lr"], EXACT, ""),
    ],
    "Reward by source and part": [
        ("Reward of {}", ["reward/*/mean"], ZERO, "mean over the samples of this source"),
        ("Part {}", ["part/*"], None, "source / part of the reward; the parts of a source add up to its reward"),
        ("Grading timeout, {}", ["reward/*/timeout_frac"], FRACTION, "share of samples; their reward is 0"),
        ("Grading failed, {}", ["reward/*/error_frac"], FRACTION, "share of samples; their reward is 0"),
    ],
    "Length": [
        (
            "Answer length",
            ["tokens/response_mean", "tokens/response_max"],
            ZERO,
            "tokens: mean; dashed the longest",
        ),
        ("Cut off", ["tokens/truncated_frac"], FRACTION, "share of answers that reached rollout.max_new_tokens"),
        ("Prompt length", ["tokens/prompt_mean"], ZERO, "tokens, mean"),
        ("Environment's tokens", ["tokens/environment_mean"], ZERO, "of rollout.turns: mean per conversation"),
        ("Turns", ["turns/mean"], ZERO, "answers of a conversation, mean"),
    ],
    "Gap, clip and KL": [
        (
            "Trainer − vLLM",
            ["logp_gap/mean", "logp_gap/max"],
            LOG,
            "|log-prob| of a token: mean; dashed the largest",
        ),
        ("Clipped", ["ratio/clip_frac"], FRACTION, "share of response tokens that are clipped"),
        ("Effective sample size", ["mismatch/ess"], FRACTION, "of the weights trainer ÷ vLLM; 1 if both agree"),
        ("KL(vLLM ‖ trainer)", ["mismatch/k3"], None, "k3 estimate per token"),
        ("KL to the reference", ["kl/ref", "kl/k1", "kl/k2"], None, "per token: k3; dashed k1; dotted k2"),
    ],
    "Groups": [
        (
            "Groups with equal rewards",
            ["groups/zero_std_frac"],
            FRACTION,
            "share of groups; advantages are 0 unless tokens have rewards",
        ),
        ("Sampled and trained", ["groups/sampled", "groups/trained"], EXACT, "groups; dashed: trained on"),
        ("Rounds of sampling", ["groups/rounds"], EXACT, "above 1 with algo.max_rounds"),
        ("Skipped updates", ["update/skipped"], EXACT, "NaN, infinity or a gradient of exactly 0"),
    ],
    "Speed": [
        ("A step", ["time/step"], ZERO, "seconds"),
        ("Response tokens per second", ["speed/response_tokens_per_s"], ZERO, "all ranks together"),
        ("Waiting for the slowest rank", ["idle_frac"], FRACTION, "share of a step, mean over ranks"),
        ("Pipeline bubble", ["pipeline/bubble"], FRACTION, "share of an update in which a stage idles"),
        ("Use of rows", ["pack/fill"], FRACTION, "positions ÷ capacity of micro-batches"),
        ("Attention ÷ that without padding", ["pack/attention_waste"], None, "1 is none"),
    ],
}
