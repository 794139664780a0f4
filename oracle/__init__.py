"""A second trainer, apart from the first: it repeats a run from what the run wrote, and reports what agrees.

It computes nothing by the checkout's training code. It shares config.py, the reading of YAML, user code and model
folders (grpo/parts/base), the reward functions, and how vLLM's process is set up (engine.py). Rows that are in no plain
file are read as the run reads them (data.py). Only fork.py calls the checkout's loss, where a run differs from the
formulas.

Models are plain transformers in fp32, data are read by json, csv, pyarrow and the tokenizer, and the rest is loops.
Read it as the slow reference of GRPO:

    data, formulas, algorithm, models, trainer     make a step
    repeat                                         repeats the steps of a run, with state.py
    answers, updates, exports, metrics, grading    compare what it recorded; report.py has the bounds
    sampling, nuclei, again (engine)               did the tokens come from these probabilities?
    twin                                           the same code on a small model in fp32, where bf16 hides a fault

`make check RUN=OUTPUT_DIR` is its command (tools/check.py).
"""
