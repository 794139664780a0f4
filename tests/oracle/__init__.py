"""A second trainer, apart from the first: it repeats a small run from what the run wrote, and compares.

It imports nothing of train_grpo.py, megatron_bridge.py or support/ but the formulas. Models are those of plain
transformers in fp32, one unpadded sequence at a time, and all else is a loop: read it as the slow reference of GRPO, in
this order: support/proof/formulas.py, algorithm.py, models.py, trainer.py. `pytest tests/oracle -k given --run
OUTPUT_DIR` repeats a run of yours (docs/forking.md).
"""
