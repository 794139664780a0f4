"""Proof that vLLM holds the trainer's weights, after every push: docs/dev/checks.md."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist

from config import TrainingError
from grpo.parts.base import ranks

Parts = dict[tuple[str, int, bool], list[int]]  # {(vLLM's name, number, whether keys and values): digest}
CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}  # words of 8 bytes digested at once: a core's cache; little memory of a GPU
# vLLM's parameters that come from a checkpoint.
WEIGHTS = ("weight", "bias", "w13_weight", "w2_weight", "A_log", "dt_bias")
RENAMED = [  # (pattern of a Hugging Face name, or of vLLM 0.32's, what stands there in the names of vLLM's model)
    (re.compile(r"^model\.language_model\."), "model."),
    (re.compile(r"\.[qkv]_proj\."), ".qkv_proj."),
    (re.compile(r"\.in_proj_(qkv|z)\."), ".in_proj_qkvz."),
    (re.compile(r"\.in_proj_[ba]\."), ".in_proj_ba."),
    (re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|w1|w3)\.weight"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.(down_proj|w2)\.weight"), ".experts.w2_weight"),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
    (re.compile(r"\.routed_experts\."), "."),
]
KEY_VALUE = re.compile(r"\.[kv]_proj\.")  # replicated over ranks where tp is above the number of key-value heads


def vllm_name(name: str) -> str:
    """Name of the vLLM weight that a Hugging Face tensor goes into."""
    for pattern, new in RENAMED:
        name = pattern.sub(new, name)
    return name


@torch.no_grad()
def digest(tensor: torch.Tensor, ordered: bool = False) -> list[torch.Tensor]:
    """Digest of a tensor's bits: 2 int64 on its device, 0 for zeros; that of a whole is the sum over its parts.

    Over the words x_i of 8 bytes, modulo 2^64: the sum of x_i, and that of x_2i x_2i+1, since two changes can cancel in
    the first. `ordered`: 3, also the sum of (2i + 1) x_i, in which elements in a wrong order show.
    """
    flat = tensor.reshape(-1)
    multiple = 16 // flat.element_size()  # elements in two words
    if flat.numel() % multiple or flat.storage_offset() % multiple:
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % multiple)])
    sums = []  # a list, as stacking them costs as much host time as the sums
    chunk = CHUNK[flat.device.type]
    for i, words in enumerate(flat.view(torch.int64).split(chunk)):
        found = [words.sum(), (words[::2] * words[1::2]).sum()]
        if ordered:
            odd = torch.arange(2 * chunk * i + 1, 2 * (chunk * i + len(words)), 2, device=words.device)
            found.append((words * odd).sum())
        sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else found
    return sums


def in_words(name: str, weight: torch.Tensor) -> torch.Tensor:
    """The weight; of linear attention's vectors of heads, of which a rank may hold one number, two words for each."""
    return weight.double().repeat_interleave(2) if name.endswith(("A_log", "dt_bias")) else weight


def stacked(digests: Iterable[list[torch.Tensor]]) -> np.ndarray:
    """W digests as an array [W, 2 or 3], in one copy from the device."""
    digests = list(digests)
    return torch.stack(list(chain.from_iterable(digests))).view(len(digests), -1).cpu().numpy()


def engine_digests(model: torch.nn.Module, ordered: bool = False) -> dict[str, list[torch.Tensor]]:
    """{name: digest} of the weights in this rank's shard of vLLM's model; of those that cpu_engine packs, `packed`."""
    found, seen = {}, set()
    for path, module in model.named_modules():
        packed = getattr(module, "packed", {})
        for name, weight in module.named_parameters(recurse=False):
            if name in packed:
                found[vllm_name(f"{path}.{name}")] = packed[name] if ordered else packed[name][:2]
            elif name in WEIGHTS and weight.data_ptr() not in seen:  # tied weights are one tensor
                found[vllm_name(f"{path}.{name}")] = digest(in_words(name, weight), ordered)
                seen.add(weight.data_ptr())
    return found


