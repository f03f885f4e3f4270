"""Heads in DSpark's and DFlash's forms in vLLM's own draft models; ``make vllm-test`` runs this.

vLLM drafts with DSpark's form only in its second model runner, which needs Triton and a GPU. So the classes
are made here, with attention of torch in place of the engine's paged one.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from drafters.base import load_weights
from drafters.build import build_drafter
from drafters.config import DrafterConfig
from drafters.parallel import ParallelDrafter
from export.draft_directory import draft_config, draft_weights, write_draft
from tests.integrations.vllm.servers import ENVIRONMENT, UNBOUND

CONTEXT, FRAMES = 11, 8
DEMO_HEAD = Path(__file__).parents[3] / "demo/heads/ctc"

pytestmark = pytest.mark.skipif("VLLM_TEST_MODEL" not in os.environ, reason="make vllm-test runs this")


class TorchAttention(nn.Module):
    """Attention of a block to the context, whose keys and values vLLM writes first, and to itself."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int):
        super().__init__()
        self.shapes = (num_heads, head_dim), (num_kv_heads, head_dim), (num_kv_heads, head_dim)
        self.impl, self.kv_cache = SimpleNamespace(do_kv_cache_update=self.keep), None
        self.context: tuple[Tensor, Tensor] | None = None

    def keep(self, layer: Any, key: Tensor, value: Tensor, cache: Any, slots: Any) -> None:
        self.context = key.clone(), value.clone()

    def forward(self, *projected: Tensor) -> Tensor:
        query, key, value = (x.unflatten(-1, shape) for x, shape in zip(projected, self.shapes, strict=True))
        assert self.context is not None
        key, value = (torch.cat(pair) for pair in zip(self.context, (key, value), strict=True))
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        attended = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return attended[0].transpose(0, 1).flatten(1)


@pytest.fixture(scope="module", params=["dspark", "dflash"])
def head(request: pytest.FixtureRequest) -> ParallelDrafter:
    """A random head for the demo's model."""
    trunk: str = request.param
    values = DrafterConfig.load(DEMO_HEAD).to_dict() | {
        "drafter_type": "block",
        "trunk": trunk,
        "num_layers": 2,
        "frame_start": "anchor",
        "start_size": None,
        "transition": "markov" if trunk == "dspark" else "none",
        "num_frames": FRAMES,
        "mask_token_id": 7,
    }
    torch.manual_seed(0)
    head: Any = build_drafter(DrafterConfig.from_dict(values))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
        # vLLM's norm for CPUs takes the first layer's weights for the keys of all layers.
        head.layers[1].k_norm.weight.copy_(head.layers[0].k_norm.weight)
    table = load_weights(Path(os.environ["VLLM_TEST_MODEL"]) / "model.safetensors")[
        "model.embed_tokens.weight"
    ]
    assert isinstance(head, ParallelDrafter)
    return head.attach_base(table, torch.randn_like(table) * 0.05).eval()


@pytest.fixture(scope="module")
def draft_model(head: ParallelDrafter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """vLLM's draft model with the head's weights."""
    directory = tmp_path_factory.mktemp("draft")
    source: Any = SimpleNamespace(
        drafter=head, model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=512))
    )
    write_draft(directory, source, draft_config(source, 16), torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, **UNBOUND, "VLLM_LOGGING_LEVEL": "ERROR"}.items():
            patch.setenv(name, value)
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel
        from vllm.distributed.parallel_state import model_parallel_is_initialized
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader.utils import process_weights_after_loading
        from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
        from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM
        from vllm.utils.network_utils import get_open_port

        # It refuses DSpark because the first model runner, the only one on a CPU, does not draft with it.
        patch.setattr(VllmConfig, "_validate_v1_model_runner", lambda config: None)
        made, method = (
            Qwen3DSparkForCausalLM,
            {
                "method": "dspark",
                "num_speculative_tokens": FRAMES,
                "dspark_draft_topk": head.config.num_candidates,
            },
        )
        if head.transition is None:
            made = DFlashQwen3ForCausalLM
            method = {"method": "dflash", "num_speculative_tokens": FRAMES - 1}
        config = EngineArgs(
            model=os.environ["VLLM_TEST_MODEL"],
            dtype="float32",
            enforce_eager=True,
            speculative_config={**method, "model": str(directory)},
        ).create_engine_config()
        with set_current_vllm_config(config):
            if not model_parallel_is_initialized():
                init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
                initialize_model_parallel(1, 1)
            model: Any = made(vllm_config=config, prefix="draft")
            model.load_weights(load_file(directory / "model.safetensors").items())
            # As vLLM shares the target model's.
            model.model.embed_tokens.weight.data = head.embed_tokens
            model.lm_head.weight.data = head.lm_head
            process_weights_after_loading(model, config.model_config, torch.device("cpu"))
            attentions = []
            for layer in model.model.layers:
                own = layer.self_attn
                own.attn = TorchAttention(own.num_heads, own.num_kv_heads, own.head_dim)
                attentions.append(own.attn)
            model.model._attn_layers = attentions
            yield model


@torch.no_grad()
def test_a_block_has_the_heads_logits(draft_model: Any, head: ParallelDrafter) -> None:
    features = torch.randn(1, CONTEXT, head.config.feature_size)
    anchor = torch.tensor([[9]])
    context, block = torch.arange(CONTEXT), torch.arange(CONTEXT, CONTEXT + FRAMES)
    draft_model.precompute_and_store_context_kv(
        draft_model.combine_hidden_states(features[0]), context, context
    )
    slots = torch.cat((anchor[0], torch.full((FRAMES - 1,), head.config.mask_token_id)))
    states = draft_model(slots, block)
    mask = torch.ones(1, 1, FRAMES, CONTEXT + FRAMES, dtype=torch.bool)
    expected = head.label_logits(head(features, context[None], anchor, block[None], mask))[0]
    transition = head.transition
    if transition is None:
        torch.testing.assert_close(draft_model.compute_logits(states), expected, atol=1e-5, rtol=0)
        return
    torch.testing.assert_close(draft_model.compute_draft_logits(states), expected, atol=1e-5, rtol=0)
    labels = torch.arange(head.config.label_count)
    bias = draft_model.markov_bias(draft_model.markov_embed(anchor[0]))
    previous = transition.of_previous(anchor[0], head.embed_tokens)
    torch.testing.assert_close(bias, previous @ transition.of_following(labels, head.lm_head).mT)
    assert bias.abs().max() > 0.01


def test_every_weight_has_a_place(draft_model: Any, head: ParallelDrafter) -> None:
    """vLLM's loader raises for a name that it does not know, and no parameter is left as it was made."""
    with pytest.raises(ValueError, match=r"q_nrm"):
        draft_model.load_weights([("layers.0.self_attn.q_nrm.weight", torch.ones(64))])
    names = {name for name, _ in draft_model.named_parameters()}
    shared = {"model.mask_embedding", "model.embed_tokens.weight", "lm_head.weight"}
    merged = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    merged |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    written = set()
    for name in draft_weights(head, torch.float32):
        parts = [merged.get(part, part) for part in name.split(".")]
        written.add(".".join(("model", *parts)))
    assert written == names - shared
