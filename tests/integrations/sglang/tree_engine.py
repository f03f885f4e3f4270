"""What is around SGLang's worker when it verifies trees: a target model, caches of slots, requests.

The worker is either the stand-in of ``fake_trees`` or SGLang's own class, loaded by ``real_sglang``. What
SGLang computes on a GPU alone is written here from what its sources say of it.
"""

from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from drafters.features import FeatureTap
from drafters.parallel import ParallelDrafter
from runtime.core.token_tree import TokenTree

SLOTS, PLACES, LENGTH = 640, 4, 120


class ForwardMode(Enum):
    EXTEND = "extend"
    TARGET_VERIFY = "target_verify"
    DECODE = "decode"

    def is_extend(self) -> bool:
        return self is ForwardMode.EXTEND

    def is_idle(self) -> bool:
        return False


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """As the text above SGLang's kernel says (``kernels/ops/speculative/reconstruct_tree.py``)."""
    n = draft_token_num
    for b, mask in enumerate(tree_mask.view(batch_size, n, n).tolist()):
        above = [[j for j in range(i) if mask[i][j]] for i in range(n)]
        parents = [max(found, default=-1) for found in above]
        for i in range(n):
            positions[b * n + i] = len(above[i]) + int(verified_seq_len[b])
            retrieve_index[b, i] = b * n + i
            retrieve_next_token[b, i] = min((k for k in range(n) if i in above[k]), default=-1)
            siblings = (k for k in range(i + 1, n) if parents[i] >= 0 and parents[k] == parents[i])
            retrieve_next_sibling[b, i] = min(siblings, default=-1)


def verify_tree_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    topk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``VerifyTreeGreedy`` of SGLang's ``speculative/eagle.cuh``; the tensors are written in place."""
    chosen = target_predict.flatten()
    for b in range(len(candidates)):
        last, count, node = int(retrieve_index[b, 0]), 0, 0
        accept_index[b, 0] = last
        while True:
            predicts[last] = chosen[last]
            node = int(retrieve_next_token[b, node])
            while node != -1 and candidates[b, node] != chosen[last]:
                node = int(retrieve_next_sibling[b, node])
            if node == -1:
                break
            last, count = int(retrieve_index[b, node]), count + 1
            accept_index[b, count] = last
        accept_token_num[b] = count
    return predicts, accept_index, accept_token_num


def fill_front_out_cache_loc(num_front: Tensor, out_cache_loc: Tensor, front: Tensor) -> None:
    """As its text in ``kernels/ops/speculative/cache_locs.py`` says: the windows' first slots, packed."""
    windows = out_cache_loc.view(len(num_front), -1)
    packed = torch.cat([window[:count] for window, count in zip(windows, num_front, strict=True)])
    front[: len(packed)] = packed


def fill_accept_out_cache_loc(accept_index: Tensor, out_cache_loc: Tensor, found: Tensor, size: int) -> None:
    """The slots of the accepted nodes, packed; -1 is none."""
    packed = out_cache_loc[accept_index[accept_index >= 0].long()]
    found[: len(packed)] = packed


