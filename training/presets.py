"""Named settings of draft heads, for ``--preset``: our own recommendation and what papers publish.

Flags beside ``--preset`` replace single settings of it. Without the flag, a ``ctc`` head begins with the
recommended settings, as far as its trunk can have them, and every other type with its own defaults. A head in
a TOML file has the settings that the file states, and the defaults of ``HeadConfig`` for the others.
"""

from typing import Any

from drafters.head_types import HEAD_TYPES

RECOMMENDED = "ctc"
PRESETS: dict[str, dict[str, Any]] = {
    # The best of the tables in docs/methods.md: frames that start from anchor and context, an MLP transition,
    # two spare frames, and the target model's own distribution as half of the targets.
    "ctc": {
        "drafter_type": "ctc",
        "frame_start": "fused",
        "num_frames": 12,
        "num_labels": 10,
        "transition": "mlp",
        "soft_labels": 0.5,
    },
    # CTC-drafter as published (arXiv 2412.00061): CTC loss and independent frames.
    "paper": {"drafter_type": "ctc", "loss": "ctc", "num_frames": 8, "num_labels": 6},
    # arXiv 2401.10774: four heads with LM heads of their own.
    "medusa": {"drafter_type": "medusa", "num_frames": 4, "num_labels": 4, "own_lm_head": True},
    # arXiv 2402.05109, and Hydra++ of the same paper.
    "hydra": {"drafter_type": "hydra", "num_frames": 4, "num_labels": 4},
    "hydra-pp": {
        "drafter_type": "hydra",
        "num_frames": 4,
        "num_labels": 4,
        "num_layers": 1,
        "head_depth": 4,
        "soft_labels": 1.0,
    },
    # EAGLE-3 style, arXiv 2503.01840.
    "eagle": {"drafter_type": "eagle", "num_frames": 7, "num_labels": 7, "soft_labels": 1.0},
    # DFlash style, arXiv 2602.06036; DSpark style, 2607.05147; TreeFlash style, 2606.03819.
    "block": {"drafter_type": "block", "num_frames": 8, "num_labels": 8, "soft_labels": 0.5},
    "block-markov": {
        "drafter_type": "block",
        "num_frames": 8,
        "num_labels": 8,
        "transition": "markov",
        "soft_labels": 0.5,
    },
    "block-mlp": {
        "drafter_type": "block",
        "num_frames": 8,
        "num_labels": 8,
        "transition": "mlp",
        "soft_labels": 0.5,
    },
}


def preset_settings(preset: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """The settings of a head by flags: those of a preset, replaced by what was ``given``.

    preset: a name of PRESETS; None for the recommended settings of a ctc head, as far as it can have them
    """
    if preset is not None:
        return PRESETS[preset] | _depending(PRESETS[preset], given) | given
    if given.get("drafter_type", RECOMMENDED) != RECOMMENDED:
        return given
    trunk = HEAD_TYPES[RECOMMENDED].trunks.get(given.get("trunk", ""))
    if trunk is not None and trunk.borrows_layers:
        # Streams have settings of their own, of which demo/streams.toml has examples.
        return given
    settings = PRESETS[RECOMMENDED]
    if trunk is not None and not trunk.fused_start:
        settings = {name: value for name, value in settings.items() if name != "frame_start"}
    return settings | _depending(settings, given) | given


def _depending(settings: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """With another number of frames, the number of labels follows from it again."""
    changes = given.get("num_frames", settings["num_frames"]) != settings["num_frames"]
    return {"num_labels": None} if changes else {}
