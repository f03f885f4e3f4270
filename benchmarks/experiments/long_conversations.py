"""Writes conversations of several lengths that end with the same questions.

    python -m benchmarks.experiments.long_conversations --bundle build/chat/bundle --prompts mt_bench.jsonl \\
        gsm8k_test_200.jsonl --lengths 512,2000,4000,8000 --count 8 --out build/conversations

The bundle's model answers questions of the files greedily. A conversation is as many of these questions
with their answers as fit into its length, and one of the first ``--count`` questions at the end, the same
ones for every length. Writes LENGTH.jsonl for the profiler, whose tokens a step are then compared.
"""

import argparse
import json
import random
from collections.abc import Sequence

from tqdm import tqdm

from benchmarks.arguments import Parser, all_prompts, numbers
from runtime.core.cli import at_least
from runtime.core.errors import UserError
from runtime.core.prompts import ASSISTANT, USER
from runtime.decoder import SpeculativeDecoder
from runtime.profiler.arguments import write_files

Message = dict[str, str]


def main(argv: list[str] | None = None) -> int:
    parser = Parser("benchmarks.experiments.long_conversations", __doc__)
    parser.add("--bundle", "--prompts", "--threads")
    parser.add(
        "--lengths", type=numbers(at_least(1)), default="512,2000,4000,8000", help="tokens, with commas"
    )
    parser.add("--count", type=at_least(1), default=8, help="conversations of a length (default 8)")
    parser.add("--answer-tokens", type=at_least(1), default=160, help="of an answer, at most (default 160)")
    parser.add("--out", help="directory of the files")
    return parser.run(write, argv)


def write(args: argparse.Namespace) -> int:
    """Answer the questions and write the conversations."""
    questions = [prompt.text for prompt in all_prompts(args.prompts, None) if not prompt.raw]
    random.Random(0).shuffle(questions)
    if len(questions) <= args.count:
        problem = f"expected more than {args.count} questions (--count), got {len(questions)}"
        raise UserError(f"--prompts: {problem}")
    decoder = SpeculativeDecoder.from_bundle(args.bundle, num_threads=args.threads)
    longest = args.lengths[-1]
    if longest >= decoder.max_length:
        raise UserError(f"--lengths: must be less than {decoder.max_length}, got {longest}")
    asked, others = questions[: args.count], questions[args.count :]
    history = answer(decoder, others, longest, args.answer_tokens)
    texts = {}
    for length in args.lengths:
        conversations = [within(decoder, history, question, length) for question in asked]
        texts[f"{length}.jsonl"] = "".join(
            json.dumps({"messages": messages}) + "\n" for messages in conversations
        )
        sizes = [_size(decoder, messages) for messages in conversations]
        print(f"{length}: {min(sizes)} to {max(sizes)} tokens")
    print("wrote " + ", ".join(str(path) for path in write_files(args.out, texts)))
    return 0


def answer(
    decoder: SpeculativeDecoder, questions: Sequence[str], length: int, answer_tokens: int
) -> list[Message]:
    """The model's answers to questions, each asked alone, until the conversation has ``length`` tokens."""
    history: list[Message] = []
    with tqdm(total=length, desc="answers", unit="token") as progress:
        for question in questions:
            prompt = decoder.prompt_tokenizer.encode_messages([{"role": USER, "content": question}])
            if len(prompt) + answer_tokens >= decoder.max_length:
                continue
            text = "".join(chunk.text for chunk in decoder.stream(prompt, max_new_tokens=answer_tokens))
            history += [{"role": USER, "content": question}, {"role": ASSISTANT, "content": text}]
            found = _size(decoder, [*history, {"role": USER, "content": "."}])
            progress.update(min(found, length) - progress.n)
            if found >= length:
                return history
    raise UserError(f"--prompts: all questions and answers have less than {length} tokens; give more files")


def within(
    decoder: SpeculativeDecoder, history: Sequence[Message], question: str, length: int
) -> list[Message]:
    """The start of ``history`` that fits into ``length`` tokens with the question, and the question.

    Raises UserError for a question that is longer by itself.
    """
    last = {"role": USER, "content": question}
    for count in range(len(history), -1, -2):
        messages = [*history[:count], last]
        if _size(decoder, messages) <= length:
            return messages
    raise UserError(f"--lengths: {length} is less than a question alone has")


def _size(decoder: SpeculativeDecoder, messages: Sequence[Message]) -> int:
    return len(decoder.prompt_tokenizer.encode_messages(messages))


if __name__ == "__main__":
    raise SystemExit(main())
