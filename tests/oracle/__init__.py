"""Plain transformers against the trainer: updates on all layouts, and real runs that the second trainer repeats."""
