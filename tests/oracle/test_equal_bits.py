"""With model.match_engine, whose forward pass is in vLLM's arithmetic, gradients equal those of plain transformers in
float64 on every layout; and in real runs no log-prob has other bits than vLLM's.
"""

import pytest
import torch

from tests.oracle import layouts
from tests.oracle.layouts import check_update, make_samples
from tests.oracle.plain import reference

pytestmark = pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="needs AVX-512 BF16")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
QUICK = {"qwen2": ("TP2·CP2", "TP2·PP2·VPP2, overlap, full recompute"), "qwen3_moe": ("EP2·TP2·ETP2·DP2",)}
CASES = [
    pytest.param(family, layout, marks=() if layout in QUICK.get(family, ()) else pytest.mark.slow)
    for family in FAMILIES
    for layout in layouts.layouts_of(family)
]


@pytest.fixture(scope="module")
def results(request, fork_server, tmp_path_factory) -> layouts.Results:
    return layouts.run_asked(
        request, fork_server, tmp_path_factory, layouts.layouts_of,
        lambda folder, given: reference(folder, make_samples(), given), "model.match_engine=true",
    )  # fmt: skip


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_update_equals_plain_transformers(results, family, layout):
    found, wanted, _ = results[family]
    check_update(found[layout], wanted)
