"""Train draft heads for a Hugging Face model.

    python -m training.train --model MODEL_DIR --data conversations.jsonl --out heads/ctc
    python -m training.train --model MODEL_DIR --self-prompts 8000 --out heads/ctc
    python -m training.train --model MODEL_DIR --data a.jsonl b.jsonl --out heads --heads heads.toml
    torchrun --nproc-per-node 4 -m training.train --model MODEL_DIR --data a.jsonl --out heads/ctc

The model stays frozen. Its own greedy continuations of the prompts, which are cached, are the targets. With
``--self-prompts`` it also writes prompts, beside those of ``--data`` or in their place. The heads read its
hidden states; several heads are trained with one forward pass. An interrupted run is continued with
``--resume``. Settings, directories and data are checked before torch is imported.
"""

from runtime.core.cli import exit_status
from training.config import parse_config
from training.loop.progress import RunPhase
from training.loop.start import only_run, read_inputs


def main(argv: list[str] | None = None) -> int:
    phase = RunPhase()

    def command() -> int:
        config = parse_config(argv, __doc__ or "")
        inputs = read_inputs(config)
        with phase.heeding_interrupts():
            # Imports torch, Transformers and accelerate, which takes seconds.
            from training.loop.run import train

            phase.raise_if_interrupted()
            with only_run(config):
                train(config, inputs, phase)
        return 0

    return exit_status("train", command, interrupted=lambda: phase.line)


if __name__ == "__main__":
    raise SystemExit(main())
