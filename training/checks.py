"""What is checked in the first seconds of a run, before torch is imported: directories, model type, data."""

import os
from dataclasses import dataclass
from pathlib import Path

from drafters.config import WEIGHTS_NAME
from drafters.model_files import WeightsError, check_model_files, check_weights
from drafters.target_models import TargetModelError
from training.config import TrainingConfig
from training.conversations import PlainText, Turn, read_turns
from training.errors import TrainingError
from training.output import check_output
from training.rows import BadRows


@dataclass(frozen=True)
class RunInputs:
    """What a run begins with.

    turns: all prompts of the data
    bad: the rows that were left out
    checkpoint: where the run goes on from; None for one that begins at step 0
    """

    turns: list[Turn | PlainText]
    bad: BadRows
    checkpoint: Path | None


def read_inputs(config: TrainingConfig) -> RunInputs:
    """Check what can be checked without a library, and read the data. Raises TrainingError in one line."""
    if config.device_map and (processes := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise TrainingError(
            f"--device-map: one process spreads the model over all devices, and {processes} were started; "
            "start training without accelerate launch or torchrun"
        )
    checkpoint = check_output(config)
    try:
        check_model_files(config.model)
    except TargetModelError as error:
        raise TrainingError(f"--model: {error}") from error
    for head in config.heads:
        if head.init_from and not (head.init_from / WEIGHTS_NAME).is_file():
            raise TrainingError(
                f"--init-from: {head.init_from} holds no {WEIGHTS_NAME}; expected a draft head's directory"
            )
        if head.init_from:
            try:
                check_weights(head.init_from / WEIGHTS_NAME)
            except WeightsError as error:
                raise TrainingError(f"--init-from: {error}") from error
    bad = BadRows(skip=config.skip_bad_rows)
    turns = [turn for path in config.data for turn in read_turns(path, bad)]
    if config.labels == "data" and not any(_has_answer(turn) for turn in turns):
        raise TrainingError("--labels data: no row of the data holds an answer")
    return RunInputs(turns, bad, checkpoint)


def _has_answer(turn: Turn | PlainText) -> bool:
    return isinstance(turn, PlainText) or turn.answer is not None
