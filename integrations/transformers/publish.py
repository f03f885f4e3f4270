"""Make a head's directory ready for the Hugging Face hub.

    python -m integrations.transformers.publish heads/ctc --repository USER/HEAD --model MODEL_ID
    python -m integrations.transformers.publish heads/ctc --repository heads/ctc --model MODEL_ID --overwrite
    hf upload USER/HEAD heads/ctc

Writes ``custom_generate/generate.py``, which ``generate`` of Transformers runs when it is given the
repository's name, and ``README.md``, the model card, with the acceptance that training measured. The name
may also be the path of the directory itself.
"""

import json
from pathlib import Path
from string import Template
from typing import Any

from drafters.config import DrafterConfig, DrafterConfigError
from drafters.model_card import CARD_NAME, RECORD_NAME, WRITTEN_BY_TRAINING, hub_card
from runtime.core.cli import Parser, exit_status
from runtime.core.errors import UserError

SCRIPT, CARD, RECORD = Path("custom_generate/generate.py"), Path(CARD_NAME), Path(RECORD_NAME)

SCRIPT_TEXT = Template('''\
"""Decoding with the draft head of $repository:

    model.generate(**inputs, custom_generate="$repository", trust_remote_code=True)
"""

REPOSITORY = "$repository"


def generate(model, **arguments):
    try:
        from integrations.transformers.head import generate_with
    except ImportError as error:
        raise ImportError(f"{REPOSITORY} needs the project ctc-speculator with its extra train") from error
    return generate_with(REPOSITORY, model, arguments)
''')


class PublishError(UserError):
    """A directory that cannot be made ready; the message names the file or option."""


def write_hub_files(directory: Path, *, repository: str, model: str, overwrite: bool = False) -> list[Path]:
    """Write the script and the model card of a head; returns their paths.

    repository: the hub's name of the head, or the path of a directory
    model: the hub's name of the target model
    Raises PublishError for a directory without a head, a name with quotes, and files that are there already.
    """
    try:
        config = DrafterConfig.load(directory)
    except DrafterConfigError as error:
        raise PublishError(str(error)) from error
    for option, value in (("--repository", repository), ("--model", model)):
        if not value or set(value) & set("\"'\\\n"):
            raise PublishError(f"{option}: expected a name without quotes or line breaks, got {value!r}")
    try:
        card = hub_card(config, _record(directory), repository=repository, model=model)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise PublishError(f"{directory / RECORD} is no record of a training: {error!r}") from error
    files = {SCRIPT: SCRIPT_TEXT.substitute(repository=repository), CARD: card}
    there = [directory / name for name in files if _is_another(directory / name)]
    if there and not overwrite:
        raise PublishError(f"{there[0]}: expected no such file, or --overwrite; there is one")
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")
    return [directory / name for name in files]


def _is_another(path: Path) -> bool:
    """Whether a file is there that training has not written."""
    return path.exists() and WRITTEN_BY_TRAINING not in path.read_text(encoding="utf-8", errors="replace")


def _record(directory: Path) -> dict[str, Any]:
    path = directory / RECORD
    if not path.is_file():
        return {}
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise PublishError(f"{path} is not valid JSON: {error}") from error
    return record


def main(argv: list[str] | None = None) -> int:
    parser = Parser("publish", "integrations.transformers.publish", __doc__)
    parser.add_argument("directory", type=Path, help="a head, as training writes it")
    parser.add_argument("--repository", required=True, help="name that the head has on the hub, or its path")
    parser.add_argument("--model", required=True, help="name of the target model on the hub")
    parser.add_argument("--overwrite", action="store_true", help="replace a script and a card that are there")
    args = parser.parse_args(argv)

    def command() -> int:
        options = {"repository": args.repository, "model": args.model, "overwrite": args.overwrite}
        for path in write_hub_files(args.directory, **options):
            print(path)
        return 0

    return exit_status("publish", command)


if __name__ == "__main__":
    raise SystemExit(main())
