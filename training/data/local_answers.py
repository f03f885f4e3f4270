"""``ctc distill`` on this machine: the model answers the prompts in batches."""

import sys
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from tqdm import tqdm

from drafters.checkpoints.loading import load_model, load_tokenizer
from drafters.model_files import check_model_files, local_model
from drafters.target_models import TargetModelError
from runtime.core.jsonl_store import JsonlStore
from training.data.answers import Prompt, answers_report, open_answers, read_prompts
from training.data.conversations import brief
from training.data.self_prompts import UserTemplate, local_draw, write_self_prompts
from training.data.sequences import continue_in_batches, encode_messages, encode_text
from training.model.target_model import end_token_ids, fingerprint, load_pretrained, multiplies_bf16
from training.settings import AUTO, MODEL_DTYPES, DistillConfig, TrainingError


def answer_prompts(config: DistillConfig) -> int:
    """Write the answers that are missing in ``config.out``. Raises UserError.

    Returns 0, or 1 where prompts are left out because the model's context has no room for their answers.
    """
    # Errors in model and data are reported before the model is loaded.
    try:
        check_model_files(Path(config.model))
    except TargetModelError as error:
        raise TrainingError(f"--model: {error}") from error
    read_prompts(config)
    try:
        directory = local_model(Path(config.model))
    except TargetModelError as error:
        raise TrainingError(f"--model: {error}") from error
    model_dtype = config.model_dtype
    if model_dtype == AUTO:
        model_dtype = "bf16" if multiplies_bf16() else "fp32"
    name = f"{config.model_name} {fingerprint(directory)[:16]}"
    name += "" if model_dtype == "fp32" else f" {model_dtype}"
    with open_answers(config, name) as (answers, answered):
        tokenizer = load_pretrained(load_tokenizer, directory)
        if config.self_prompts:
            UserTemplate.all_of(tokenizer, config)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = getattr(torch, MODEL_DTYPES[model_dtype])
        model = load_pretrained(load_model, directory, dtype=dtype).to(device).eval()
        own = _self_prompts(config, model, tokenizer, name) if config.self_prompts else ()
        prompts = read_prompts(config, own, model=name)
        encoded = [(_encoded(prompt, tokenizer), prompt) for prompt in prompts if prompt.id not in answered]
        longest = _longest_prompt(config, model)
        waiting = [entry for entry in encoded if len(entry[0]) <= longest]
        num_long = len(encoded) - len(waiting)
        _answer(config, model, tokenizer, waiting, answers, of=len(prompts), done=len(prompts) - len(encoded))
    if num_long:
        print(
            f"distill: left out {num_long:,} of {len(prompts):,} prompts, which are longer than {longest:,} "
            f"tokens: with --max-new-tokens {config.max_new_tokens} they exceed the model's context",
            file=sys.stderr,
        )
    print(f"wrote {config.out}: {len(prompts) - num_long} of {len(prompts)} prompts answered")
    print(answers_report(config.out))
    return 1 if num_long else 0


def _longest_prompt(config: DistillConfig, model: Any) -> int:
    """Tokens of the longest prompt that leaves room for an answer. Raises TrainingError if none does."""
    context = model.config.max_position_embeddings
    if config.max_new_tokens >= context:
        raise TrainingError(
            f"--max-new-tokens: must be below the model's context of {context:,} tokens, got "
            f"{config.max_new_tokens}"
        )
    return context - config.max_new_tokens


def _answer(
    config: DistillConfig,
    model: Any,
    tokenizer: Any,
    waiting: list[tuple[list[int], Prompt]],
    answers: JsonlStore,
    *,
    of: int,
    done: int,
) -> None:
    """Answer the prompts, which are here with their tokens; ``done`` of all ``of`` have answers already."""
    ends = end_token_ids(model)
    limits = {"max_new_tokens": config.max_new_tokens, "end_token_ids": ends}
    with tqdm(total=of, initial=done, desc="distilling", unit="prompt", smoothing=0) as bar:
        batches = continue_in_batches(model, waiting, bar, batch_size=config.batch_size, **limits)
        for batch, continuations in batches:
            answers.append(
                *(
                    _row(tokenizer, ids, prompt, new, ends)
                    for (ids, prompt), new in zip(batch, continuations, strict=True)
                )
            )


def _self_prompts(config: DistillConfig, model: Any, tokenizer: Any, name: str) -> list[str]:
    ends = end_token_ids(model)
    prompts = write_self_prompts(
        local_draw(model, tokenizer, config, end_token_ids=ends, batch_size=config.batch_size),
        tokenizer,
        config,
        path=config.prompts_path,
        model_name=name,
        flag="--out",
    )
    print("\n".join(prompts.report()), flush=True)
    return prompts.texts[: config.self_prompts]


def _encoded(prompt: Prompt, tokenizer: Any) -> list[int]:
    if "prompt" in prompt.body:
        return encode_text(prompt.body["prompt"], tokenizer)
    messages = prompt.body["messages"]
    try:
        return encode_messages(messages, tokenizer, add_generation_prompt=True)
    except (ValueError, TypeError, TemplateError) as error:
        raise TrainingError(
            f"--data: the chat template refuses a conversation: {error}; got {brief(messages[-1]['content'])}"
        ) from error


def _row(
    tokenizer: Any, ids: list[int], prompt: Prompt, tokens: list[int], ends: list[int]
) -> dict[str, Any]:
    finished = tokens[-1] in ends
    # With the prompt, since some tokenizers leave out the space before the first word.
    texts = [ids, ids + (tokens[:-1] if finished else tokens)]
    before, whole = tokenizer.batch_decode(texts, clean_up_tokenization_spaces=False)
    text = whole.removeprefix(before)
    if not finished:
        text = text.rstrip("\ufffd")  # a character that was cut, too
    return {"id": prompt.id, **prompt.row(text, "stop" if finished else "length", verbatim=True)}
