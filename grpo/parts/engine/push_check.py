"""Proof that vLLM holds the trainer's weights, after every push: docs/dev/checks.md."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from config import TrainingError
from grpo.parts.base import ranks

Parts = dict[tuple[str, int, bool], list[int]]  # {(vLLM's name, number, whether keys and values): digest}
CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}  # words of 8 bytes per sum: a core's cache holds them; little GPU memory
PERIOD = 16  # rows; what vLLM fuses or splits begins at multiples of it in most models
# vLLM's parameters that come from a checkpoint
WEIGHTS = ("weight", "bias", "w13_weight", "w2_weight", "A_log", "dt_bias")
RENAMED = [  # (pattern in a Hugging Face name, or in one of vLLM 0.32, and its replacement), applied in turn
    (re.compile(r"^model\.language_model\."), "model."),
    (re.compile(r"\.[qkv]_proj\."), ".qkv_proj."),
    (re.compile(r"\.in_proj_(qkv|z)\."), ".in_proj_qkvz."),
    (re.compile(r"\.in_proj_[ba]\."), ".in_proj_ba."),
    (re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|w1|w3)\.weight"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.(down_proj|w2)\.weight"), ".experts.w2_weight"),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
    (re.compile(r"\.routed_experts\."), "."),
]
KEY_VALUE = re.compile(r"\.[kv]_proj\.")  # ranks hold copies if tp is above the number of key-value heads


class PushCheck:
    """Checks all pushes into this rank's engine, which spans `tp` ranks. All ranks of the world push together."""

    def __init__(self, tp, llm=None):
        """`llm`: vLLM, with the weights that it read from disk."""
        self.tp = tp
        self.on_disk = {}  # {name: digest}, until the first push is checked
        self.places = {}  # {name: address}, which captured CUDA graphs read
        if llm:
            self.on_disk = read_digests(llm, ordered=True)  # now, since weights do not outlive a sleep of level 2
            if torch.cuda.is_available() and not llm.llm_engine.vllm_config.model_config.enforce_eager:
                (self.places,) = llm.apply_model(addresses)

        self.factors = [(1, 1), (tp, tp), *((1, b) for b in range(2, tp + 1))]  # F pairs (a, b), see `compare`
        self.fits = True  # [2, F, E, W], whether a pair fitted every push of an engine so far: the sums; places too
        self.last = None  # the digests pushed last, see add_up
        self.metrics = {}  # of the last push

    def verify(self, llm, weights: Iterator, shards: Iterable):
        """Compare what `llm` holds, after it loaded the `weights`, with the trainer's `shards`.

        Raises TrainingError on every rank if an engine does not hold them, or if a rank sees another fault.
        """
        for _ in weights:  # an engine that left some must not leave the other ranks waiting
            pass

        after = read_digests(llm, ordered=bool(self.on_disk))
        changed = [name for name, sums in self.on_disk.items() if not np.array_equal(sums, after.get(name))]
        self.on_disk = {}  # later pushes bring other weights

        moved = []
        if self.places:
            (places,) = llm.apply_model(addresses)
            moved = [name for name, address in self.places.items() if places.get(name) != address]

        digests = np.stack([sums[:3] for sums in after.values()])
        of_ranks = ranks.gather((shard_digests(shards), digests, changed, moved))
        self.compare(list(after), *zip(*of_ranks, strict=True))

    def compare(self, names: list[str], parts: list[Parts], digests: list, changed=(), moved=()):
        """Compare the W weights `names` of all engines with the trainer's. Raises TrainingError if they differ.

        Each rank gives its parts, the digests [W, 3] of its shard of vLLM, and the names of weights that changed or
        moved.

        The digest of a weight, summed over an engine's ranks, is a times the digest of its tensors plus b times that of
        its keys and values, where a and b are how many ranks hold a copy. The first push determines them, and of which
        weights the places of rows count.
        """
        pushed = add_up(names, parts)
        names = np.array(names)
        stop_if(CHANGED, changed)
        stop_if(MOVED, moved)

        # Which pairs (a, b) fit this push too, in each of the E engines. An engine is behind if none is left.
        tensors, keys_values = pushed
        held = np.stack(digests).reshape(-1, self.tp, len(names), 3).sum(1)  # [E, W, 3]
        equal = np.stack([held == a * tensors + b * keys_values for a, b in self.factors])
        fits = np.stack([equal[..., :2].all(-1), equal.all(-1)]) & self.fits
        holds = fits.any(1)  # [2, E, W]
        unfit = ~holds[0].all(0)

        if self.last is None:  # a part whose rows are equal, such as zeros, fits wherever it lies
            alike = {name for part in parts for (name, *_), found in part.items() if not found[2]}
            fits[1] &= ~np.isin(names, list(alike))
        else:
            lost = (self.fits.any(1) & ~holds).any(0)
            stop_if(LOST, [names[of_engine] for of_engine in lost.repeat(self.tp, 0)])

        if self.last is None and unfit.any():
            ranks.tell(
                f"warning: vLLM keeps {unfit.sum()} of {len(names)} weights in a layout of its own, so only logp_gap "
                f"shows a push of {shorten(names[unfit])}"
            )

        changes = (pushed != self.last).any((0, 2))  # all at the first push, as nothing equals None
        self.fits = fits
        self.last = pushed
        self.metrics = {"sync/checked": 1 - float(unfit.mean()), "sync/changed": float(changes.mean())}


