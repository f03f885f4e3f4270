"""The frozen target model of a run: loading, number formats, weights for the heads, and continuations."""

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor
from transformers import DynamicCache
from transformers.utils.logging import disable_progress_bar

from drafters.base import Drafter
from drafters.checkpoints.gguf_file import is_gguf
from drafters.checkpoints.loading import load_model
from drafters.model_files import stored_weights_digest
from drafters.target_models import (
    TargetModelError,
    last_layer_logits,
    output_norm_weight,
    weights_digest,
)
from training.config import TrainingConfig
from training.settings import AUTO, MODEL_DTYPES, TrainingError

# The directory in the cache for weights that accelerate keeps on disk.
OFFLOADED = "offloaded"
# Names in torch.cpu.get_capabilities for x86 with AVX-512 or AMX, and for ARM.
BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")
# A nucleus has at most this many tokens. Sorting the whole vocabulary takes as long as the model's pass.
NUCLEUS = 1024
# Rows of ended sequences are computed until no more than this share of a batch's rows goes on, because taking
# them out copies the whole cache.
MOST_RUNNING = 7 / 8
# A function from logits [B, V] to the next tokens [B] int64.
Chooser = Callable[[Tensor], Tensor]


def load_pretrained(load: Callable[..., Any], model: Path, **options: Any) -> Any:
    """Load something of a model, or its files, with a function of ``drafters``. Raises TrainingError."""
    try:
        return load(model, **options)
    except TargetModelError as error:
        raise TrainingError(f"--model: {error}") from error
    # The libraries that read the files raise errors of many types.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TrainingError(f"--model: {model}: {reason}") from error


def multiplies_bf16() -> bool:
    """Whether the run's device has instructions for products in bfloat16.

    Every GPU is assumed to have them. A CPU without them multiplies bfloat16 5 to 40 times slower.
    """
    capabilities = torch.cpu.get_capabilities()
    return torch.cuda.is_available() or any(capabilities.get(name, False) for name in BF16_INSTRUCTIONS)


def with_number_formats(config: TrainingConfig, base: Any) -> TrainingConfig:
    """The configuration with number formats in place of ``auto``; ``base`` is that of the target model.

    Products are in bf16 if the device has instructions for it. On a GPU, a model that is stored in 16 bits is
    loaded in bf16 if products are in bf16, because its weights would be rounded in them anyway, and it takes
    half the memory.
    """
    if config.precision == AUTO:
        config = dataclasses.replace(config, precision="bf16" if multiplies_bf16() else "fp32")
    if config.model_dtype == AUTO:
        stored_in_half = getattr(base, "dtype", None) in (torch.bfloat16, torch.float16)
        half = torch.cuda.is_available() and stored_in_half and config.precision == "bf16"
        half = half and not config.has_streams  # Streams are trained in float32 layers of the model.
        config = dataclasses.replace(config, model_dtype="bf16" if half else "fp32")
    return config


def load_target_model(config: TrainingConfig, device: torch.device) -> Any:
    """The frozen target model on ``device``, or spread by ``--device-map``. Raises TrainingError."""
    disable_progress_bar()  # It would share its line with the next message.
    options: dict[str, Any] = {"dtype": getattr(torch, MODEL_DTYPES[config.model_dtype])}
    if config.device_map:
        options |= {"device_map": config.device_map, "offload_folder": config.cache_directory / OFFLOADED}
    model = load_pretrained(load_model, config.model, **options)
    if not config.device_map:
        model = model.to(device)
    return model.eval().requires_grad_(False)


def fingerprint(model: Path) -> str:
    """Hash of a model directory's configuration and weights, or of a GGUF file."""
    digest = hashlib.sha256()
    files = [*model.glob("*.safetensors"), *model.glob("*.bin"), model / "config.json"]
    for path in [model] if is_gguf(model) else sorted(files):
        digest.update(path.name.encode())
        with path.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)  # The file is added to the digest.
    return digest.hexdigest()


def target_digest(model: Any, stored_at: Path) -> str:
    """The digest of a target model's weights in float32, which the export computes too."""
    in_memory = model.dtype == torch.float32 and getattr(model, "hf_device_map", None) is None
    return weights_digest(model) if in_memory else stored_weights_digest(stored_at)


def teacher(model: Any) -> Callable[[Tensor], Tensor]:
    """A function from the output of the target model's last layer [..., H] to its logits [..., V].

    The logits are on the device of the argument, wherever the model's parts are.
    """

    def logits(hidden: Tensor) -> Tensor:
        return last_layer_logits(model, hidden.to(model.dtype)).to(hidden.device)

    return logits


