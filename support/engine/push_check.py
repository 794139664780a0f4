"""Proof that vLLM holds the trainer's weights, after every push: docs/dev/checks.md."""

import contextlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from config import TrainingError
from support.base import ranks
from support.base.require import require

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


@torch.no_grad()
def digest(tensor: torch.Tensor, ordered: bool = False) -> torch.Tensor:
    """Digest of a tensor's bits: [2] int64 on its device, 0 for zeros; that of a whole is the sum over its parts.

    Over the words x_i of 8 bytes, modulo 2^64: the sum of x_i, and that of x_2i x_2i+1, since two changes can cancel in
    the first. `ordered`: [3], also the sum of (2i + 1) x_i, in which elements in a wrong order show.
    """
    flat = tensor.reshape(-1)
    multiple = 16 // flat.element_size()  # elements in two words
    if flat.numel() % multiple or flat.storage_offset() % multiple:
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % multiple)])
    sums = []
    chunk = CHUNK[flat.device.type]
    for i, words in enumerate(flat.view(torch.int64).split(chunk)):
        sums += [words.sum(), (words[::2] * words[1::2]).sum()]
        if ordered:
            first = 2 * chunk * i + 1
            odd = torch.arange(first, first + 2 * len(words), 2, device=words.device)
            sums.append((words * odd).sum())
    return torch.stack(sums).view(-1, 3 if ordered else 2).sum(0)


def engine_digests(model: torch.nn.Module, ordered: bool = False) -> dict[str, torch.Tensor]:
    """{name: digest} of the weights in this rank's shard of vLLM's model; of those that cpu_engine packs, `packed`."""
    found = {}
    seen = set()
    for path, module in model.named_modules():
        packed = getattr(module, "packed", {})
        for name, weight in module.named_parameters(recurse=False):
            if name in packed:
                found[vllm_name(f"{path}.{name}")] = packed[name] if ordered else packed[name][:2]
            elif name in WEIGHTS and weight.data_ptr() not in seen:  # tied weights are one tensor
                found[vllm_name(f"{path}.{name}")] = digest(weight, ordered)
                seen.add(weight.data_ptr())
    return found


def add_digests(weights: Iterable[tuple[str, torch.Tensor]], found: list) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the same pairs; append the (name, ordered digest) of each to `found`."""
    for name, tensor in weights:
        found.append((name, digest(tensor, ordered=True)))
        yield name, tensor


# ---------------------------------------------------------------- pushed and held weights compared


@dataclass
class Shards:
    """What the trainer's shards on a rank say of the Hugging Face tensors that they are part of."""

    digests: dict[str, torch.Tensor]  # sums of x_i and of (2i + 1) x_i, see `digest`, [2]
    unseen: list[str]  # tensors without a digest: a row of the shard is no multiple of 8 bytes
    stale: list[str]  # tensors whose shards are not the optimizer's main weights


@dataclass
class Held:
    """The W weights that one rank of an engine holds after a push."""

    names: list[str]
    digests: np.ndarray  # [W, 2]
    pushed: int  # checksum of the weights that were pushed into this rank's engine
    faults: dict[str, list[str]] = field(default_factory=dict)  # {key of FAULTS: names of weights}
    unseen: list[str] = field(default_factory=list)  # see Shards