class Target:
    """A target model whose keys and values are in slots, and what SGLang's worker asks of its own."""

    def __init__(self, model: Any, head: ParallelDrafter):
        self.hf, config = model, model.config
        self.tap = FeatureTap(model, head.config.target_layer_ids)
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, SLOTS, config.num_key_value_heads, dim)
        self.pool = torch.zeros(shape)
        slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(3))
        self.req_to_token = slots[: PLACES * LENGTH].view(PLACES, LENGTH)
        self.trees: list[list[TokenTree]] = []
        lm_head = nn.Module()
        lm_head.weight = model.get_output_embeddings().weight
        lm_head.shard_indices = SimpleNamespace(num_added_elements=0)  # type: ignore[assignment]
        self.device = "cpu"
        self.model = SimpleNamespace(lm_head=lm_head, get_input_embeddings=model.get_input_embeddings)
        self.model_config = SimpleNamespace(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
        )
        self.req_to_token_pool = SimpleNamespace(req_to_token=self.req_to_token)
        self.attn_backend = SimpleNamespace(init_forward_metadata=lambda batch: None)
        self.kv_index_translator = SimpleNamespace(plan=self._plan)
        self.prefill_attention_backend_str = "flashinfer"
        self.decode_cuda_graph_runner = None
        self.model_runner = self

    def _plan(self, *, write_virtual: Tensor, **kwargs: Any) -> Any:
        return SimpleNamespace(write_ids=lambda translator: write_virtual, bind=lambda *args: None)

    def get_memory_pool(self) -> Any:
        return self.req_to_token_pool, SimpleNamespace(get_kvcache=lambda: self)

    def move_kv_cache(self, to: Tensor, source: Tensor) -> None:
        self.pool[:, :, to] = self.pool[:, :, source]

    @torch.no_grad()
    def forward_batch_generation(self, batch: Any, *, forward_batch: Any = None, **kwargs: Any) -> Any:
        """The logits [rows, V] and features [rows, F*H] of a prompt's part or of blocks with a mask."""
        if forward_batch is None:
            return self._prompts(batch)
        tree, ids = forward_batch.spec_info, forward_batch.input_ids
        width = tree.draft_token_num
        assert tree.num_tokens_per_req == width
        masks, found = tree.custom_mask, []
        self.trees.append([])
        places = forward_batch.req_to_token[forward_batch.req_pool_indices]
        for index, (row, length) in enumerate(zip(places, forward_batch.seq_lens.tolist(), strict=True)):
            rows = slice(index * width, (index + 1) * width)
            mask, masks = masks.split([width * (length + width), len(masks) - width * (length + width)])
            mask = mask.view(width, -1)
            assert mask[:, :length].all()
            self.trees[-1].append(tree_of(ids[rows], mask[:, length:]))
            slots = forward_batch.out_cache_loc[rows]
            found.append(self._pass(ids[rows], tree.positions[rows], mask, row[:length], slots))
        logits, features = map(torch.cat, zip(*found, strict=True))
        return result(logits, features)

    def _prompts(self, batch: Any) -> Any:
        found = []
        ids, slots = (x.split(batch.extend_lens) for x in (batch.input_ids, batch.out_cache_loc))
        for index, (place, start) in enumerate(zip(batch.req_pool_indices, batch.prefix_lens, strict=True)):
            end = start + batch.extend_lens[index]
            mask = torch.ones(end - start, end, dtype=torch.bool).tril(start)
            before = self.req_to_token[place, :start]
            found.append(self._pass(ids[index], torch.arange(start, end), mask, before, slots[index]))
        logits, features = zip(*found, strict=True)
        last = torch.stack([each[-1] for each in logits])
        out = result(last, torch.cat(features))
        out.next_token_ids = last.argmax(-1)
        out.kv_loc_plan = self._plan(write_virtual=batch.out_cache_loc)
        return out

    def _pass(
        self, ids: Tensor, positions: Tensor, mask: Tensor, before: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        cache = DynamicCache(config=self.hf.config)
        for layer, (keys, values) in enumerate(self.pool[:, :, before].transpose(2, 3)):
            cache.update(keys[None], values[None], layer)
        logits = self.hf(
            ids[None],
            attention_mask=torch.where(mask, 0.0, -torch.inf)[None, None],
            position_ids=positions[None],
            past_key_values=cache,
        ).logits[0]
        layer_cache: Any
        for layer, layer_cache in enumerate(cache.layers):
            for kind, states in enumerate((layer_cache.keys, layer_cache.values)):
                self.pool[layer, kind, slots] = states[0, :, len(before) :].transpose(0, 1)
        return logits, self.tap.take()[0]


def result(logits: Tensor, features: Tensor) -> Any:
    output = SimpleNamespace(next_token_logits=logits, hidden_states=features)
    return SimpleNamespace(
        logits_output=output, can_run_cuda_graph=False, routed_experts_output=None, indexer_topk_output=None
    )


def tree_of(tokens: Tensor, mask: Tensor) -> TokenTree:
    """The tree that a mask [W, W] spells; a node that sees no root is none."""
    n = len(tokens)
    above = [[j for j in range(i) if mask[i, j]] for i in range(n)]
    parents = torch.tensor([max(found, default=-1) for found in above])
    depths = torch.tensor([len(found) for found in above])
    return TokenTree(tokens.clone().numpy(), parents.numpy(), depths.numpy(), torch.zeros(n).numpy())


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.path(node)) for node in range(1, len(tree)) if tree.parents[node] >= 0}


class DraftRunner:
    """The draft model with its cache, as the worker asks for it.

    capture_tail_hooks: what a captured pass ends with; passes are as if they were captured where there is any
    """

    def __init__(self, draft_model: Any, target: Target):
        self.model, self.target = draft_model, target
        self.token_to_kv_pool, self.kv_index_translator = self, None
        self.capture_tail_hooks: list[Callable[..., None]] = []

    def forward(self, batch: Any) -> Any:
        batch.req_to_token = self.target.req_to_token
        out = self.model(batch.input_ids, batch.positions, batch, input_embeds=batch.input_embeds)
        for hook in self.capture_tail_hooks:
            hook(self, out, batch, len(batch.input_ids))
        return SimpleNamespace(logits_output=out, can_run_graph=bool(self.capture_tail_hooks))

    def set_kv_buffer(self, layer: Any, where: Any, key: Tensor, value: Tensor, *scales: Any) -> None:
        layer.write(where.loc, key, value)

    def set_kv_buffer_prefix_valid(
        self, layer: Any, slots: Tensor, counts: Tensor, key: Tensor, value: Tensor, *scales: Any
    ) -> None:
        kept = (torch.arange(slots.shape[1]) < counts.unsqueeze(1)).flatten()
        layer.write(slots.flatten()[kept], key[kept], value[kept])


