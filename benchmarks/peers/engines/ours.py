"""Our own bundles, built as ``ctc build`` does by default but for what shares a scale."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.engine import PLAIN, PROMPT_LOOKUP, SCALE_FLAGS, Decode, Opening, Receive


def convert(model_dir: Path, out: Path, form: str, drafter: Path | None, scales: str | None) -> None:
    from export.build_engines import main
    from runtime.core.errors import UserError

    argv = ["--model", str(model_dir), "--out", str(out / "bundle"), "--precision", form]
    argv += [SCALE_FLAGS[form][0], scales] if scales else []
    if main(argv + (["--drafter", str(drafter)] if drafter else [])):
        raise UserError("the bundle cannot be built")


def open_model(opening: Opening) -> Decode:
    from runtime.decoder import SpeculativeDecoder

    bundle = Path(opening.path) / "bundle"
    is_plain = opening.method in (PLAIN, PROMPT_LOOKUP)
    decoder = SpeculativeDecoder.from_bundle(
        bundle,
        method=PLAIN if is_plain else None,
        num_nodes=opening.num_nodes,
        num_threads=opening.threads,
        prompt_lookup=opening.method == PROMPT_LOOKUP,
        verify=False,
    )

    def decode(prompt_ids: Sequence[int], max_new_tokens: int, receive: Receive) -> None:
        for chunk in decoder.stream(prompt_ids, max_new_tokens=max_new_tokens, stop_token_ids=()):
            receive(chunk.token_ids)

    return decode