# ---------------------------------------------------------------- what is wrong

CHANGED = (
    "the first push changed weights that vLLM had read from disk, on ranks {ranks}: {names}. The trainer's mapping "
    "(FAMILIES in megatron_bridge.py) is wrong, or part of the push was lost"
)
MOVED = (
    "a weight push moved tensors of vLLM, on ranks {ranks}: {names}. Its CUDA graphs read the old places. Use "
    "rollout.vllm.enforce_eager=true or another rollout.sleep_level"
)
COPIES = (
    "copies of the trainer's weights differ: ranks {ranks} have others than the ranks before them, of {names}. An "
    "update did not reach all of them"
)
LOST = (
    "vLLM did not take up the weight push: on ranks {ranks} these weights are not the trainer's: {names}. They were "
    "stale or exchanged as hf_weights (megatron_bridge.py) gathered them, or lost in load_weights (rollout.py)"
)


def stop_if(fault, found):
    """Raises TrainingError if a rank has a fault; `found`: for each rank, the names of its weights that have it."""
    at = [rank for rank, names in enumerate(found) if len(names)]
    if at:
        raise TrainingError(fault.format(ranks=at, names=shorten(set().union(*found))))


def shorten(names):
    """The first four names and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


# ---------------------------------------------------------------- the trainer's digests


def shard_digests(shards: Iterable[tuple[str, int, Tensor]]) -> Parts:
    """The digests of a rank of the trainer, from its `hf_shards`. Its experts in a layer are one part."""
    keys, digests = [], []
    for name, number, tensor in shards:
        keys.append((vllm_name(name), number, bool(KEY_VALUE.search(name))))
        digests.append(digest(in_words(name, tensor)))

    sums = {}
    for key, found in zip(keys, stacked(digests), strict=True):
        sums[key] = sums.get(key, 0) + found
    return {key: found.tolist() for key, found in sums.items()}


def add_up(names: list[str], everywhere: Iterable[Parts]):
    """Digests [2, W, 3] of the W weights `names` from the parts of all ranks: of tensors, and of keys and values.

    Copies of a part count once. Raises TrainingError if they differ, or if names do.
    """
    parts, differ = {}, []
    for of_rank in everywhere:
        differ.append([key[0] for key, found in of_rank.items() if parts.setdefault(key, found) != found])
    stop_if(COPIES, differ)

    sums = defaultdict(lambda: np.zeros((2, 3), np.int64))
    for (name, _, has_keys_values), found in parts.items():
        sums[name][int(has_keys_values)] += found

    lacking = set(names) - sums.keys()
    if "lm_head.weight" in lacking:  # tied to the embedding, but packed separately
        sums["lm_head.weight"] = sums["model.embed_tokens.weight"]
        lacking.remove("lm_head.weight")
    unknown = sums.keys() - set(names)
    if lacking or unknown:
        raise TrainingError(
            "a weight push and vLLM's model differ in names: nothing is pushed into "
            f"{shorten(lacking) or 'others'}, and vLLM has no {shorten(unknown) or 'others'}"
        )
    return np.stack([sums[name] for name in names], axis=1)


def vllm_name(name):
    """Name of the vLLM weight that a Hugging Face tensor goes into."""
    for pattern, new in RENAMED:
        name = pattern.sub(new, name)
    return name


# ---------------------------------------------------------------- vLLM's digests


def read_digests(llm, ordered):
    """{name: digest} of vLLM's weights on this rank."""
    (held,) = llm.apply_model(partial(engine_digests, ordered=ordered))
    return dict(zip(held, stacked(held.values()), strict=True))


