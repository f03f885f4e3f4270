"""What training makes of a data file, for tests."""

from pathlib import Path
from typing import Any

from training.data.conversations import BadRows, read_turns
from training.data.sequences import Example, make_examples


def read_examples(path: Path, tokenizer: Any) -> list[Example]:
    """All prompts of a data file as token ids. Raises TrainingError naming file, line and field."""
    return make_examples(read_turns(path), tokenizer, BadRows())