FAULTS = {  # what a rank finds in a push → message; "changed" at the first one, "moved" with CUDA graphs
    "changed": "the first push changed weights that vLLM had read from disk, on ranks {ranks}: {names}. The trainer's "
    "mapping (FAMILIES in megatron_bridge.py) is wrong, or part of the push was lost",
    "moved": "a weight push moved tensors of vLLM, on ranks {ranks}: {names}. Its CUDA graphs read the old places; use "
    "rollout.vllm.enforce_eager=true or another rollout.sleep_level",
    "stale": "a weight push would bring old weights: on ranks {ranks} these are not the optimizer's fp32 main weights, "
    "rounded: {names}",
    "wrong": "a weight push did not bring the trainer's weights: on ranks {ranks} these tensors are not those of the "
    "shards: {names}. They were stale, overwritten or exchanged when they were gathered (hf_weights in "
    "megatron_bridge.py)",
}


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
                self.places = read_places(llm)
        self.copies: dict[str, list[tuple[int, int]]] | None = None  # see `compare`; None before the first push
        self.last: dict[str, bytes] = {}  # of the last push: {vLLM's name: the bytes of its digests}
        self.metrics = {"sync/checked": None, "sync/changed": None}

    @contextlib.contextmanager
    def watch(
        self, llm, weights: Iterable[tuple[str, torch.Tensor]], source: Callable[[], Shards] | None = None
    ) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """Give the pairs that `llm` has to load inside the block. Raises TrainingError, on every rank, unless all
        engines hold them at its end, and where a rank finds one of FAULTS; `source` reads the trainer's shards, then.
        """
        found = []
        stream = add_digests(weights, found)
        yield stream
        for _ in stream:  # an engine that left some must not leave the other ranks waiting
            pass
        after = read_digests(llm, ordered=bool(self.on_disk))
        faults = {"changed": [name for name, sums in self.on_disk.items() if not np.array_equal(sums, after.get(name))]}
        self.on_disk = {}  # later pushes bring other weights
        places = read_places(llm) if self.places else {}
        faults["moved"] = [name for name, address in self.places.items() if places.get(name) != address]
        tensors = to_host(dict(found))
        pushed = pushed_sums(tensors, set(after))
        checksum = zlib.crc32(b"".join(name.encode() + sums.tobytes() for name, sums in sorted(pushed.items())))
        shards = source() if source else Shards({}, [], [])
        faults |= {"wrong": differing(shards.digests, tensors), "stale": shards.stale}
        digests = np.stack([sums[:2] for sums in after.values()])
        held = Held(list(after), digests, checksum, faults, shards.unseen)
        self.compare(pushed, ranks.gather(held))

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
        now = {name: sums.tobytes() for name, sums in pushed.items()}
        changed = [name for name in names if now[name] != self.last.get(name)]
        self.last = now
        self.metrics = {"sync/checked": 1 - len(unknown) / len(names), "sync/changed": len(changed) / len(names)}
        unseen = set().union(*(held.unseen for held in everywhere))
        if first and unseen:
            what = "their rows are no multiple of 8 bytes on a rank of the trainer"
            warn(f"of these only vLLM's copy is checked, as {what}: {shorten(unseen)}")
        if first and unknown:
            what = f"{len(unknown)} of {len(names)} weights in a layout of its own"
            warn(f"vLLM keeps {what}, so only logp_gap shows a push of: {shorten(unknown)}")


def differing(shards: dict[str, torch.Tensor], tensors: dict[str, np.ndarray]) -> list[str]:
    """Names in Shards.digests whose pushed tensor is another or lacks; `tensors`: {name: its ordered digest, [3]}."""
    lacking = np.empty(0)
    return [name for name, sums in to_host(shards).items() if not np.array_equal(sums, tensors.get(name, lacking)[::2])]


def check_pushed(pushed: dict[str, np.ndarray], everywhere: list[Held]) -> None:
    """Raises TrainingError where ranks pushed different weights, names differ, or a rank found one of FAULTS."""
    other = [rank for rank, held in enumerate(everywhere) if held.pushed != everywhere[0].pushed]
    require(
        not other or any(held.faults.get("wrong") for held in everywhere),
        f"ranks {other} gave their vLLM other weights than rank 0: the ranks of the trainer differ",
        TrainingError,
    )
    names = set(everywhere[0].names)
    if set(pushed) != names:
        raise TrainingError(
            "a weight push and vLLM's model differ in names: nothing was pushed into "
            f"{shorten(names - set(pushed))}, and vLLM has no {shorten(set(pushed) - names)}"
        )
    for fault, message in FAULTS.items():
        found = {rank: held.faults[fault] for rank, held in enumerate(everywhere) if held.faults.get(fault)}
        if found:
            raise TrainingError(message.format(ranks=list(found), names=shorten(set().union(*found.values()))))


def read_digests(llm, ordered: bool = False) -> dict[str, np.ndarray]:
    """{name: digest} of the weights of `llm` on this rank."""
    (held,) = llm.apply_model(partial(engine_digests, ordered=ordered))
    return to_host(held)


def read_places(llm) -> dict[str, int]:
    """{name: address} of the parameters and buffers of `llm` on this rank."""

    def addresses(model: torch.nn.Module) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}

    (places,) = llm.apply_model(addresses)
    return places


def to_host(digests: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """The digests, all of one length, in one copy from the device."""
    if not digests:
        return {}
    return dict(zip(digests, torch.stack([*digests.values()]).cpu().numpy(), strict=True))


def pushed_sums(tensors: dict[str, np.ndarray], names: set[str]) -> dict[str, np.ndarray]:
    """{vLLM's name: [2, 2]}: the sum of the digests of its tensors, keys and values apart in the second row."""
    pushed = {}
    for name, sums in tensors.items():
        into = pushed.setdefault(vllm_name(name), np.zeros((2, 2), np.int64))
        into[int(bool(KEY_VALUE.search(name)))] += sums[:2]
    if "lm_head.weight" in names - set(pushed):  # tied to the embedding, but packed separately
        pushed["lm_head.weight"] = pushed["model.embed_tokens.weight"]
    return pushed


def shorten(names: Iterable[str]) -> str:
    """The first four names and how many more there are; "other" where there is none."""
    names = sorted(names)
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{', '.join(names[:4])}{more}" or "other"


def warn(text: str) -> None:
    """Print a warning on rank 0."""
    if dist.get_rank() == 0:
        print(f"warning: {text}", flush=True)
