"""Write the tokenizer files that Vicuna's checkpoint does not have.

    python examples/vicuna_tokenizer.py build/vicuna/model

Vicuna comes with a sentencepiece model and without a chat template. This writes ``tokenizer.json``, which
the runtime reads, and ``chat_template.jinja`` into the model's directory. Exits with 2 and one line when
it cannot.
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

from transformers import AutoTokenizer

TEMPLATE = Path(__file__).with_name("vicuna_chat_template.jinja")


class TokenizerError(ValueError):
    """The directory's tokenizer cannot be used; the message says why."""


def write_tokenizer(model: Path) -> None:
    """Convert the tokenizer in ``model`` in place; once more changes nothing. Raises TokenizerError."""
    config_path = model / "tokenizer_config.json"
    if not config_path.is_file():
        raise TokenizerError(f"{model} has no tokenizer_config.json; expected Vicuna's model directory")
    if not (model / "tokenizer.json").is_file() and importlib.util.find_spec("sentencepiece") is None:
        raise TokenizerError("tokenizer.model is read with sentencepiece: pip install sentencepiece")
    # Vicuna was trained when "legacy" was all there was: a space before the first word of every piece
    # between special tokens, as in "<s> A chat" and "</s> USER".
    tokenizer = AutoTokenizer.from_pretrained(model, legacy=True)
    if not "".join(tokenizer.tokenize("<s>A")).startswith("<s>\u2581"):
        raise TokenizerError(f"{model}: expected Llama's tokenizer, which puts a space before the first word")
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    tokenizer.save_pretrained(model)
    # Llama's own class would build another tokenizer from the same vocabulary, without those spaces.
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="Vicuna's model directory")
    model = parser.parse_args(argv).model
    try:
        write_tokenizer(model)
    except (OSError, ValueError) as error:
        print(f"vicuna_tokenizer: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    print(f"wrote tokenizer.json and chat_template.jinja in {model}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
