"""A second trainer, apart from the first: it repeats a run from what the run wrote, and reports what agrees.

It imports nothing of train_grpo.py, megatron_bridge.py or grpo/ but how configuration and user code are read. Only
oracle/fork.py calls the checkout's own loss, where a run parts from the formulas. Models are plain transformers in
fp32, data are read by pyarrow, jinja2 and tokenizers, and the rest is loops. Read it as the slow reference of GRPO:
data.py, formulas.py, algorithm.py, models.py and trainer.py make a step, and repeat.py repeats the steps of a run with
answers.py, updates.py and exports.py. `make check RUN=OUTPUT_DIR` is its command (tools/check.py).
"""
