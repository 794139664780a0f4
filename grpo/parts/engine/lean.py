"""How vLLM's answers are collected: in a lean loop that leans on private parts of vLLM, or in vLLM's own.

For readers of a stream vLLM makes objects of each token: an output, a dict with its log-prob. Whole answers are wanted
here, so the lean loop hands a request to vLLM's output processor once, at its end. Tokens, log-probs and ends are the
same, and the host works about half as long a token.
"""

import inspect
import os
from collections import defaultdict
from collections.abc import Callable, Iterator


def choose_loop(engine) -> Callable[..., Iterator]:
    """`lean_loop`, after `skip_no_ops`, if this LLMEngine has what they use; else `own_loop`, and rank 0 says so."""
    try:
        missing = lacking(engine)
    except (AttributeError, ImportError) as error:
        missing = [str(error)]
    if not missing:
        skip_no_ops(engine.engine_core.engine_core.scheduler)
        return lean_loop
    if os.environ["RANK"] == "0":
        print(f"note: vLLM's own loop samples, which is slower: it is unlike 0.26 and 0.32 in {missing[0]}", flush=True)
    return own_loop


def lacking(engine) -> list[str]:
    """The private parts that this engine lacks, of those that `lean_loop` and `skip_no_ops` use."""
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.engine.output_processor import OutputProcessorOutput, RequestState
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.request import Request

    scheduler = engine.engine_core.engine_core.scheduler
    manager = scheduler.kv_cache_manager
    needed = {  # what must be there: in a class, set in its __init__, in an object, among a function's arguments
        "EngineCoreOutput": (EngineCoreOutput.__annotations__, "request_id new_token_ids new_logprobs finish_reason"),
        "LogprobsLists": (LogprobsLists.__annotations__, "logprobs"),
        "LogprobsProcessor": (LogprobsProcessor.__annotations__, "logprobs"),
        "OutputProcessorOutput": (OutputProcessorOutput.__annotations__, "request_outputs"),
        "RequestState": (RequestState.__init__.__code__.co_names, "logprobs_processor"),
        "Request": (Request.__init__.__code__.co_names, "num_computed_tokens num_prompt_tokens"),
        "OutputProcessor": (dir(engine.output_processor), "request_states process_outputs"),
        "EngineCoreClient": (dir(engine.engine_core), "get_output"),
        "Scheduler": (dir(scheduler), "connector num_lookahead_tokens"),
        "KVCacheManager": (dir(manager), "empty_kv_cache_blocks"),
        "KVCacheCoordinator": (dir(manager.coordinator), "single_type_managers"),
        "allocate_slots": ([*inspect.signature(manager.allocate_slots).parameters][:2], "request num_new_tokens"),
    }
    return [f"{part}.{name}" for part, (there, names) in needed.items() for name in names.split() if name not in there]


def own_loop(engine) -> Iterator[list]:
    """Yield, at each step, the RequestOutputs of those that end in it, with the log-probs of answers as floats."""
    while True:
        ended = engine.step()
        for answer in (answer for output in ended for answer in output.outputs):
            pairs = zip(answer.logprobs, answer.token_ids, strict=True)
            answer.logprobs = [at[token].logprob for at, token in pairs]
        yield ended


def lean_loop(engine) -> Iterator[list]:
    """What `own_loop` yields, if requests have no stop texts, which need each token decoded, and return no routes."""
    processor = engine.output_processor
    ids, logps = defaultdict(list), defaultdict(list)
    while True:
        ended = []
        for output in engine.engine_core.get_output().outputs:
            ids[output.request_id] += output.new_token_ids
            logps[output.request_id].append(output.new_logprobs.logprobs.item())  # an error unless it is of one token
            if output.finish_reason is not None:
                state = processor.request_states[output.request_id]
                state.logprobs_processor.logprobs = logps.pop(output.request_id)
                output.new_token_ids, output.new_logprobs = ids.pop(output.request_id), None
                ended.append(output)
        yield processor.process_outputs(ended).request_outputs


def skip_no_ops(scheduler) -> None:
    """Let a decode step not ask for slots where its block has them: where no block begins, and none is filled.

    vLLM then neither allocates nor caches a block, if attention is full, no other engine shares the cache, and no token
    is speculative; else it is left alone.
    """
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    manager = scheduler.kv_cache_manager
    groups = manager.coordinator.single_type_managers
    is_plain = not scheduler.connector and not scheduler.num_lookahead_tokens
    if [type(group) for group in groups] != [FullAttentionManager] or not is_plain:
        return
    allocate, size, none = manager.allocate_slots, groups[0].block_size, manager.empty_kv_cache_blocks

    def allocate_slots(request, num_new_tokens, *args, **options):
        done = request.num_computed_tokens
        if num_new_tokens == 1 and done >= request.num_prompt_tokens and 0 < done % size < size - 1:
            return none
        return allocate(request, num_new_tokens, *args, **options)

    manager.allocate_slots = allocate_slots
