"""``ctc distill`` on this machine: the model answers the prompts in batches."""

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError

from drafters.checkpoints.loading import load_model, load_tokenizer, read_config
from drafters.model_files import check_model_files, local_model
from runtime.core.cli import output_problem
from training.data.answers import Prompt, answers_report, open_answers, read_prompts
from training.data.conversations import brief
from training.data.self_prompts import SelfPrompts, local_draw, self_prompts_record, write_self_prompts
from training.data.sequences import continue_in_batches, encode_messages, encode_text
from training.settings import AUTO, MODEL_DTYPES, DistillConfig, TrainingError
from training.target_model import end_token_ids, fingerprint, load_pretrained, multiplies_bf16


def answer_prompts(config: DistillConfig) -> int:
    """Write the answers that are missing in ``config.out``. Raises UserError.

    Returns 0, or 1 where prompts are left out because the model's context has no room for their answers.
    """
    # All errors that can be known are reported before the model is downloaded or loaded.
    load_pretrained(check_model_files, Path(config.model))
    read_prompts(config)
    if problem := output_problem(config.out.parent):
        raise TrainingError(f"--out: {problem}")
    directory = load_pretrained(local_model, Path(config.model))
    model_config = load_pretrained(read_config, directory)
    context = model_config.max_position_embeddings
    longest = context - config.max_new_tokens
    if longest < 1:
        raise TrainingError(
            f"--max-new-tokens: must be below the model's context of {context:,} tokens, got "
            f"{config.max_new_tokens}"
        )
    model_dtype = config.model_dtype
    if model_dtype == AUTO:
        model_dtype = "bf16" if multiplies_bf16() else "fp32"
    name = f"{config.model_name} {fingerprint(directory)[:16]}"
    name += "" if model_dtype == "fp32" else f" {model_dtype}"
    with open_answers(config, name) as (answers, answered):
        tokenizer = load_pretrained(load_tokenizer, directory)
        own = None
        if config.self_prompts:
            record = self_prompts_record(config, tokenizer, model_name=name, seed=config.seed)
            own = SelfPrompts(config.prompts_path, record, tokenizer.all_special_tokens, flag="--out")
        prompts = [prompt for prompt in read_prompts(config, model=name) if prompt.id not in answered]
        tokens = {prompt.id: _encoded(prompt, tokenizer) for prompt in prompts}
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = getattr(torch, MODEL_DTYPES[model_dtype])
        model = load_pretrained(load_model, directory, config=model_config, dtype=dtype).to(device).eval()
        ends = end_token_ids(model)
        texts = []
        if own is not None and config.self_prompts:
            draw = local_draw(model, tokenizer, config, end_token_ids=ends, batch_size=config.batch_size)
            write_self_prompts(draw, own, config.self_prompts)
            print("\n".join(own.report()), flush=True)
            texts = own.texts[: config.self_prompts]
        prompts = read_prompts(config, texts, model=name)
        encoded = [
            (tokens.get(prompt.id) or _encoded(prompt, tokenizer), prompt)
            for prompt in prompts
            if prompt.id not in answered
        ]
        waiting = [entry for entry in encoded if len(entry[0]) <= longest]
        num_long = len(encoded) - len(waiting)
        limits = {"max_new_tokens": config.max_new_tokens, "end_token_ids": ends}
        total = len(prompts) - num_long
        batches = continue_in_batches(model, waiting, total=total, batch_size=config.batch_size, **limits)
        with closing(batches):
            for batch, continuations in batches:
                pairs = zip(batch, continuations, strict=True)
                answers.append(*(_row(tokenizer, ids, prompt, new, ends) for (ids, prompt), new in pairs))
    if num_long:
        print(
            f"distill: left out {num_long:,} of {len(prompts):,} prompts, which are longer than {longest:,} "
            f"tokens: with --max-new-tokens {config.max_new_tokens} they exceed the model's context",
            file=sys.stderr,
        )
    print(answers_report(config.out, len(prompts) - num_long, of=len(prompts)))
    return 1 if num_long else 0


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