class Requests:
    """Requests that join and leave, and a scheduler that hands them to a worker.

    texts: of every place, its tokens; counts: how many tokens each of its steps accepted, the last one of
        them chosen by the target model alone
    """

    def __init__(self, worker: Any, target: Target, draft_input: Callable[..., Any], **sampling: Any):
        self.worker, self.target, self.draft_input = worker, target, draft_input
        self.sampling = SimpleNamespace(
            is_all_greedy=True,
            acc_additive_penalties=None,
            acc_scaling_penalties=None,
            logit_bias=None,
            sampling_mask_batch_indices=None,
            has_custom_logit_processor=False,
            penalizer_orchestrator=None,
            has_watermark_candidates=False,
            grammar_mask=None,
        )
        vars(self.sampling).update(sampling)
        self.texts: dict[int, list[int]] = {}
        self.counts: dict[int, list[int]] = {}

    def prompts(self, prompts: dict[int, list[int]]) -> None:
        """Read prompts; each gets its first token."""
        sizes = [len(ids) for ids in prompts.values()]
        slots = [self.target.req_to_token[place, :size] for place, size in zip(prompts, sizes, strict=True)]
        batch = self._batch(ForwardMode.EXTEND, list(prompts), sizes)
        batch.input_ids = torch.tensor([token for ids in prompts.values() for token in ids])
        batch.out_cache_loc = torch.cat(slots)
        batch.extend_lens, batch.prefix_lens = sizes, [0] * len(sizes)
        found = self.worker.forward_batch_generation(batch).next_token_ids.tolist()
        for (place, ids), token in zip(prompts.items(), found, strict=True):
            self.texts[place], self.counts[place] = [*ids, token], []

    def step(self, places: list[int], *, host_lengths: bool = True, **fields: Any) -> Any:
        """host_lengths: whether the scheduler knows the lengths, or only what is reserved for them

        fields: what else the batch has
        """
        before = [len(self.texts[place]) - 1 for place in places]
        batch = self._batch(ForwardMode.DECODE, places, before)
        vars(batch).update(fields)
        anchors = torch.tensor([self.texts[place][-1] for place in places])
        batch.spec_info = self.draft_input(bonus_tokens=anchors, new_seq_lens=batch.seq_lens)
        if not host_lengths:
            reserved = batch.seq_lens_cpu + 2 * self.worker.block_size + 3
            batch.seq_lens_cpu = batch.seq_lens_sum = None
            batch.spec_info.nxt_kv_lens_cpu, batch.spec_info.nxt_kv_lens_sum = reserved, int(reserved.sum())
        out = self.worker.forward_batch_generation(batch)
        tokens = out.next_token_ids.view(len(places), -1)
        for place, row, count in zip(places, tokens.tolist(), out.accept_lens.tolist(), strict=True):
            self.texts[place] += row[:count]
            self.counts[place].append(count)
        assert out.new_seq_lens.tolist() == [len(self.texts[place]) - 1 for place in places]
        assert out.next_draft_input.bonus_tokens.tolist() == [self.texts[place][-1] for place in places]
        return out

    def _batch(self, mode: ForwardMode, places: list[int], sizes: list[int]) -> Any:
        return SimpleNamespace(
            forward_mode=mode,
            is_extend_in_batch=mode.is_extend(),
            device="cpu",
            req_pool_indices=torch.tensor(places),
            seq_lens=torch.tensor(sizes),
            seq_lens_cpu=torch.tensor(sizes),
            seq_lens_sum=sum(sizes),
            sampling_info=self.sampling,
            has_grammar=False,
            return_logprob=False,
            can_run_decode_cuda_graph=True,
            reqs=[],
            spec_info=None,
        )


@torch.no_grad()
def greedy_text(model: Any, ids: list[int], count: int) -> list[int]:
    """A prompt with the ``count`` tokens that the model chooses after it."""
    text, cache = list(ids), DynamicCache(config=model.config)
    new = torch.tensor([ids])
    for _ in range(count):
        token = model(new, past_key_values=cache).logits[0, -1].argmax()
        text.append(int(token))
        new = token.view(1, 1)
    return text


@torch.no_grad()
def text_features(model: Any, head: ParallelDrafter, text: list[int]) -> Tensor:
    """The features [A, F*H] of a whole text."""
    tap = FeatureTap(model, head.config.target_layer_ids)
    model(torch.tensor([text]))
    tap.remove()
    return tap.take()[0]
