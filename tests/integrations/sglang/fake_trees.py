"""The functions of SGLang's worker that a step with a tree calls, in their order, and what they call in turn.

``test_trees`` runs the same tests with SGLang's own code, where there is a copy of its sources.
"""

import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.integrations.sglang import tree_engine
from tests.integrations.sglang.fake_sglang import DFlashWorkerV2
from tests.integrations.sglang.tree_engine import DraftRunner, ForwardMode


class NgramVerifyInput:
    """As SGLang's class of this name."""

    def __init__(self, draft_token_num: int, custom_mask: Tensor, **values: Any):
        self.draft_token_num = self.num_tokens_per_req = self.max_tree_depth = draft_token_num
        self.custom_mask, self.tree_topk = custom_mask, -1
        vars(self).update(values)


class DFlashVerifyInput(SimpleNamespace):
    """As SGLang's class of this name."""

    live_seq_lens_cpu = kv_loc_cols = None

    def prepare_for_verify(self, batch: Any, target_worker: Any, *, defer_metadata_init: bool = False) -> Any:
        batch.input_ids, batch.spec_info = self.draft_token, self
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        assert self.kv_loc_plan is not None
        assert self.capture_hidden_mode == "full"
        return SimpleNamespace(**vars(batch), req_to_token=target_worker.req_to_token), False


class GrammarTree:
    """As SGLang's class of this name."""

    def __init__(self, *host: Tensor):
        self.host = host

    @classmethod
    def from_device(cls, *tensors: Tensor) -> "GrammarTree":
        return cls(*tensors)

    @classmethod
    def from_linear_chain(cls, ids: Tensor) -> "GrammarTree":
        raise AssertionError("a tree is no chain")


class DecodeCudaGraphRunner:
    """As SGLang's class of this name."""

    def get_spec_info(self, num_tokens: int) -> Any:
        return "the engine's"


def eagle_sample(tree: Any, batch: Any, output: Any) -> tuple[Tensor, Tensor, Tensor]:
    """As SGLang's function of this name, of greedy requests."""
    assert batch.sampling_info.is_all_greedy
    assert batch.sampling_info.logit_bias is None
    chosen, count = output.next_token_logits.argmax(-1), len(batch.seq_lens)
    accepted = torch.empty(count, dtype=torch.int32)
    path = torch.full((count, tree.max_tree_depth), -1, dtype=torch.int32)
    predicted, path, accepted = tree_engine.verify_tree_greedy(
        torch.zeros_like(chosen, dtype=torch.int32),
        path,
        accepted,
        tree.draft_token.view(count, -1),
        tree.retrieve_index,
        tree.retrieve_next_token,
        tree.retrieve_next_sibling,
        chosen.view(count, -1),
        tree.tree_topk,
    )
    return predicted, accepted + 1, path


def resolve_mask_policy(attn_backend: Any) -> tuple[str, bool]:
    """As ``resolve_dflash_verify_mask_policy``."""
    return type(attn_backend).__name__, False


def move_accept_tokens(batch: Any, path: Tensor, num_correct: Tensor, allocator: Any) -> None:
    """As ``move_accept_tokens_to_target_kvcache``."""
    to, source = (torch.zeros(path.numel(), dtype=torch.int64) for _ in range(2))
    tree_engine.fill_front_out_cache_loc(num_correct + 1, batch.out_cache_loc, to)
    tree_engine.fill_accept_out_cache_loc(path, batch.out_cache_loc, source, path.numel())
    allocator.get_kvcache().move_kv_cache(to, source)


# By module of SGLang, what is put into it.
CONTENTS: dict[str, dict[str, Any]] = {
    "sglang.kernels": {},
    "sglang.kernels.ops": {},
    "sglang.kernels.ops.speculative": {},
    "sglang.kernels.ops.speculative.reconstruct_tree": {
        "reconstruct_indices_from_tree_mask_func": tree_engine.reconstruct_indices_from_tree_mask
    },
    "sglang.srt.model_executor": {},
    "sglang.srt.model_executor.forward_batch_info": {"CaptureHiddenMode": SimpleNamespace(FULL="full")},
    "sglang.srt.model_executor.runner": {},
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner": {
        "DecodeCudaGraphRunner": DecodeCudaGraphRunner
    },
    "sglang.srt.speculative.dflash_info": {"DFlashVerifyInput": DFlashVerifyInput},
    "sglang.srt.speculative.dflash_utils": {"resolve_dflash_verify_mask_policy": resolve_mask_policy},
    "sglang.srt.speculative.eagle_utils": {"eagle_sample": eagle_sample},
    "sglang.srt.speculative.ngram_info": {"NgramVerifyInput": NgramVerifyInput},
    "sglang.srt.speculative.spec_utils": {
        "GrammarTree": GrammarTree,
        "move_accept_tokens_to_target_kvcache": move_accept_tokens,
    },
}


