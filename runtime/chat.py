"""Chat with a bundle's model in the terminal.

    python -m runtime.chat --bundle engines/
    python -m runtime.chat --bundle engines/ --system "You answer in rhymes." --temperature 0.7

What the draft head proposed is green. Ctrl-C stops an answer and keeps the chat; Alt-Enter begins a new line.
/help lists the commands. A question a line can also come from a pipe.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.core.bundle import DRAFT, Bundle
from runtime.core.cli import AUTO, DEFAULT_NUM_NODES, Parser, coloured, exit_status, num_nodes
from runtime.core.errors import RequestError
from runtime.core.method import choose_method
from runtime.decode.sampling_params import SamplingParams

if TYPE_CHECKING:
    from runtime.decode.sequence import Chunk
    from runtime.decoder import SpeculativeDecoder
    from runtime.text.chat_template import ChatTemplate

DRAFTED, DIMMED, RESET = "\033[32m", "\033[2m", "\033[0m"
QUESTION_MARK = "> "
COMMANDS = {
    "/plain": "switch drafts off, to feel the difference, and on again; the answers stay the same",
    "/system TEXT": "set the system message; without TEXT: the model's own",
    "/reset": "begin a new conversation",
    "/save FILE": "add the conversation to a jsonl file that training and generate read",
    "/help": "list the commands",
    "/quit": "leave, as the end of input does",
}
SAMPLING_OPTIONS = ("temperature", "top_p", "seed")

Message = dict[str, str]


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)

    def command() -> int:
        settings = {name: getattr(args, name) for name in SAMPLING_OPTIONS}
        settings = {name: value for name, value in settings.items() if value is not None}
        sampling = SamplingParams(**settings)
        bundle = Bundle.load(args.bundle, verify=False)  # the decoder verifies the files
        # They import jinja2, numba and ONNX Runtime.
        from runtime.decoder import SpeculativeDecoder
        from runtime.text.chat_template import ChatTemplate

        template = ChatTemplate.load(args.bundle)
        if template is None:
            raise RequestError(
                f"--bundle: the model of {args.bundle} has no chat template, so it does not chat; "
                "ctc generate completes texts"
            )
        drafts = choose_method(bundle.manifest, None, args.bundle) == DRAFT
        decoder = SpeculativeDecoder.from_bundle(
            args.bundle, num_nodes=args.num_nodes, num_threads=args.threads
        )
        try:
            chat = Chat(decoder, template, args.system, sampling, args.max_new_tokens, can_draft=drafts)
            chat.run(read_questions())
        finally:
            decoder.close()
        return 0

    return exit_status("chat", command)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("chat", "runtime.chat", __doc__)
    add = parser.add_argument
    add("--bundle", type=Path, required=True, help="engine bundle directory")
    add("--system", help="system message (default: what the model's template says without one)")
    add("--max-new-tokens", type=int, default=512, help="tokens of an answer at most")
    add("--temperature", type=float, help="default 0: the most probable token each time")
    add("--top-p", type=float, help="with a temperature: only the best tokens that have this probability")
    add("--seed", type=int, help="with a temperature: the same seed gives the same chat")
    text = f"draft nodes verified a step (default %(default)s), or {AUTO}"
    add("--num-nodes", type=num_nodes, default=DEFAULT_NUM_NODES, help=text)
    add("--threads", type=int, help="default: all cores")
    return parser.parse_args(argv)


def read_questions() -> Iterator[str]:
    """The user's lines: edited on a terminal, read as they are from a pipe or file."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        for line in sys.stdin:
            print(f"{QUESTION_MARK}{line.rstrip()}", flush=True)
            yield line
        return
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    names = [usage.partition(" ")[0] for usage in COMMANDS]
    session: PromptSession[str] = PromptSession(
        key_bindings=keys, completer=WordCompleter(names, sentence=True), complete_while_typing=False
    )
    while True:
        try:
            yield session.prompt(QUESTION_MARK)
        except KeyboardInterrupt:
            print("/quit leaves")
        except EOFError:
            return


@dataclass
class Counts:
    """What an answer took: tokens and steps after the first token, which comes with the prompt."""

    prompt_tokens: int = 0
    tokens: int = 0
    steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def line(self) -> str:
        text = f"{self.tokens} tokens; prompt of {self.prompt_tokens} read in {self.prefill_seconds:.2f} s"
        if self.steps and self.decode_seconds:
            decoded = self.tokens - 1
            text += (
                f"; {decoded / self.decode_seconds:.1f} tokens/s, {decoded / self.steps:.2f} tokens a step"
            )
        return text


