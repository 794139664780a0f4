"""What goes to Megatron-core and vLLM as it is: every option that may be given works, every other one is refused."""

import fnmatch
import json

import pytest
from safetensors.torch import load_file

import megatron_bridge as bridge
from config import UserError
from grpo.parts.base.read_config import override
from grpo.parts.engine.vllm_process import engine_options
from grpo.parts.model import head, layers, offload
from grpo.parts.model.optimizer_state import main_weights
from grpo.run.preflight import options
from grpo.step.packing import pack
from tests.checkpoint_worker import TRAIN, made_up_update
from tests.conftest import REPO, build_model, check_state, megatron_fields, tiny_config, tiny_model, wrap
from tests.layout_worker import equal, one_layout
from tests.oracle.layouts import FULL, make_plan, run_worker
from tests.oracle.reference import relative
from train_grpo import Sample, flatten


def test_the_tables_are_of_the_libraries_here():
    """Each name is a field of Megatron-core, each pattern one of vLLM's options; all others of Megatron are refused."""
    fields = megatron_fields()
    assert {*options.TABLES["megatron_works"], *options.TABLES["megatron_owned"], *options.MEGATRON_TYPES} <= fields
    for name in fields - {*options.TABLES["megatron_works"]}:
        with pytest.raises(UserError, match=rf"megatron\.{name} may not be set"):
            options.check_megatron({name: None}, bridge.CONFIG_CLASSES, "bf16")
    for pattern in (pattern for patterns in options.TABLES["vllm_owned"].values() for pattern in patterns):
        assert fnmatch.filter(engine_options(), pattern), pattern


def test_the_document_names_what_works():
    assert all(f"`{name}`" in (REPO / "docs/options.md").read_text() for name in options.TABLES["megatron_works"])


# ---------------------------------------------------------------- the same update with and without

COMMON = [
    "megatron.recompute_granularity=selective", "megatron.bias_activation_fusion=true",
    "megatron.bias_dropout_fusion=true", "megatron.clone_scatter_output_in_embedding=false",
    "megatron.deallocate_pipeline_outputs=true", "megatron.batch_p2p_sync=true", "megatron.deterministic_mode=true",
    "megatron.bucket_size=20000", "megatron.pad_buckets_for_high_nccl_busbw=true",
    "megatron.disable_bf16_reduced_precision_matmul=true", "megatron.grad_reduce_in_fp32=false",
]  # fmt: skip
EVERYTHING = {
    "qwen2": {"options": [*COMMON, "megatron.recompute_modules=[core_attn,mlp]"]},
    "qwen2_moe": {
        "options": [
            *COMMON, "megatron.recompute_modules=[core_attn,moe,shared_experts]", "megatron.moe_router_dtype=fp64",
        ],
        "layer": ["megatron.moe_layer_recompute=true"],
        "sequential": ["megatron.moe_grouped_gemm=false"],
    },
}  # fmt: skip


def check_same(plain, found):
    assert found.keys() == plain.keys() and found["same"] == 1
    for name in ("logp", "loss", "grad_norm", *(name for name in plain if name.startswith("grad."))):
        assert relative(found[name], plain[name].double()) < 1e-5, name


def test_options_change_no_update(world, tmp_path):
    chosen = EVERYTHING["qwen2_moe"]
    plan = make_plan(tmp_path, "qwen2_moe", layouts={"plain": [], **chosen})
    plain = one_layout(plan, "plain")
    for name in chosen:
        check_same(plain, one_layout(plan, name))


@pytest.mark.parametrize("family", EVERYTHING)
def test_gradients_that_products_add_to_main_grad_are_the_same(world, tmp_path, monkeypatch, family):
    """As on GPUs; the first family ties its head, whose weight gets the embedding's gradient besides."""
    plan = make_plan(tmp_path, family, layouts={"plain": [], "overlap": ["megatron.overlap_grad_reduce=true"]})
    plain = one_layout(plan, "plain")

    def fused(function, *args):
        config = function(*args)
        config.gradient_accumulation_fusion = True
        return config

    wrap(monkeypatch, bridge, "transformer_config", fused)
    added = []
    apex = layers.linear.fused_weight_gradient_mlp_cuda
    wrap(monkeypatch, apex, "wgrad_gemm_accum_fp32", lambda function, *args: added.append(function(*args)))
    check_same(plain, one_layout(plan, "overlap"))
    assert added


@pytest.mark.parametrize("family", ["qwen2", pytest.param("qwen2_moe", marks=pytest.mark.slow)])
def test_offloaded_activations_change_no_bit(world, tmp_path, monkeypatch, family):
    """Also those that are recomputed; every activation of a tiny model is small."""
    packed = []

    class Counted(offload.save_on_cpu):
        def __init__(self, **options):
            super().__init__(**options)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: packed.append(tensor.shape) or pack(tensor)

    monkeypatch.setattr(offload, "SMALLEST", 0)
    monkeypatch.setattr(offload, "save_on_cpu", Counted)
    on = "train.offload_activations=true"
    layouts = {"plain": [], "offloaded": [on], "full": FULL, "offloaded full": [on, *FULL]}
    plan = make_plan(tmp_path, family, layouts=layouts)

    found, counts = {}, {}
    for name in layouts:
        packed.clear()
        found[name], counts[name] = one_layout(plan, name), len(packed)
    assert equal(found["plain"], found["offloaded"]) and equal(found["full"], found["offloaded full"])
    assert counts["plain"] == counts["full"] == 0 < 4 * counts["offloaded full"] < counts["offloaded"], counts


