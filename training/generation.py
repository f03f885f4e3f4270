"""Continues many prompts at once with the target model, and lets it write prompts of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache

from training.self_prompts import SelfPrompts, SelfPromptSettings, UserTemplate

# From logits [B, V] to the next tokens [B] int64.
Chooser = Callable[[Tensor], Tensor]
# A nucleus has at most this many tokens. Sorting the whole vocabulary takes as long as the model's pass.
NUCLEUS = 1024


def greedy(logits: Tensor) -> Tensor:
    """The most probable token of every sequence: logits [B, V] -> [B] int64."""
    return logits.argmax(-1)


class NucleusSampler:
    """Draws from the nucleus of a tempered distribution (Holtzman et al., arXiv 1904.09751).

    temperature: above 0; top_p: share of the probability that the nucleus holds, above 0, at most 1
    """

    def __init__(self, temperature: float, top_p: float, seed: int, device: torch.device):
        self._temperature = temperature
        self._top_p = top_p
        self._generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, logits: Tensor) -> Tensor:
        """logits [B, V] -> tokens [B] int64."""
        scaled = logits.float() / self._temperature
        top, tokens = scaled.topk(min(NUCLEUS, scaled.shape[-1]), dim=-1)
        probs = (top - scaled.logsumexp(-1, keepdim=True)).exp()
        # A token is in the nucleus if those before it do not fill it; the first one always is.
        before = probs.cumsum(-1) - probs
        kept = probs.masked_fill(before >= self._top_p, 0.0)
        drawn = torch.multinomial(kept, 1, generator=self._generator)
        return tokens.gather(-1, drawn).squeeze(-1)


@torch.no_grad()
def continue_prompts(
    model: Any,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    end_token_ids: list[int],
    choose: Chooser = greedy,
    progress: Callable[[int, int], None] = lambda num_tokens, num_ended: None,
) -> list[list[int]]:
    """Continuations of a batch of prompts, each up to and with its first end token.

    The prompts are padded on the left to one length. A sequence that has ended leaves the batch, so a batch
    costs about what its continuations are long together.

    end_token_ids: a sequence ends with one of these; without them all have ``max_new_tokens`` tokens
    progress: told after every token how many tokens there are and how many sequences have ended
    """
    # Weights that accelerate keeps on disk are on no device; where the inputs are does not matter then.
    device = torch.device("cpu") if model.device.type == "meta" else model.device
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, prompt in enumerate(prompts):
        ids[index, width - len(prompt) :] = torch.tensor(prompt)
        mask[index, width - len(prompt) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    ends = torch.tensor(end_token_ids, dtype=torch.long, device=device)
    found: list[list[int]] = [[] for _ in prompts]
    running = torch.arange(len(prompts), device=device)
    cache = DynamicCache(config=model.config)
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    num_tokens = 0
    for step in range(max_new_tokens):
        logits = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        ids = choose(logits).unsqueeze(-1)
        for index, token in zip(running.tolist(), ids[:, 0].tolist(), strict=True):
            found[index].append(token)
        num_tokens += len(running)
        goes_on = ~torch.isin(ids[:, 0], ends)
        position_ids = position_ids[:, -1:] + 1
        mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
        if not goes_on.all():
            kept = goes_on.nonzero().squeeze(-1)
            running, ids, mask, position_ids = running[kept], ids[kept], mask[kept], position_ids[kept]
            if kept.numel() and step + 1 < max_new_tokens:
                cache.batch_select_indices(kept)
        progress(num_tokens, len(prompts) - len(running))
        if not len(running):
            break
    return found


def write_self_prompts(
    model: Any,
    tokenizer: Any,
    settings: SelfPromptSettings,
    *,
    path: Path,
    model_name: str,
    end_token_ids: list[int],
    batch_size: int,
    flag: str,
) -> SelfPrompts:
    """Let the model write at least ``settings.count`` prompts, beginning with those in the file ``path``.

    Every batch is kept when it is done, so an interrupted run continues. Raises TrainingError for a model
    without a chat template, and for one that writes nothing of use.

    model_name: name or hash of the model, for the file; flag: what errors call the file
    """
    template = UserTemplate.of(tokenizer)
    prefix = list(tokenizer(template.prefix, add_special_tokens=False)["input_ids"])
    behind = list(tokenizer(template.suffix.strip(), add_special_tokens=False)["input_ids"])
    special = set(tokenizer.all_special_ids)
    ends = sorted({*end_token_ids, *(token for token in behind[:1] if token in special)})
    device = torch.device("cpu") if model.device.type == "meta" else model.device
    prompts = SelfPrompts(
        path, settings.record(template, model_name), tokenizer.all_special_tokens, flag=flag
    )
    kept = min(len(prompts.texts), settings.count)
    with tqdm(total=settings.count, initial=kept, desc="writing prompts", unit="prompt", smoothing=0) as bar:
        while len(prompts.texts) < settings.count:
            # A seed for every batch, so that a run that continues does not repeat itself.
            seed = settings.seed * 1_000_003 + prompts.drawn
            found = continue_prompts(
                model,
                [prefix] * batch_size,
                max_new_tokens=settings.max_tokens,
                end_token_ids=ends,
                choose=NucleusSampler(settings.temperature, settings.top_p, seed, device),
            )
            texts, finished = [], []
            for tokens in found:
                ended = tokens[-1] in ends
                text = tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=False)
                message, end, _ = text.partition(template.end_text)
                texts.append(message.strip())
                finished.append(ended or bool(end))
            bar.update(min(prompts.add(texts, finished), settings.count - bar.n))
    return prompts