class TreeWorker(DFlashWorkerV2):
    """The step of ``DFlashWorkerV2`` with a target model; the rest is ``fake_sglang``'s."""

    def __init__(self, draft_model: Any, target: Any, block_size: int, *, uses_graphs: bool):
        self.draft_model, self.block_size, self.uses_graphs = draft_model, block_size, uses_graphs
        self.device, self.page_size = "cpu", 1
        self.model_runner = self.target_worker = target
        self._draft_sampler: Any = None
        self.draft_model_runner = DraftRunner(draft_model, target)
        draft_model.set_block_size(block_size)

    def init_cuda_graphs(self) -> None:
        if self.uses_graphs:
            sampler = self._draft_sampler = self._maybe_build_draft_sampler()
            self.draft_model_runner.capture_tail_hooks.append(
                lambda runner, out, batch, size: sampler(out.hidden_states, batch.input_ids)
            )

    def forward_batch_generation(self, batch: Any, on_publish: Any = None) -> Any:
        if batch.forward_mode.is_extend():
            out = self.target_worker.forward_batch_generation(batch)
            positions = torch.cat([torch.arange(length) for length in batch.extend_lens])
            self._append_target_hidden_to_draft_kv_by_loc(
                target_hidden=out.logits_output.hidden_states,
                cache_loc=batch.out_cache_loc,
                positions=positions,
                extend_lens=torch.tensor(batch.extend_lens),
            )
            return out
        count, width, lengths = len(batch.seq_lens), self.block_size, batch.seq_lens
        ids = torch.zeros(count, width, dtype=torch.int64)
        ids[:, 0] = batch.spec_info.bonus_tokens
        positions = (lengths.unsqueeze(1) + torch.arange(width)).flatten()
        runner = self.model_runner
        slots = runner.req_to_token[batch.req_pool_indices.unsqueeze(1), positions.view(count, width)]
        embedded = runner.model.get_input_embeddings()(ids).flatten(0, 1)
        drafted = self.draft_model_runner.forward(
            SimpleNamespace(
                input_ids=ids.flatten(),
                positions=positions,
                input_embeds=embedded,
                req_pool_indices=batch.req_pool_indices,
                seq_lens=lengths,
                out_cache_loc=slots.flatten(),
            )
        )
        if drafted.can_run_graph:
            drafts = self._draft_sampler.out[: count * (width - 1)]
        else:
            rows = drafted.logits_output.hidden_states.view(count, width, -1)[:, 1:]
            drafts = self._greedy_sample_from_vocab_parallel_head(
                hidden_states=rows.reshape(-1, rows.shape[-1]), lm_head=None
            )
        tokens = torch.cat((ids[:, :1], drafts.view(count, -1)), dim=1)
        classes = sys.modules["sglang.srt.speculative.spec_utils"]
        self.grammar = classes.GrammarTree.from_linear_chain(tokens) if batch.has_grammar else None
        chain = sys.modules["sglang.srt.speculative.dflash_info"].DFlashVerifyInput(
            draft_token=tokens.flatten(),
            positions=positions,
            draft_token_num=width,
            capture_hidden_mode="full",
            kv_loc_plan=runner.kv_index_translator.plan(write_virtual=slots.flatten()),
        )
        batch.out_cache_loc = slots.flatten()
        if batch.seq_lens_cpu is not None:
            batch.seq_lens_cpu = batch.seq_lens_cpu + width
            batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        else:
            batch.seq_lens_sum = batch.spec_info.nxt_kv_lens_sum
        verified, _ = chain.prepare_for_verify(batch, self.target_worker)
        output = self.target_worker.forward_batch_generation(None, forward_batch=verified).logits_output
        assert not self._can_skip_verify_logits(batch, batch.sampling_info)
        accepted, commit, last, tokens, lengths_after = self._accept_block(
            candidates=tokens,
            next_token_logits=output.next_token_logits,
            sampling_info=batch.sampling_info,
        )
        assert lengths_after is None
        assert torch.equal(accepted + 1, commit)
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=output.hidden_states,
            cache_loc=slots.flatten(),
            cache_loc_2d=slots,
            positions=positions,
            commit_lens=commit,
        )
        return SimpleNamespace(
            logits_output=output,
            next_token_ids=tokens.flatten(),
            accept_lens=commit,
            new_seq_lens=lengths + commit,
            next_draft_input=SimpleNamespace(bonus_tokens=last),
        )