@pytest.mark.slow
def test_options_change_no_update_of_two_ranks(fork_server, tmp_path):
    sizes = {"TP2": ["parallel.tp=2"], "PP2": ["parallel.pp=2"], "DP2": []}
    plans = []
    for family, chosen in EVERYTHING.items():
        (tmp_path / family).mkdir()
        layouts = {
            f"{size} {name}": [*sizes[size], *overrides]
            for size in sizes
            for name, overrides in {"plain": [], **chosen}.items()
        }
        plans.append(make_plan(tmp_path / family, family, layouts=layouts))
    for found in run_worker(fork_server, tmp_path, 2, *plans):
        for layout in found:
            check_same(found[f"{layout.split()[0]} plain"], found[layout])


# ---------------------------------------------------------------- Adam on the host

HOST = {"optimizer_cpu_offload": True}
HALF = {**HOST, "optimizer_offload_fraction": 0.5, "overlap_cpu_optimizer_d2h_h2d": True, "pin_cpu_grads": False}
OFFLOADS = {
    "host": HOST,
    "half": HALF,
    "precise": {**HOST, "use_precision_aware_optimizer": True},
}


@pytest.fixture
def small(tmp_path):
    """The configuration of a model of four layers in bf16, whose folder has fp32 though its config.json says bf16."""
    file = tiny_model(tmp_path / "model", layers=4) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "bfloat16"}))
    return tiny_config(f"model.path={file.parent}", "model.dtype=bf16")


def test_adam_on_the_host_makes_the_same_updates(world, small):
    def trained(extra):
        model = build_model(override(small, {"megatron": extra}))
        optimizer = bridge.build_optimizer(model, TRAIN, extra, small.model.path)
        _, embedding = main_weights(model, optimizer)[bridge.named_weights(model)["embedding.word_embeddings.weight"]]
        assert embedding.equal(
            load_file(f"{small.model.path}/model.safetensors")["model.embed_tokens.weight"].flatten()
        )

        for number in range(3):
            made_up_update(model, optimizer, number)
        names = {weight: name for name, weight in bridge.named_weights(model).items()}
        found = {names[weight]: main.clone() for weight, (_, main) in main_weights(model, optimizer).items()}
        for name, weight in bridge.named_weights(model).items():  # what samples and trains is what Adam steps
            assert weight.detach().flatten().equal(found[name].bfloat16()), name

        hosts = [part.optimizer for part in optimizer.chained_optimizers if extra]
        assert all(host.cpu_optimizers and bool(host.gpu_optimizer) == ("pin_cpu_grads" in extra) for host in hosts)
        return found

    plain = trained({})
    for name, extra in OFFLOADS.items():
        found = trained(extra)
        assert found.keys() == plain.keys()
        assert max(relative(found[weight], plain[weight].double()) for weight in plain) < 1e-5, name


@pytest.mark.slow
def test_its_state_is_saved_and_loaded(fork_server, small, tmp_path):
    layouts = {name: {"megatron": extra} for name, extra in OFFLOADS.items()} | {"tp2": {"tp": 2, "megatron": HALF}}
    check_state(fork_server, tmp_path, "bf16", layouts, 2)


@pytest.mark.slow
def test_an_exact_run_has_its_kernels(train_forked):
    """torch's deterministic ones, which exist for all that runs on the CPU."""
    options = ("rollout.exact=true", "parallel.tp=2", "rollout.tp=2", "train.steps=2", "train.save_every=0")
    train_forked(2, *options, code=0)


def test_an_fp32_head_rounds_no_logits(world, small):
    """Log-probs of a bf16 model against those of its last hidden states and its head in float64."""
    batch = flatten([Sample(0, [1, 2, 3], [4, 5, 6, 7], [-1.0] * 4, True, "", "s")])
    off = {}
    for fp32_head in (False, True):
        (chunk,) = build_model(override(small, {"model.fp32_head": fp32_head}))
        mb = pack(batch, [0], 6, "cpu")
        hidden = bridge.hidden_states(chunk, mb)
        logp_T, _ = head.token_logprobs(chunk, hidden, mb, 1.0)
        weight = bridge.unwrap_model(chunk).shared_embedding_or_output_weight()

        exact_TV = (hidden[:, 0].double() @ weight.double().T).log_softmax(-1)
        exact_T = exact_TV.gather(1, mb.targets[0].long()[:, None])[:, 0] * mb.mask[0]
        off[fp32_head] = (logp_T - exact_T).abs().max().item()

        logp_T.sum().backward()
        assert chunk.module.embedding.word_embeddings.weight.main_grad.abs().sum() > 0
    assert off[True] < 2e-6 < 5e-4 < off[False], off
