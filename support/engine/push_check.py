"""Proof that vLLM holds what the trainer pushed: digests of both sides, compared after every push, before sampling.

A digest is of bits, so one changed bit shows, at any learning rate. It does not depend on the order of a tensor's
elements beyond 16 bytes. So it can be computed for vLLM's weights too, which are stacked (query, key, value), split
over rollout.tp ranks or padded with zeros: it is the sum over the Hugging Face tensors that a weight consists of.
A wrong order shows at the first push: it must leave the weights that vLLM read from disk unchanged, bit for bit.
"""

import contextlib
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from config import TrainingError
from support.base import ranks

# Words of 8 bytes that are digested at once, which bounds the memory of a digest. On the CPU they fit a core's cache;
# on a GPU there are enough to hide kernel launches.
CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}
WEIGHTS = ("weight", "bias", "w13_weight", "w2_weight")  # vLLM's parameters that come from a checkpoint
RENAMED = [  # (pattern of a Hugging Face name, or of vLLM 0.32's, what stands there in the names of vLLM's model)
    (re.compile(r"\.[qkv]_proj\."), ".qkv_proj."),
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


# ---------------------------------------------------------------- digests


@torch.no_grad()
def digest(tensor: torch.Tensor, ordered: bool = False) -> torch.Tensor:
    """Digest of a tensor's bits: [2] int64 on its device, 0 for zeros; that of a whole is the sum over its parts.

    Over the words x_i of 8 bytes, modulo 2^64: the sum of x_i, and that of x_2i x_2i+1, since two changes can cancel in
    the first. `ordered`: the second is of (2i + 1) x_i, so that elements in a wrong order show.
    """
    flat = tensor.reshape(-1)
    multiple = 16 // flat.element_size()  # elements in two words
    if flat.numel() % multiple or flat.storage_offset() % multiple:
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % multiple)])
    sums = []
    chunk = CHUNK[flat.device.type]
    for i, words in enumerate(flat.view(torch.int64).split(chunk)):
        if ordered:
            first = 2 * chunk * i + 1
            products = words * torch.arange(first, first + 2 * len(words), 2, device=words.device)
        else:
            products = words[::2] * words[1::2]
        sums += [words.sum(), products.sum()]
    return torch.stack(sums).view(-1, 2).sum(0)


def engine_digests(model: torch.nn.Module, ordered: bool = False) -> dict[str, torch.Tensor]:
    """{name: digest} of the weights in this rank's shard of vLLM's model; of those that cpu_engine packs, `packed`."""
    found = {}
    seen = set()
    for path, module in model.named_modules():
        packed = getattr(module, "packed", {})
        for name, weight in module.named_parameters(recurse=False):
            if name in packed:
                found[vllm_name(f"{path}.{name}")] = packed[name][int(ordered)]
            elif name in WEIGHTS and weight.data_ptr() not in seen:  # tied weights are one tensor
                found[vllm_name(f"{path}.{name}")] = digest(weight, ordered)
                seen.add(weight.data_ptr())
    return found


