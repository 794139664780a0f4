"""How vLLM's answers are collected: in a lean loop that uses private parts of vLLM, or in vLLM's own.

For readers of a stream vLLM makes objects for each token: an output, and a dict with its log-prob. The trainer wants
whole answers, so the lean loop hands a request to vLLM's output processor once, at its end. Tokens, log-probs and ends
are the same, and the host needs about half the time for each token.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator

from grpo.parts.base.ranks import tell

VERSIONS = ("0.26.", "0.32.")  # of vLLM, whose private parts the lean loop fits


def choose_loop(engine) -> Callable[..., Iterator]:
    """`lean_loop` if vLLM is one of VERSIONS, whose scheduler is then patched too. Else `own_loop`, with a note."""
    import vllm

    if vllm.__version__.startswith(VERSIONS):
        skip_no_ops(engine.engine_core.engine_core.scheduler)
        return lean_loop

    tell(f"note: vLLM's own loop samples, which is slower: no lean loop for vLLM {vllm.__version__}")
    return own_loop


def own_loop(engine) -> Iterator[list]:
    """Yield, at each step, the RequestOutputs that end in it, with the log-probs of their answers as floats."""
    while True:
        ended = engine.step()
        for output in ended:
            for answer in output.outputs:
                pairs = zip(answer.logprobs, answer.token_ids, strict=True)
                answer.logprobs = [at[token].logprob for at, token in pairs]
        yield ended


def lean_loop(engine) -> Iterator[list]:
    """What `own_loop` yields. Requests must have no stop texts, which need each token decoded, and return no routes."""
    processor = engine.output_processor
    ids, logps = defaultdict(list), defaultdict(list)

    while True:
        ended = []
        for output in engine.engine_core.get_output().outputs:
            ids[output.request_id] += output.new_token_ids
            # `item` raises an error unless there is exactly one token.
            logps[output.request_id].append(output.new_logprobs.logprobs.item())

            # The output of the last token becomes that of the whole answer.
            if output.finish_reason is not None:
                state = processor.request_states[output.request_id]
                state.logprobs_processor.logprobs = logps.pop(output.request_id)
                output.new_token_ids = ids.pop(output.request_id)
                output.new_logprobs = None
                ended.append(output)
        yield processor.process_outputs(ended).request_outputs


def skip_no_ops(scheduler):
    """Let a decode step skip the request for slots if it neither begins nor fills a block: its block has the slot.

    vLLM then neither allocates nor caches a block, if attention is full, no other engine shares the cache, and no token
    is speculative. Otherwise the scheduler stays as it is.
    """
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    manager = scheduler.kv_cache_manager
    groups = manager.coordinator.single_type_managers
    if [type(group) for group in groups] != [FullAttentionManager]:
        return
    if scheduler.connector or scheduler.num_lookahead_tokens:
        return

    allocate = manager.allocate_slots
    size = groups[0].block_size
    no_blocks = manager.empty_kv_cache_blocks

    def allocate_slots(request, num_new_tokens, *args, **options):
        done = request.num_computed_tokens
        is_decode = num_new_tokens == 1 and done >= request.num_prompt_tokens
        if is_decode and 0 < done % size < size - 1:
            return no_blocks
        return allocate(request, num_new_tokens, *args, **options)

    manager.allocate_slots = allocate_slots