@dataclass(frozen=True)
class SharedTables:
    """The weights that the heads of a run share with the target model.

    embed_tokens, lm_head: [V, H] each
    norm_weight: [H], the weight that ``output_norm_weight`` returns
    """

    embed_tokens: Tensor
    lm_head: Tensor
    norm_weight: Tensor

    @classmethod
    def of(cls, model: Any, precision: str, device: torch.device) -> "SharedTables":
        """The model's own tensors if their type and device fit, otherwise copies on ``device``.

        Without autocast (``precision`` fp32) products need float32 tables.
        """
        dtype = model.dtype if precision == "bf16" else torch.float32
        embed, head = (_weight(part) for part in (model.get_input_embeddings(), model.lm_head))
        tied = embed.data_ptr() == head.data_ptr()
        embed = embed.to(device, dtype)
        head = embed if tied else head.to(device, dtype)
        with align_module_device(model.get_decoder().norm):
            return cls(embed, head, output_norm_weight(model).detach().clone())

    def attach(self, head: Drafter, model: Any) -> None:
        """Give a fresh head the weights that it shares with the target model."""
        if head.config.trunk_type.borrows_layers:
            head.attach_model(model)
        else:
            head.attach_base(self.embed_tokens, self.lm_head)
        head.start_from(self.norm_weight)


def _weight(module: Any) -> Tensor:
    """The weight of a module. accelerate may keep it in memory or on disk until the module runs."""
    with align_module_device(module):
        weight: Tensor = module.weight.detach()
        return weight


def end_token_ids(model: Any) -> list[int]:
    """The tokens that end a text of the model."""
    eos = model.generation_config.eos_token_id
    return eos if isinstance(eos, list) else [] if eos is None else [eos]


def input_device(model: Any) -> torch.device:
    """The device for the inputs of a model.

    A model whose weights accelerate keeps on disk is on the device ``meta`` and takes inputs on any device.
    """
    return torch.device("cpu") if model.device.type == "meta" else model.device


def greedy(logits: Tensor) -> Tensor:
    """The most probable token of every sequence: logits [B, V] -> [B] int64."""
    return logits.argmax(-1)


def nucleus_sampler(temperature: float, top_p: float, seed: int, device: torch.device) -> Chooser:
    """Draws from the nucleus of a tempered distribution (Holtzman et al., arXiv 1904.09751).

    top_p: the share of the probability that the nucleus holds, above 0 and at most 1
    """
    generator = torch.Generator(device).manual_seed(seed)

    def choose(logits: Tensor) -> Tensor:
        scaled = logits.float() / temperature
        top, tokens = scaled.topk(min(NUCLEUS, scaled.shape[-1]), dim=-1)
        probs = (top - scaled.logsumexp(-1, keepdim=True)).exp()
        # A token is in the nucleus if the more probable tokens do not fill it. The first token always is.
        before = probs.cumsum(-1) - probs
        kept = probs.masked_fill(before >= top_p, 0.0)
        return tokens.gather(-1, torch.multinomial(kept, 1, generator=generator)).squeeze(-1)

    return choose


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
    """Continuations of a batch of prompts, each up to its first end token, which is included.

    The prompts are padded on the left to one length. Sequences that have ended leave the batch in groups, so
    the cost of a batch is about proportional to the total length of its continuations.

    end_token_ids: a sequence ends with one of these; if empty, all have ``max_new_tokens`` tokens
    progress: called after every token with the number of tokens so far and the number of ended sequences
    """
    device = input_device(model)
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, prompt in enumerate(prompts):
        ids[index, width - len(prompt) :] = torch.tensor(prompt)
        mask[index, width - len(prompt) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    ends = set(end_token_ids)
    continuations: list[list[int]] = [[] for _ in prompts]
    # The sequences of the batch's rows, and those that go on.
    rows, running = list(range(len(prompts))), set(range(len(prompts)))
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
        num_tokens += len(running)
        for index, token in zip(rows, ids[:, 0].tolist(), strict=True):
            if index in running:
                continuations[index].append(token)
                if token in ends:
                    running.remove(index)
        progress(num_tokens, len(prompts) - len(running))
        if not running or step + 1 == max_new_tokens:
            break
        position_ids = position_ids[:, -1:] + 1
        mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
        if len(running) <= MOST_RUNNING * len(rows):
            places = [place for place, index in enumerate(rows) if index in running]
            rows = [rows[place] for place in places]
            kept = torch.tensor(places, device=device)
            ids, mask, position_ids = ids[kept], mask[kept], position_ids[kept]
            cache.batch_select_indices(kept)
    return continuations