def add_digests(weights: Iterable[tuple[str, torch.Tensor]], found: list) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the same pairs; append the (name, digest) of each to `found`."""
    for name, tensor in weights:
        found.append((name, digest(tensor)))
        yield name, tensor


# ---------------------------------------------------------------- pushed and held weights compared


@dataclass
class Held:
    """The W weights that one rank of an engine holds after a push."""

    names: list[str]
    digests: np.ndarray  # [W, 2]
    pushed: int  # checksum of the weights that were pushed into this rank's engine
    changed: list[str]  # at the first push: weights that differ from those vLLM read from disk


class PushCheck:
    """Checks all pushes into this rank's engine, which spans `tp` ranks. All ranks of the world push together."""

    def __init__(self, tp: int, llm=None):
        """`llm`: vLLM, with the weights that it read from disk."""
        self.tp = tp
        self.on_disk = ordered_digests(llm) if llm else {}  # now, since weights do not outlive a sleep of level 2
        self.copies: dict[str, list[tuple[int, int]]] | None = None  # see `compare`; None before the first push
        self.metrics = {"sync/checked": None}

    @contextlib.contextmanager
    def watch(self, llm, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """Give the pairs that `llm` has to load inside the block. Raises TrainingError, on every rank, unless all
        engines hold them at its end, or if the first push changed the weights that they read from disk.
        """
        found = []
        stream = add_digests(weights, found)
        yield stream
        for _ in stream:  # an engine that left some must not leave the other ranks waiting
            pass
        (held,) = llm.apply_model(engine_digests)
        after = ordered_digests(llm) if self.on_disk else {}
        changed = [name for name, sums in self.on_disk.items() if sums != after.get(name)]
        self.on_disk = {}  # later pushes bring other weights
        pushed = pushed_sums(found, set(held))
        digests = torch.stack([*held.values()]).cpu().numpy()
        checksum = zlib.crc32(b"".join(name.encode() + sums.tobytes() for name, sums in sorted(pushed.items())))
        self.compare(pushed, ranks.gather(Held(list(held), digests, checksum, changed)))

    def compare(self, pushed: dict[str, np.ndarray], everywhere: list[Held]) -> None:
        """Compare the weights on all ranks with {vLLM's name: digests of what was pushed into it} (pushed_sums).

        The digest of a weight, summed over an engine's ranks, is a times that of its tensors and b times that of its
        keys and values; a and b are how many ranks hold a copy. The first push finds them.
        """
        check_pushed(pushed, everywhere)
        names = everywhere[0].names
        first = self.copies is None
        totals = np.stack([held.digests for held in everywhere]).reshape(-1, self.tp, len(names), 2).sum(1)  # [E, W, 2]
        possible = [(1, 1), (self.tp, self.tp), *((1, b) for b in range(2, self.tp + 1))]
        copies, lost = {}, []
        stale = np.zeros(len(totals), bool)  # engines without some of the push, [E]
        for i, name in enumerate(names):
            factors = possible if first else self.copies[name]
            tensors, key_value = pushed[name]
            fits = {(a, b): (totals[:, i] == a * tensors + b * key_value).all(1) for a, b in factors}  # {(a, b): [E]}
            copies[name] = [ab for ab, engines in fits.items() if engines.all()]
            if fits and not copies[name] and not first:
                lost.append(name)
                stale |= ~np.any(list(fits.values()), 0)
        if lost:
            behind = [int(e) * self.tp + i for e in stale.nonzero()[0] for i in range(self.tp)]
            what = f"on ranks {behind} {len(lost)} of {len(names)} weights are not those of the trainer"
            raise TrainingError(f"vLLM did not take up the weight push: {what}: {shorten(lost)}")
        self.copies = copies
        unknown = [name for name in names if not copies[name]]
        self.metrics = {"sync/checked": 1 - len(unknown) / len(names)}
        if first and unknown and dist.get_rank() == 0:
            what = f"{len(unknown)} of {len(names)} weights in a layout of its own"
            print(f"warning: vLLM keeps {what}, so only logp_gap shows a push of: {shorten(unknown)}", flush=True)


def check_pushed(pushed: dict[str, np.ndarray], everywhere: list[Held]) -> None:
    """Raises TrainingError where ranks pushed different weights, names differ, or the first push changed weights."""
    other = [rank for rank, held in enumerate(everywhere) if held.pushed != everywhere[0].pushed]
    if other:
        raise TrainingError(f"ranks {other} gave their vLLM other weights than rank 0: the ranks of the trainer differ")
    names = set(everywhere[0].names)
    if set(pushed) != names:
        raise TrainingError(
            "a weight push and vLLM's model differ in names: nothing was pushed into "
            f"{shorten(names - set(pushed))}, and vLLM has no {shorten(set(pushed) - names)}"
        )
    changed = {rank: held.changed for rank, held in enumerate(everywhere) if held.changed}
    if changed:
        raise TrainingError(
            f"the first push changed weights that vLLM had read from disk, on ranks {list(changed)}: "
            f"{shorten(set().union(*changed.values()))}. The trainer's mapping (FAMILIES in megatron_bridge.py) is "
            "wrong, or part of the push was lost"
        )


def ordered_digests(llm) -> dict[str, list[int]]:
    """{name: digest that depends on the order of elements} of the weights of `llm` on this rank."""
    (held,) = llm.apply_model(partial(engine_digests, ordered=True))
    return dict(zip(held, torch.stack([*held.values()]).tolist(), strict=True))


def pushed_sums(found: list[tuple[str, torch.Tensor]], names: set[str]) -> dict[str, np.ndarray]:
    """{vLLM's name: [2, 2]}: the sum of the digests of its tensors, keys and values apart in the second row."""
    pushed = {}
    digests = torch.stack([sums for _, sums in found]).cpu().numpy()  # in one copy from the device
    for (name, _), sums in zip(found, digests, strict=True):
        into = pushed.setdefault(vllm_name(name), np.zeros((2, 2), np.int64))
        into[int(bool(KEY_VALUE.search(name)))] += sums
    if "lm_head.weight" in names - set(pushed):  # tied to the embedding, but packed separately
        pushed["lm_head.weight"] = pushed["model.embed_tokens.weight"]
    return pushed


def shorten(names: Iterable[str]) -> str:
    """The first four names and how many more there are; "other" where there is none."""
    names = sorted(names)
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{', '.join(names[:4])}{more}" or "other"
