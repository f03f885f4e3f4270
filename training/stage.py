"""How far a run has come, for the line that it ends with when it is interrupted."""

from training.config import TrainingConfig

BEFORE = "interrupted before training began; run the same command again"


class Stage:
    """What Ctrl-C says: ``line`` is right at any time between two calls of the other methods."""

    def __init__(self) -> None:
        self.line = BEFORE

    def distilling(self, config: TrainingConfig) -> None:
        """The target model continues prompts, and every batch of them is kept."""
        self.line = (
            f"interrupted while distilling; what is finished is kept in {config.cache_directory}, run "
            "the same command again to go on"
        )

    def training(self, config: TrainingConfig, step: int, saved: int | None) -> None:
        """``step`` steps are done, and the last checkpoint is of step ``saved``; None if there is none."""
        if saved is None:
            self.line = (
                f"interrupted at step {step}, before the first checkpoint (--save-every "
                f"{config.save_every}); run the same command again to begin anew"
            )
        elif config.resume:
            self.line = f"interrupted at step {step}; run the same command again to go on from step {saved}"
        else:
            without = " without --overwrite" if config.overwrite else ""
            self.line = (
                f"interrupted at step {step}; run the same command with --resume{without} to go on from step "
                f"{saved}"
            )

    def writing(self, config: TrainingConfig) -> None:
        """All steps are done; the heads are evaluated and written."""
        self.line = (
            "interrupted while the heads were evaluated; run the same command with --resume to evaluate and "
            "write them"
        )
