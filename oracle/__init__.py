"""A second trainer, apart from the first: it repeats a run from what the run wrote, and reports what agrees.

It imports nothing of train_grpo.py, megatron_bridge.py or grpo/ but how data are read; oracle/fork.py asks the
checkout's own loss where a run parts from the formulas. Models are those of plain transformers in fp32, and all else is
a loop: read it as the slow reference of GRPO, in this order: formulas.py, algorithm.py, models.py, trainer.py,
repeat.py. `make check RUN=OUTPUT_DIR` is its command (tools/check.py).
"""
