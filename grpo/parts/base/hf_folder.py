"""Folders in Hugging Face's format: where a model's files are, what they hold, and the export of a trained model."""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from grpo.parts.base import ranks
from grpo.parts.base.files import complete_folder, split_by_bytes
from grpo.parts.base.require import brief

EXPORT_SHARD_BYTES = 4 << 30
UNTRAINED = ("model.visual.", "mtp.")  # weights for images and multi-token prediction, which an export copies
# Tensors that hold all experts of a layer, and the projections in them
JOINED = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
# What names of files or tensors show of a folder, and what to do
QUANTISED = (
    "quantised weights (AWQ, GPTQ, bitsandbytes, fp8 and the like) are not supported: give the model that was "
    "quantised, with safetensors in bf16, fp16 or fp32"
)
KINDS = {
    r"^adapter_|^base_model\.|\.base_layer\.|\.lora_[AB]\.": "adapters of PEFT are no model: merge them with theirs, "
    "peft.AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload().save_pretrained(NEW), and give NEW, with "
    "the tokenizer's files",
    r"\.(qweight|scales|SCB|absmax|weight_packed|weight_scale(_inv)?)$": QUANTISED,
    r"\.gguf$": "GGUF is the format of llama.cpp: give the model that it was made from, with safetensors",
    r"^(pytorch_model|consolidated|model).*\.(bin|pth?)$": "torch's own files are not read: convert them with "
    "transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype='auto').save_pretrained(FOLDER)",
    r"^rank_.*\.safetensors$": "a checkpoint is no model: go on with resume=FOLDER, or give an export, hf/step_N",
    r"^(module|_orig_mod)\.": "names begin with the prefix of a wrapper (DDP, torch.compile): save the model within, "
    "model.save_pretrained(FOLDER)",
    r"^(layers|embed_tokens)\.": "names lack their prefix, as of a model without a head: save a causal language model",
}
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def check_found(path: str, key: str):
    """Raises ValueError unless `path`, the value of `key`, is a folder, or a model in the hub or its cache."""
    try:
        if Path(path).is_dir():  # raises OSError if the name is too long
            return
        import huggingface_hub

        huggingface_hub.hf_hub_download(path, "config.json")
    except Exception as error:  # of the hub, or of the network, whose classes depend on the client
        raise ValueError(
            f"{key}={path}: there is no folder {Path(path).absolute()}; `make llm` makes build/smollm2/model, `make "
            f"demo` build/tiny/model. The hub gives no such model ({brief(error)}{show_kind([path])}). "
            f"Give the folder of a model, {key}=FOLDER, with config.json, tokenizer and safetensors, or a name like "
            "Qwen/Qwen2.5-0.5B"
        ) from None


def show_kind(names: Iterable[str]) -> str:
    """What names of files or tensors show, to put after an error; "" if they show none of KINDS."""
    names = [*names]
    for pattern, said in KINDS.items():
        if any(re.search(pattern, name) for name in names):
            return f"; {said}"
    return ""


def read_config(path: str):
    """The configuration of a model's language model, with the whole model's architectures and its weights' `prefix`.

    `quantised` is the whole model's quantization_config, or None.
    """
    import transformers

    whole = transformers.AutoConfig.from_pretrained(path)
    config = whole.get_text_config()
    config.architectures = whole.architectures
    config.quantised = getattr(whole, "quantization_config", None)
    config.dtype = config.dtype or whole.dtype
    config.prefix = "model" if config is whole else "model.language_model"
    return config


def head_dim(hf) -> int:
    """Width of one attention head."""
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def local_folder(path: str) -> str:
    """The folder of a model: `path` itself, or the download of a hub name. Ranks may call this together."""
    if Path(path).is_dir():
        return path
    import huggingface_hub  # takes a second

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    return huggingface_hub.snapshot_download(path, allow_patterns=patterns)


def count_weights(path: str) -> int:
    """Elements of all tensors in the safetensors files of a model's folder or hub name."""
    total = 0
    for file in set(safetensor_files(local_folder(path)).values()):
        with safe_open(file, framework="pt") as opened:
            total += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    return total


