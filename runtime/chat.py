"""Chat with a bundle's model in the terminal.

    python -m runtime.chat --bundle engines/
    python -m runtime.chat --bundle engines/ --system "You answer in rhymes." --temperature 0.7

What the draft head proposed is green. Ctrl-C stops an answer after the pass
that is running, and keeps the chat; Alt-Enter begins a new line.
/help lists the commands. A question a line can also come from a pipe.
"""

import argparse
from pathlib import Path

from runtime.core.bundle import DRAFT, Bundle
from runtime.core.cli import AUTO, Parser, at_least, exit_status, num_nodes
from runtime.core.errors import RequestError
from runtime.core.options import DEFAULT_PREFIX_CACHE_MB, choose_method
from runtime.decode.sampling_params import SamplingParams, add_sampling_options, sampling_settings


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)

    def command() -> int:
        sampling = SamplingParams(**sampling_settings(args))
        bundle = Bundle.load(args.bundle, verify=False)  # the decoder verifies the files
        # They import jinja2, numba, ONNX Runtime and, on a terminal, prompt_toolkit.
        from runtime.chat_template import ChatTemplate
        from runtime.decoder import SpeculativeDecoder
        from runtime.terminal.chat import Chat, read_questions

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


if __name__ == "__main__":
    raise SystemExit(main())