class Chat:
    """A conversation with a model; every answer is streamed to stdout.

    can_draft: whether the bundle has a draft head
    """

    def __init__(
        self,
        decoder: "SpeculativeDecoder",
        template: "ChatTemplate",
        system: str | None,
        sampling: SamplingParams,
        max_new_tokens: int,
        *,
        can_draft: bool,
    ):
        self._decoder = decoder
        self._template = template
        self._system = system
        self._sampling = sampling
        self._max_new_tokens = max_new_tokens
        self._can_draft = can_draft
        self._drafts = can_draft
        self._colours = coloured(True)
        self._messages: list[Message] = []
        self._num_answers = 0

    def run(self, questions: Iterator[str]) -> None:
        """Answer every question until there are none, or one is /quit."""
        head = "drafts are on, and green" if self._drafts else "the bundle has no draft head"
        self._say(f"/help lists the commands; {head}")
        for question in questions:
            text = question.strip()
            if not text:
                continue
            try:
                if not text.startswith("/"):
                    self._answer(text)
                elif not self._obey(text):
                    return
            except RequestError as error:
                self._say(str(error))

    def _obey(self, text: str) -> bool:
        """Carry out a command; False for the one that leaves."""
        name, _, rest = text.partition(" ")
        rest = rest.strip()
        if name == "/quit":
            return False
        if name == "/plain":
            self._drafts = self._can_draft and not self._drafts
            self._say(
                f"drafts are {'on' if self._drafts else 'off'}"
                if self._can_draft
                else "there is no draft head"
            )
        elif name == "/system":
            self._system = rest or None
            self._say("the system message is " + (repr(rest) if rest else "the model's own"))
        elif name == "/reset":
            self._messages = []
            self._say("a new conversation")
        elif name == "/save":
            self._save(rest)
        elif name == "/help":
            width = max(map(len, COMMANDS))
            self._say("\n".join(f"{usage:<{width}}  {what}" for usage, what in COMMANDS.items()))
        else:
            self._say(f"there is no command {name}; /help lists them")
        return True

    def _conversation(self) -> list[Message]:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, *self._messages]

    def _save(self, name: str) -> None:
        if not name:
            raise RequestError("/save: expected the name of a file")
        if not self._messages:
            raise RequestError("/save: the conversation is empty")
        try:
            with Path(name).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"messages": self._conversation()}, ensure_ascii=False) + "\n")
        except OSError as error:
            raise RequestError(f"/save: {name} cannot be written: {error.strerror}") from None
        self._say(f"added to {name}")

    def _answer(self, question: str) -> None:
        """Stream the answer to a question. Raises RequestError, and forgets the question then."""
        self._messages.append({"role": "user", "content": question})
        try:
            prompt = self._template.render(self._conversation())
            ids = self._decoder.prompt_tokenizer.encode(prompt, raw=True, add_special_tokens=False)
            room = self._decoder.max_length - len(ids)
            if room < 1:
                raise RequestError(
                    f"the conversation has {len(ids)} tokens, and the context {self._decoder.max_length}; "
                    "/reset begins a new one"
                )
            # Another seed for every answer, or all would draw the same numbers.
            seed = self._sampling.seed
            sampling = replace(self._sampling, seed=None if seed is None else seed + self._num_answers)
            chunks = self._decoder.stream(
                ids,
                max_new_tokens=min(self._max_new_tokens, room),
                sampling=sampling,
                **self._budget(),
            )
        except RequestError:
            self._messages.pop()
            raise
        self._num_answers += 1
        answer, counts, ending = self._print(chunks)
        counts.prompt_tokens = len(ids)
        self._messages.append({"role": "assistant", "content": answer})
        self._say(f"[{counts.line()}{ending}]")

    def _budget(self) -> dict[str, Any]:
        from runtime.decode.node_budget import FixedBudget

        return {} if self._drafts else {"budget": FixedBudget(0)}

    def _print(self, chunks: "Iterator[Chunk]") -> tuple[str, Counts, str]:
        """Print an answer as it is accepted: its text, its counts, and what ended it if the model did not."""
        counts, texts, ending = Counts(steps=-1), [], ""
        began = first = time.perf_counter()
        with stopped_by_ctrl_c() as is_stopped:
            for chunk in chunks:
                if counts.steps < 0:
                    first = time.perf_counter()
                counts.steps += 1
                counts.tokens += len(chunk.pieces)
                for piece in chunk.pieces:
                    texts.append(piece.text)
                    green = self._colours and piece.drafted and piece.text
                    print(f"{DRAFTED}{piece.text}{RESET}" if green else piece.text, end="")
                sys.stdout.flush()
                if is_stopped():
                    ending = "; stopped"
                    break
                if chunk.finish_reason == "length":
                    ending = "; cut at its length"
        counts.prefill_seconds, counts.decode_seconds = first - began, time.perf_counter() - first
        print()
        return "".join(texts), counts, ending

    def _say(self, text: str) -> None:
        """Print what the program says, apart from the model."""
        print(f"{DIMMED}{text}{RESET}" if self._colours else text, flush=True)


@contextmanager
def stopped_by_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Within the block the first Ctrl-C is only noted, so that a step is completed; the second interrupts."""
    count = 0

    def note(*_: object) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: count > 0
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    raise SystemExit(main())
