"""Patches of vLLM 0.32, for the CPU alone: unique names in shared memory, pushes into packed weights, routes, masks."""

import uuid
from functools import partial
from pathlib import Path

import numpy
import torch

from grpo.parts.base import ranks
from grpo.parts.engine import invariant
from grpo.parts.engine.push_check import digest


def prepare(by_row=False):
    """Patch vLLM before it starts, on all ranks. Returns the prefix, unique to this run, of its files in /dev/shm.

    With `by_row`, what it computes for a token does not depend on the batch.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as shm

    note_packed_weights()
    if by_row:
        invariant.prepare()

    prefix = f"train-grpo-{ranks.gather(uuid.uuid4().hex)[0]}"  # rank 0's
    group_name = shm.make_group_name
    shm.make_group_name = staticmethod(lambda communicator: prefix + group_name(communicator).replace("/", ""))
    return prefix


def patch_started(llm, prefix, return_routes, return_masks):
    """Unlink its files in /dev/shm. Let it return each answer's routes, and the ids that each token was drawn from.

    vLLM 0.32 itself returns these with model runner V2 only, which needs a GPU.
    """
    for file in Path("/dev/shm").glob(f"{prefix}*"):  # every rank has mapped them, and they cannot outlive the run now
        file.unlink(missing_ok=True)

    core = llm.llm_engine.engine_core.engine_core
    if return_routes:
        core.scheduler.aux_output_connector = Routes(llm)
    if return_masks:
        core.scheduler.return_sampling_mask = True
        add_masks(core.model_executor.driver_worker.model_runner)


# ---------------------------------------------------------------- packed weights


def note_packed_weights():
    """Make vLLM's CPU layers keep, as `packed`, the ordered digests {name: [4]} of the weights they pack.

    vLLM 0.32 packs weights for its kernels as they are loaded and drops the originals, so a push is visible only there.
    """
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as Experts

    def note(layer, *names):
        dtype = getattr(layer, names[0]).dtype  # of a bias too, which some kernels want in fp32
        layer.packed = {}
        for name in names:
            weight = getattr(layer, name, None)
            if weight is not None and not weight.is_meta:
                layer.packed[name] = digest(weight.to(dtype), ordered=True)

    pack = utils.dispatch_cpu_unquantized_gemm
    pack_experts = Experts.process_weights_after_loading

    def note_and_pack(layer, remove_weight):
        note(layer, "weight", "bias")
        pack(layer, remove_weight)

    def note_and_pack_experts(self, layer):
        note(layer, "w13_weight", "w2_weight")
        pack_experts(self, layer)

    utils.dispatch_cpu_unquantized_gemm = note_and_pack
    Experts.process_weights_after_loading = note_and_pack_experts


def unpack_experts(model):
    """Make a reload pack experts again. On the CPU vLLM 0.32 does so only if it finds no kernel."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def repack_lm_head(model):
    """Pack a tied output layer again. On the CPU vLLM 0.32 keeps a packed copy, which a reload leaves stale."""
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


# ---------------------------------------------------------------- masks and routes


def add_masks(runner):
    """Put into the runner's output the ids that have a log-prob in the distribution that is sampled from."""
    from vllm.v1.outputs import SamplingMaskLists

    sample, sample_tokens = runner.sampler.sample, runner.sample_tokens
    found = []  # the tokens sampled last, and their distributions, [rows, vocab]

    def note(*args):
        found[:] = sample(*args)
        return found

    def with_masks(*args):
        output = sample_tokens(*args)
        if runner.sampler.return_sampling_mask:
            rows, ids = torch.where(found[1].isfinite())
            starts = numpy.searchsorted(rows.numpy(), numpy.arange(len(found[1]) + 1))
            output.sampling_masks = SamplingMaskLists(ids.int().numpy(), starts)
        return output

    runner.sampler.sample = note
    runner.sample_tokens = with_masks


class Routes:
    """The experts of every token in the KV cache, by its blocks, in place of vLLM's AuxOutputSchedulerConnector."""

    def __init__(self, llm):
        from vllm.v1.kv_cache_interface import AttentionSpec

        engine = llm.llm_engine
        model = engine.vllm_config.model_config
        scheduler = engine.engine_core.engine_core.scheduler
        self.manager = scheduler.kv_cache_manager

        # Linear attention has groups of its own, which hold states.
        groups = scheduler.kv_cache_config.kv_cache_groups
        self.group = [isinstance(group.kv_cache_spec, AttentionSpec) for group in groups].index(True)
        self.attention = groups[self.group].layer_names[0]

        self.experts = torch.zeros(
            scheduler.kv_cache_config.num_blocks,
            groups[self.group].kv_cache_spec.block_size,
            model.get_total_num_hidden_layers(),
            model.get_num_experts_per_tok(),
            dtype=torch.uint8 if model.get_num_experts() <= 256 else torch.int16,
        )
        llm.apply_model(self.listen)

    def listen(self, model):
        """Let the routers of the model call `note`."""
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        for module in model.modules():
            if isinstance(module, MoERunner):
                module.router.set_capture_fn(partial(self.note, module.layer_id))

    def note(self, layer, experts):
        """Store the experts [tokens, k] of a forward pass at its tokens' slots in the KV cache."""
        from vllm.forward_context import get_forward_context

        slots = get_forward_context().slot_mapping  # {name of an attention layer: [tokens]}; {} in a profiling run
        if slots:
            slots = slots[self.attention]
            self.experts.flatten(0, 1)[slots, layer] = experts[: len(slots)].to(self.experts.dtype)

    def take_output(self, request, unused):
        """The experts of the tokens that were computed for a request's last one, [tokens, layers, k].

        vLLM joins them. A text of rollout.stop ends an answer outside of the scheduler, where no request finishes.
        """
        blocks = self.manager.get_block_ids(request.request_id)[self.group]
        first = 0 if request.num_output_tokens == 1 else request.num_tokens - 2
        return self.experts[blocks].flatten(0, 1)[first : request.num_tokens - 1].numpy()

    def _ignore(self, *unused):
        """vLLM calls these. New tokens overwrite the experts in their slots, so there is nothing to do."""

    build_connector_meta = request_finished = reset = _ignore
