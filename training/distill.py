"""Collects a model's greedy answers as training data, here or from a server with OpenAI's protocol.

    ctc distill --model MODEL_DIR --self-prompts 8000 --out distilled.jsonl
    ctc distill --model MODEL_DIR --data prompts.jsonl more.jsonl --out distilled.jsonl
    ctc distill --base-url http://localhost:8000/v1 --model NAME --data prompts.jsonl --out distilled.jsonl
    ctc train --model MODEL_DIR --data distilled.jsonl --labels data --out heads/ctc

Every user's turn of the data is a prompt, with the conversation before it as it is in the data.
``--self-prompts`` lets the model write users' messages of its own, which needs no data (Magpie, arXiv
2406.08464). ``--completions`` asks for raw continuations instead of chat answers: for models without a chat
template, and for plain text. A server's answer is written as soon as it arrives, those of this machine batch
by batch; run the same command again to continue an interrupted run, or to ask again for what failed.

A server may apply sampling defaults of its own even at temperature 0, a repetition penalty for instance:
start vLLM with ``--generation-config vllm``, or pass ``--extra-body '{"repetition_penalty": 1.0}'``. Exits
with 0 when every prompt is answered, 1 when some are not, 2 when the run cannot start or continue, 130 when
interrupted.
"""

import asyncio
import json
import sys

from runtime.core.cli import Parser, exit_status
from training.data.answers import answers_report, open_answers, read_prompts
from training.data.self_prompts import check_seed
from training.settings import DistillConfig, TrainingError, add_flags, parse_flags


def main(argv: list[str] | None = None) -> int:
    """The command; the text of the module lists its exit codes."""
    return exit_status(
        "distill",
        lambda: distill(argv),
        interrupted="interrupted; run the same command again to continue, what is written is kept",
    )


def distill(argv: list[str] | None) -> int:
    """Ask for the missing answers. Returns 0 if every prompt is answered, otherwise 1. Raises UserError."""
    config = parse_config(argv)
    if config.self_prompts:
        check_seed(config.prompts_path, config.seed)
    if config.base_url is None:
        from training.data.local_answers import answer_prompts  # Imports torch, which takes seconds.

        return answer_prompts(config)
    try:
        # Imports openai, which takes a second.
        from training.data.served_answers import Distillation, served_self_prompts
    except ModuleNotFoundError as error:
        if error.name != "openai":
            raise
        raise TrainingError(
            "the package openai is missing: pip install -c constraints.txt -e '.[train]'"
        ) from None
    read_prompts(config)  # Errors in the data are reported before the server is asked.
    with open_answers(config) as (answers, answered):
        prompts = read_prompts(config, served_self_prompts(config) if config.self_prompts else ())
        run = Distillation(config, prompts, answers, answered)
        asyncio.run(run.run())
    if run.failures:
        print(
            f"distill: {len(run.failures)} of {len(prompts)} prompts failed, the first because "
            f"{run.failures[0]}; run the same command again to ask for them again",
            file=sys.stderr,
        )
    print(answers_report(config.out, len(prompts) - len(run.failures), of=len(prompts)))
    return 1 if run.failures else 0


def parse_config(argv: list[str] | None) -> DistillConfig:
    """The configuration that flags describe."""
    parser = Parser("distill", "training.distill", __doc__)
    add_flags(parser, DistillConfig)
    parser.add_argument(
        "--extra-body", default="{}", help="JSON object with further fields for every request"
    )
    values = parse_flags(parser, argv)
    try:
        extra = json.loads(values["extra_body"])
    except (ValueError, RecursionError):  # also of a number with too many digits, and of deep brackets
        extra = None
    if not isinstance(extra, dict):
        raise TrainingError(f"--extra-body: expected a JSON object, got {values['extra_body']!r}")
    return DistillConfig(**(values | {"extra_body": extra}))


if __name__ == "__main__":
    raise SystemExit(main())