def engine_digests(model, ordered=False):
    """{name: digest} of this rank's shard of vLLM's model. Weights that cpu_engine packs have theirs in `packed`."""
    found, seen = {}, set()
    for path, module in model.named_modules():
        packed = getattr(module, "packed", {})
        for name, weight in module.named_parameters(recurse=False):
            place = vllm_name(f"{path}.{name}")
            if name in packed:
                found[place] = packed[name] if ordered else packed[name][:3]
            elif name in WEIGHTS and weight.data_ptr() not in seen:  # tied weights are one tensor
                found[place] = digest(in_words(name, weight), ordered)
                seen.add(weight.data_ptr())
    return found


def addresses(model):
    """{name: address} of the parameters and buffers."""
    return {name: tensor.data_ptr() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


# ---------------------------------------------------------------- the digest of a tensor


@torch.no_grad()
def digest(tensor, ordered=False):
    """Digest of a tensor's bits: 3 int64 on its device, 0 for zeros. The digest of a whole is the sum over its parts.

    Over the words x_i of 8 bytes, modulo 2^64: the sum of x_i; the sum of |x_2i| |x_2i+1|, since two changes can cancel
    in the first; and the sum of w x_i, where w is -15, -13, ... 15 in each 16 rows, which shows exchanged rows. The
    third adds up where parts begin at multiples of 16 rows, and is 0 where rows are equal. With `ordered` there is a
    fourth, the sum of (2i + 1) x_i, which shows any wrong order.
    """
    # Two words at a time are read, so the tensor is padded or moved to a multiple of them.
    flat = tensor.reshape(-1)
    multiple = 16 // flat.element_size()
    if flat.numel() % multiple or flat.storage_offset() % multiple:
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % multiple)])

    # Rows of whole pairs of words; of vectors and others each pair is a row.
    row = tensor.shape[-1] if tensor.ndim > 1 and tensor.shape[-1] % multiple == 0 else multiple
    width = 2 * row // multiple  # words
    period = PERIOD * width
    chunk = max(CHUNK[flat.device.type] // period, 1) * period
    sums = []  # a list, as stacking them costs as much host time as the sums
    for i, words in enumerate(flat.view(torch.int64).split(chunk)):
        magnitudes = words.abs()  # a product of the words themselves may not see their highest bit, a sign
        rows = words.view(-1, width).sum(1)
        place = torch.arange(len(rows), device=rows.device) % PERIOD * 2 - (PERIOD - 1)
        found = [rows.sum(), (magnitudes[::2] * magnitudes[1::2]).sum(), (place * rows).sum()]
        if ordered:
            odd = torch.arange(2 * chunk * i + 1, 2 * (chunk * i + len(words)), 2, device=words.device)
            found.append((words * odd).sum())
        sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else found
    return sums


def in_words(name, weight):
    """The weight. Of linear attention's vectors a rank may hold one number per head, which becomes two words."""
    return weight.double().repeat_interleave(2) if name.endswith(("A_log", "dt_bias")) else weight


def stacked(digests):
    """W digests as an array [W, 3 or 4], in one copy from the device."""
    digests = list(digests)
    numbers = [number for sums in digests for number in sums]
    return torch.stack(numbers).view(len(digests), -1).cpu().numpy()