def shard_digests(shards: Iterable[tuple[str, int, torch.Tensor]]) -> Parts:
    """The digests of what a rank of the trainer holds (`hf_shards`); those of its experts in a layer are one part."""
    keys, digests = [], []
    for name, number, tensor in shards:
        keys.append((vllm_name(name), number, bool(KEY_VALUE.search(name))))
        digests.append(digest(in_words(name, tensor)))
    sums = {}
    for key, found in zip(keys, stacked(digests), strict=True):
        sums[key] = sums.get(key, 0) + found
    return {key: found.tolist() for key, found in sums.items()}


def add_up(names: list[str], everywhere: Iterable[Parts]) -> np.ndarray:
    """Digests of the W weights `names` from the parts on all ranks, keys and values in the second row; [2, W, 2].

    Copies of a part count once. Raises TrainingError where they differ, and where names do.
    """
    parts, differ = {}, defaultdict(set)  # differ: {rank: names}
    for rank, held in enumerate(everywhere):
        for key, found in held.items():
            if parts.setdefault(key, found) != found:
                differ[rank].add(key[0])
    stop("copies", differ)
    sums = defaultdict(lambda: np.zeros((2, 2), np.int64))
    for (name, _, has_keys_values), found in parts.items():
        sums[name][int(has_keys_values)] += found
    if "lm_head.weight" in set(names) - sums.keys():  # tied to the embedding, but packed separately
        sums["lm_head.weight"] = sums["model.embed_tokens.weight"]
    lacking, unknown = set(names) - sums.keys(), sums.keys() - set(names)
    if lacking | unknown:
        what = f"nothing is pushed into {shorten(lacking)}, and vLLM has no {shorten(unknown)}"
        raise TrainingError(f"a weight push and vLLM's model differ in names: {what}")
    return np.stack([sums[name] for name in names], axis=1)


# ---------------------------------------------------------------- pushed and held weights compared

FAULTS = {  # what is found in a push → message; "changed" at the first one, "moved" with CUDA graphs
    "changed": "the first push changed weights that vLLM had read from disk, on ranks {ranks}: {names}. The trainer's "
    "mapping (FAMILIES in megatron_bridge.py) is wrong, or part of the push was lost",
    "moved": "a weight push moved tensors of vLLM, on ranks {ranks}: {names}. Its CUDA graphs read the old places; use "
    "rollout.vllm.enforce_eager=true or another rollout.sleep_level",
    "copies": "copies of the trainer's weights differ: ranks {ranks} have others than the ranks before them, of "
    "{names}. An update did not reach all of them",
    "lost": "vLLM did not take up the weight push: on ranks {ranks} these weights are not the trainer's: {names}. They "
    "were stale or exchanged as hf_weights (megatron_bridge.py) gathered them, or lost in load_weights (rollout.py)",
}


def stop(fault: str, found: dict[int, Iterable[str]]) -> None:
    """Raises TrainingError where a rank found a fault; `found`: {rank: names of weights}."""
    at = [rank for rank, names in found.items() if names]
    if at:
        raise TrainingError(FAULTS[fault].format(ranks=at, names=shorten(set().union(*found.values()))))


