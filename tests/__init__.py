"""The tests, on shelves.

unit/     one part, in this process, in seconds
step/     steps of a run in this process, with plain transformers in vLLM's place
run/      real runs, and what only runs have: pushes, checkpoints, advice, trackers, recipes, configurations
faults/   kills, disks, machines; and healthy runs, which no check may stop
oracle/   plain transformers and the second trainer: layouts, adapters, routes, pairs of capabilities
museum/   planted bugs, and what notices each

`make test` runs what is not marked slow. A test is slow if it starts torchrun, takes 20 s, or shows on one more layout,
family or precision what a quick test shows.
"""
