"""CTranslate2, with the model that its own converter makes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.engine import ENGINES, Decode, Opening, Receive

VOCABULARY_NAME = "vocabulary.json"
FORMS = ENGINES["ctranslate2"].forms


def convert(model_dir: Path, out: Path, form: str, drafter: Path | None) -> None:
    from ctranslate2.converters import TransformersConverter

    converter = TransformersConverter(str(model_dir))
    # It refuses a directory that exists.
    converter.convert(str(out), quantization=form, force=True)


def open_model(opening: Opening) -> Decode:
    import ctranslate2

    compute_type = FORMS[opening.precision]
    model = ctranslate2.Generator(
        opening.path, device="cpu", compute_type=compute_type, intra_threads=opening.threads
    )
    vocabulary = json.loads((Path(opening.path) / VOCABULARY_NAME).read_text(encoding="utf-8"))

    def decode(prompt_ids: Sequence[int], max_new_tokens: int, receive: Receive) -> None:
        def step(result: Any) -> bool:
            receive([result.token_id])
            return False

        model.generate_batch(
            [[vocabulary[index] for index in prompt_ids]],
            include_prompt_in_result=False,
            max_length=max_new_tokens,
            sampling_topk=1,
            end_token=[len(vocabulary) + 1],
            callback=step,
        )

    return decode