class PushCheck:
    """Checks all pushes into this rank's engine, which spans `tp` ranks. All ranks of the world push together."""

    def __init__(self, tp: int, llm=None):
        """`llm`: vLLM, with the weights that it read from disk."""
        self.tp = tp
        self.on_disk: dict[str, np.ndarray] = {}
        self.places: dict[str, int] = {}  # addresses that captured CUDA graphs read
        if llm:
            self.on_disk = read_digests(llm, ordered=True)  # now, since weights do not outlive a sleep of level 2
            if torch.cuda.is_available() and not llm.llm_engine.vllm_config.model_config.enforce_eager:
                (self.places,) = llm.apply_model(addresses)
        self.factors = [(1, 1), (tp, tp), *((1, b) for b in range(2, tp + 1))]  # F pairs (a, b), see `compare`
        self.fits = np.ones((len(self.factors), 1), bool)  # which of them fitted so far, [F, W]
        self.last: np.ndarray | None = None  # what was pushed last, see add_up
        self.metrics = {"sync/checked": None, "sync/changed": None}

    def verify(self, llm, weights: Iterator, shards: Iterable) -> None:
        """Compare what `llm` holds, after it loaded the `weights`, with the trainer's `shards`.

        Raises TrainingError, on every rank, where an engine does not hold them, or a rank finds one of FAULTS.
        """
        for _ in weights:  # an engine that left some must not leave the other ranks waiting
            pass
        after = read_digests(llm, ordered=bool(self.on_disk))
        changed = [name for name, sums in self.on_disk.items() if not np.array_equal(sums, after.get(name))]
        self.on_disk = {}  # later pushes bring other weights
        (places,) = llm.apply_model(addresses) if self.places else ({},)
        moved = [name for name, address in self.places.items() if places.get(name) != address]
        digests = np.stack([sums[:2] for sums in after.values()])
        self.compare(list(after), *zip(*ranks.gather((shard_digests(shards), digests, changed, moved)), strict=True))

    def compare(self, names: list[str], parts: list[Parts], digests: list[np.ndarray], changed=(), moved=()) -> None:
        """Compare the W weights `names` of all engines with those of the trainer; from each rank its parts, the digests
        [W, 2] of its shard of vLLM, and names of weights that it found changed or moved.

        The digest of a weight, summed over an engine's ranks, is a times that of its tensors and b times that of its
        keys and values; a and b are how many ranks hold a copy. The first push finds them.
        """
        tensors, keys_values = pushed = add_up(names, parts)
        stop("changed", dict(enumerate(changed)))
        stop("moved", dict(enumerate(moved)))
        held = np.stack(digests).reshape(-1, self.tp, len(names), 2).sum(1)  # of E engines, [E, W, 2]
        fits = np.stack([(held == a * tensors + b * keys_values).all(-1) for a, b in self.factors])
        fits &= self.fits[:, None]  # [F, E, W]
        unfit = ~fits.all(1).any(0)  # [W]
        if self.last is not None:
            lost = unfit & self.fits.any(0)
            held_by = fits[fits.sum(1).argmax(0), :, range(len(names))]  # by the (a, b) that fit most engines, [W, E]
            behind = np.repeat((~held_by)[lost].any(0), self.tp).nonzero()[0]
            stop("lost", {int(rank): set(np.array(names)[lost]) for rank in behind})
        elif unfit.any() and dist.get_rank() == 0:
            what = f"{unfit.sum()} of {len(names)} weights in a layout of its own, so only logp_gap shows a push of"
            print(f"warning: vLLM keeps {what}: {shorten(np.array(names)[unfit])}", flush=True)
        changes = (pushed != self.last).any((0, 2))  # all at the first push, as nothing equals None
        self.fits, self.last = fits.all(1), pushed
        self.metrics = {"sync/checked": 1 - float(unfit.mean()), "sync/changed": float(changes.mean())}


def read_digests(llm, ordered: bool) -> dict[str, np.ndarray]:
    """{name: digest} of the weights of `llm` on this rank."""
    (held,) = llm.apply_model(partial(engine_digests, ordered=ordered))
    return dict(zip(held, stacked(held.values()), strict=True))


def addresses(model: torch.nn.Module) -> dict[str, int]:
    """{name: address} of the parameters and buffers."""
    return {name: tensor.data_ptr() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def shorten(names: Iterable[str]) -> str:
    """The first four names and how many more there are; "other" where there is none."""
    names = sorted(names)
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{', '.join(names[:4])}{more}" or "other"
