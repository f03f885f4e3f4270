"""Chat with a bundle's model in the terminal.

    python -m runtime.chat --bundle engines/
    python -m runtime.chat --bundle engines/ --system "You answer in rhymes." --temperature 0.7

What the draft head proposed is green. Ctrl-C stops an answer after the pass
that is running, and keeps the chat; Alt-Enter begins a new line.
/help lists the commands. A question a line can also come from a pipe.
"""

import argparse
import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.core.bundle import DRAFT, Bundle
from runtime.core.cli import AUTO, Parser, Terminated, at_least, coloured, exit_status, num_nodes
from runtime.core.errors import CacheMemoryError, DeviceMemoryError, RequestError
from runtime.core.options import DEFAULT_PREFIX_CACHE_MB, choose_method
from runtime.core.prompts import encode_utf8
from runtime.decode.sampling_params import SamplingParams, add_sampling_options, sampling_settings
from runtime.generate import print_stream

if TYPE_CHECKING:
    from runtime.decoder import SpeculativeDecoder

DIMMED, RESET = "\033[2m", "\033[0m"
QUESTION_MARK = "> "
COMMANDS = {
    "/plain": "switch drafts off, to feel the difference, and on again; the answers stay the same",
    "/system TEXT": "set the system message; without TEXT: the model's own",
    "/reset": "begin a new conversation",
    "/save FILE": "add the conversation to a jsonl file that training and generate read",
    "/help": "list the commands",
    "/quit": "leave, as the end of input does",
}

Message = dict[str, str]
# What ends an answer and leaves the conversation and the engines as they were.
REFUSED = (RequestError, CacheMemoryError, DeviceMemoryError)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)

    def command() -> int:
        sampling = SamplingParams(**sampling_settings(args))
        bundle = Bundle.load(args.bundle, verify=False)  # the decoder verifies the files
        # They import jinja2, numba and ONNX Runtime.
        from runtime.chat_template import ChatTemplate
        from runtime.decoder import SpeculativeDecoder

        template = ChatTemplate.load(args.bundle)
        if template is None:
            raise RequestError(
                f"--bundle: the model of {args.bundle} has no chat template, so it does not chat; "
                "ctc generate completes texts"
            )
        drafts = choose_method(bundle.manifest, None, args.bundle) == DRAFT
        decoder = SpeculativeDecoder.from_bundle(
            args.bundle,
            num_nodes=args.num_nodes,
            num_threads=args.threads,
            prompt_lookup=None,
            prefix_cache_mb=args.prefix_cache_mb,
        )
        try:
            chat = Chat(decoder, args.system, sampling, args.max_new_tokens, can_draft=drafts)
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
    add("--max-new-tokens", type=at_least(1), default=512, help="tokens of an answer at most")
    text = "draft nodes verified a step (default %(default)s: what pays)"
    add("--num-nodes", type=num_nodes, default=AUTO, metavar="N", help=text)
    text = "MiB of keys and values of earlier turns that are kept, not read again; 0: none"
    add("--prefix-cache-mb", type=at_least(0), default=DEFAULT_PREFIX_CACHE_MB, metavar="N", help=text)
    add("--threads", type=int, help="default: all cores")
    add_sampling_options(parser)
    return parser.parse_args(argv)


def read_questions() -> Iterator[str]:
    """The user's lines: edited on a terminal, read as they are from a pipe or file."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        if isinstance(sys.stdin, io.TextIOWrapper):
            # A byte that is not UTF-8 becomes a lone surrogate, which a prompt is refused for in one line.
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
        for line in sys.stdin:
            shown = line.rstrip().encode("utf-8", "replace").decode()
            print(f"{QUESTION_MARK}{shown}", flush=True)
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
        except Terminated:
            raise
        except KeyboardInterrupt:
            print("/quit leaves")
        except EOFError:
            return


class Chat:
    """A conversation with a model; every answer is streamed to stdout.

    can_draft: whether the bundle has a draft head
    """

    def __init__(
        self,
        decoder: "SpeculativeDecoder",
        system: str | None,
        sampling: SamplingParams,
        max_new_tokens: int,
        *,
        can_draft: bool,
    ):
        self._decoder = decoder
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
                encode_utf8("input", text)
                if not text.startswith("/"):
                    with stopped_by_ctrl_c() as is_stopped:
                        self._answer(text, is_stopped)
                elif not self._obey(text):
                    return
            except REFUSED as error:
                self._say(str(error))

    def _obey(self, text: str) -> bool:
        """Carry out a command; False for the one that leaves."""
        name, *words = text.split(maxsplit=1)
        rest = "".join(words)
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
        if not name or "\0" in name:
            raise RequestError(f"/save: expected the name of a file, got {name!r}")
        if not self._messages:
            raise RequestError("/save: the conversation is empty")
        try:
            with Path(name).expanduser().open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"messages": self._conversation()}, ensure_ascii=False) + "\n")
        except OSError as error:
            raise RequestError(f"/save: {name} cannot be written: {error.strerror}") from None
        except RuntimeError as error:  # ~ of a user who is not known
            raise RequestError(f"/save: {name} cannot be written: {error}") from None
        self._say(f"added to {name}")

    def _answer(self, question: str, is_stopped: Callable[[], bool]) -> None:
        """Stream the answer to a question. Raises one of REFUSED, and forgets the question then."""
        from runtime.decode.budget import FixedBudget  # imports numba

        self._messages.append({"role": "user", "content": question})
        try:
            ids = self._decoder.prompt_tokenizer.encode_messages(self._conversation())
            room = self._decoder.max_length - len(ids)
            if room < 1:
                raise RequestError(
                    f"the conversation has {len(ids)} tokens, and the context {self._decoder.max_length}; "
                    "/reset begins a new one"
                )
            # Another seed for every answer, or all would draw the same numbers.
            seed = self._sampling.seed
            if seed is not None:
                seed = (seed + self._num_answers) % 2**64
            sampling = replace(self._sampling, seed=seed)
            chunks = self._decoder.stream(
                ids,
                max_new_tokens=min(self._max_new_tokens, room),
                sampling=sampling,
                budget=None if self._drafts else FixedBudget(0),
                is_stopped=is_stopped,
            )
            printed = print_stream(chunks, show_drafts=self._colours)
        except REFUSED:
            self._messages.pop()
            raise
        if not printed.tokens:
            self._messages.pop()
            self._say("[stopped before the answer began; the question is forgotten]")
            return
        self._num_answers += 1
        self._messages.append({"role": "assistant", "content": printed.text})
        ending = {None: "; stopped", "length": "; cut at its length"}.get(printed.finish_reason, "")
        self._say(f"[{printed.summary()}{ending}]")

    def _say(self, text: str) -> None:
        """Print what the program says, apart from the model."""
        print(f"{DIMMED}{text}{RESET}" if self._colours else text, flush=True)


@contextmanager
def stopped_by_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Within the block Ctrl-C is only noted, however often it comes.

    An exception in the middle of a pass would leave the caches and engines in an unknown state, and the
    conversation goes on with them.
    """
    is_noted = False

    def note(*_: object) -> None:
        nonlocal is_noted
        is_noted = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: is_noted
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    raise SystemExit(main())