def safetensor_files(path: str) -> dict[str, str]:
    """Tensor name → file, for the safetensors of a folder. Experts that are one tensor have a name for each.

    Raises ValueError if a file is not whole, or if it is not clear which files are the model.
    """
    index = Path(path, "model.safetensors.index.json")
    whole = Path(path, "model.safetensors")
    files = {*Path(path).glob("*.safetensors")}
    if not index.exists() and files != {whole}:  # without an index vLLM reads them all
        held = ", ".join(sorted(file.name for file in files)) or "no safetensors"
        kind = show_kind(file.name for file in Path(path).iterdir())
        raise ValueError(f"without {index.name} it must hold {whole.name} and no others, but has {held}{kind}")

    found = {}
    file = index
    try:
        if index.exists():
            files = {Path(path, name) for name in json.loads(index.read_text())["weight_map"].values()}
        for file in sorted(files):
            found |= dict.fromkeys(tensor_names(file), str(file))
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"{file} cannot be read ({error}): it is missing, cut off, or a pointer of git-lfs; fetch it again "
            f"(`git lfs pull`, `hf download`), or remove {index.name}, if {whole.name} is the model"
        ) from None
    return found


def tensor_names(path: Path) -> list[str]:
    """The names of the tensors in a safetensors file, for `read_tensor`."""
    names = []
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            block, _, last = name.rpartition(".")
            if block.endswith(".experts") and last in JOINED and not name.startswith(UNTRAINED):
                for expert in range(file.get_slice(name).get_shape()[0]):
                    names += [f"{block}.{expert}.{part}_proj.weight" for part in JOINED[last]]
            else:
                names.append(name)
    return names


def read_tensor(file, name: str) -> torch.Tensor:
    """A tensor of an open safetensors file, by a name of `tensor_names`."""
    match = EXPERT.fullmatch(name)
    if not match or name in file.keys():  # noqa: SIM118
        return file.get_tensor(name)

    # One of the experts that are one tensor: down_proj [experts, ...], gate_up_proj [experts, 2 × ..., ...]
    block, expert, part = match.groups()
    if part == "down":
        return file.get_slice(f"{block}.down_proj")[int(expert)]
    whole = file.get_slice(f"{block}.gate_up_proj")
    half = whole.get_shape()[1] // 2
    return whole[int(expert), :half] if part == "gate" else whole[int(expert), half:]


def digest_weights(path: str) -> str:
    """Digest of a model's tensors, whichever files hold them. Each rank reads a share, and all return the same."""
    files = safetensor_files(path)
    digests = []
    for name in sorted(files)[dist.get_rank() :: dist.get_world_size()]:
        with safe_open(files[name], framework="pt") as file:
            content = read_tensor(file, name).flatten().view(torch.uint8).numpy()
            digests.append((name, hashlib.sha256(content).hexdigest()))
    whole = sorted(chain.from_iterable(ranks.gather(digests)))
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()


def untrained(path) -> Iterator[tuple]:
    """The (name, tensor) pairs of a folder that are no part of the model that is trained."""
    for name, path_of in safetensor_files(path).items():
        if name.startswith(UNTRAINED):
            with safe_open(path_of, framework="pt") as file:
                yield name, read_tensor(file, name)


def export_hf(weights: Iterable[tuple], source, target: Path):
    """Write (Hugging Face name, full tensor) pairs to the folder `target` so that transformers and vLLM load it.

    Config, tokenizer and UNTRAINED weights come from `source`. All ranks call this. Rank 0 writes, with at most one
    file of EXPORT_SHARD_BYTES in memory. `target` is complete or absent.
    """
    if dist.get_rank() == 0:
        with complete_folder(target) as folder:
            for file in Path(source).iterdir():
                if file.suffix in (".json", ".jinja", ".txt", ".model") and not file.name.endswith(".index.json"):
                    shutil.copy(file, folder)
            templates = Path(source, "additional_chat_templates")
            if templates.is_dir():
                shutil.copytree(templates, folder / templates.name)

            weight_map = {}
            on_host = ((name, tensor.cpu()) for name, tensor in weights)
            for shard in split_by_bytes(chain(on_host, untrained(source)), EXPORT_SHARD_BYTES):
                file = f"model-{len(set(weight_map.values())):05d}.safetensors"
                save_file(dict(shard), folder / file, metadata={"format": "pt"})
                weight_map |= dict.fromkeys(dict(shard), file)
                del shard  # before the next is gathered

            index = {"metadata": {}, "weight_map": weight_map}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    else:
        for _ in weights:  # gathering a tensor needs every rank
            pass
    dist.barrier()
