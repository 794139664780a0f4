"""The arguments of vLLM on a GPU, as its own objects have them. Only its start is left out, since there is no GPU."""

import os

import pytest
import torch

from config import Config
from grpo.parts.base.read_config import override
from grpo.parts.engine import vllm_process
from rollout import Engine

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
NAMES = (
    "VLLM_USE_V2_MODEL_RUNNER", *ALLOCATOR, "VLLM_BATCH_INVARIANT", "CUBLAS_WORKSPACE_CONFIG", "TRITON_F32_DEFAULT",
    "VLLM_USE_FLASHINFER_SAMPLER",
)  # fmt: skip


@pytest.fixture
def told(monkeypatch, tiny):
    """told({key: value}) → (vLLM's arguments, the levels of its sleeps) on a machine with two GPUs.

    `told.order` has "start" and, each as it was given, the settings of torch's allocator."""
    vllm_process.set_environment()
    import vllm

    for name, value in {"RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    for name in NAMES:  # set first, so that what the engine sets is taken back too
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    slept, order = [], []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", order.append)

    class NotStarted:
        llm_engine = None

        def __init__(self, **settings):
            order.append("start")
            self.args = vllm.EngineArgs(**settings)

        def sleep(self, level):
            slept.append(level)

        def apply_model(self, function):
            return [function(torch.nn.Module())]

    monkeypatch.setattr(vllm, "LLM", NotStarted)
    monkeypatch.setattr("rollout.PushCheck", lambda *_: None)
    monkeypatch.setattr("rollout.lean.choose_loop", lambda _: None)

    def engine(values):
        cfg = override(Config(model={"path": str(tiny / "model")}, data={"train": "d"}), values)
        return Engine(cfg.model.path, cfg.model, cfg.rollout, 128, cfg.algo.replay_routes).llm.args, slept

    engine.order = order
    return engine


def test_settings_on_a_gpu(told):
    args, slept = told({"rollout.prompts_per_step": 6, "rollout.group_size": 4, "rollout.tp": 2})
    assert args.enable_sleep_mode and args.enable_chunked_prefill and not args.enforce_eager
    assert args.compilation_config.max_cudagraph_capture_size == 16  # 3 of 6 prompts for each of two engines, 4 answers
    # Its graphs' buffers are shared between the ranks of an engine, which expandable segments do not allow.
    assert told.order == ["start", "expandable_segments:True"] and not args.disable_custom_all_reduce
    assert not any(name in os.environ for name in ALLOCATOR)
    assert slept == [2] and args.hf_overrides == {} and not args.enable_return_routed_experts
    assert told({"algo.replay_routes": True})[0].enable_return_routed_experts
    assert told({"rollout.top_p": 0.9})[0].return_sampling_mask and not args.return_sampling_mask
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1" and "VLLM_BATCH_INVARIANT" not in os.environ


def test_a_push_is_copied_in_where_vllm_changes_no_weight(told):
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    told({})  # vLLM's variables
    model = torch.nn.ModuleList([torch.nn.Module(), torch.nn.Module()])
    model[0].quant_method = UnquantizedLinearMethod()
    assert vllm_process.keeps_weights(model)
    model[1].quant_method = object()  # of quantized weights, or of experts
    assert not vllm_process.keeps_weights(model)


def test_an_fp32_model_has_fp32_products_in_vllms_attention(told):
    told({"model.dtype": "fp16"})
    assert "TRITON_F32_DEFAULT" not in os.environ
    args, _ = told({"model.dtype": "fp32"})
    assert os.environ["TRITON_F32_DEFAULT"] == "ieee" and args.dtype == "float32"


def test_keys_reach_vllm_and_what_the_user_set_stays(told, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert told({"rollout.vllm": {"enable_sleep_mode": False}})[1] == []  # nothing sleeps
    args, slept = told({
        "rollout.sleep_level": 1, "rollout.exact": True, "model.fp32_head": True, "rollout.prompts_per_step": 4096,
        "rollout.vllm": {"quantization": "fp8", "enable_chunked_prefill": False},
    })  # fmt: skip
    assert slept == [1] and args.quantization == "fp8" and not args.enable_chunked_prefill
    assert args.hf_overrides == {"head_dtype": "float32"} and args.compilation_config.max_cudagraph_capture_size == 512
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0" and os.environ["VLLM_BATCH_INVARIANT"] == "1"


@pytest.mark.parametrize("batch, tp, wanted", [(300, 1, 300), (300, 2, None), (9999, 1, 512)])
def test_the_answers_of_a_step_run_together_where_vllm_would_part_them(batch, tp, wanted):
    """Its default is 256 for each rank of an engine on a CPU, and on the GPUs below 70 GiB 256."""
    assert vllm_process.most_sequences(batch, tp).get("max_num_seqs") == wanted


HEAD = 2 * 2 * 32  # numbers of a token in two layers, its key and its value, in one head


@pytest.mark.parametrize(
    "dtype, tp, longest, most, size",
    [("float32", 1, 8, None, 256 * 2 * 128 * 2 * HEAD * 4), ("bfloat16", 2, 128, None, 512 * 3 * 128 * HEAD * 2),
     ("float32", 4, 8, 300, 300 * 2 * 128 * HEAD * 4), ("float32", 1, 100_000, None, 2**30),
     ("float32", 1, 2_000_000, None, (2_000_000 // 128 + 2) * 128 * 2 * HEAD * 4)],
)  # fmt: skip
def test_a_cpu_has_a_kv_cache_for_all_sequences(tiny, dtype, tp, longest, most, size):
    """Of two key-value heads each rank has one with tp 2, and with tp 4 too. A block has 128 tokens."""
    found = vllm_process.cpu_cache(str(tiny / "model"), dtype, tp, longest, most)
    assert found == {"kv_cache_memory_bytes": size}


@pytest.mark.parametrize("batch, size", [(12, 16), (300, 304), (9999, 512)])
def test_the_fullest_batch_of_a_step_has_a_cuda_graph(batch, size):
    """vLLM captures multiples of 8, and above 256 of 16, and cuts off what is above the last of them."""
    assert vllm_process.capture_size(batch) == size


def test_the_users_allocator_settings_stay(told, monkeypatch):
    monkeypatch.setenv(ALLOCATOR[1], "max_split_size_mb:512")
    told({"rollout.tp": 2})
    assert told.order == ["start"] and os.environ[ALLOCATOR[1]] == "max_split_size_mb:512"
