"""The model card of a head, ``README.md`` in its directory: where it came from and how much it drafts."""

from pathlib import Path
from string import Template
from typing import Any

from drafters.config import DrafterConfig
from drafters.head_types import PARALLEL
from drafters.model_card import CARD_NAME, WRITTEN_BY_TRAINING
from training.evaluate import NUM_NODES

TEXT = Template("""\
---
${base}tags:
- speculative-decoding
- ctc-speculator
---
$mark

# A draft head for $model

A $kind head of ctc-speculator. It proposes the next tokens, and $model verifies them in one pass: the text is
the model's own, token for token when greedy, and of the model's own distribution when sampled.

| | |
|---|---|
| base model | $model |
| digest of the base model's last norm and first embeddings | $digest |
| frames, or depth of a draft | $num_frames |
| target model's layers that it reads | $layers |
| tokens per verify pass on held-out text | $acceptance |
| trained for | $steps steps on $sequences sequences |
| SHA-256 of the training tokens | $data |

`training.json` holds the curve, the versions and the commit. The settings of the head and of the run:

```
$settings
```
""")


def write_card(directory: Path, config: DrafterConfig, record: dict[str, Any]) -> None:
    """Write the card of a head with the contents of its ``training.json``."""
    measured = record["held_out"]
    way = f"trees of {NUM_NODES} nodes" if config.family == PARALLEL else "its one best draft"
    settings = record["head"] | {name: value for name, value in record["settings"].items() if name != "out"}
    is_on_hub = "/" in config.base_model
    values = {
        "mark": WRITTEN_BY_TRAINING,
        # The hub refuses a base model that is no name of its own.
        "base": f"base_model: {config.base_model}\n" if is_on_hub else "",
        "model": config.base_model,
        "kind": config.drafter_type,
        "digest": config.base_weights,
        "num_frames": config.num_frames,
        "layers": f"{', '.join(map(str, config.target_layer_ids))} of {config.base_num_layers}",
        "acceptance": f"{measured['tokens_per_step']} ({way}, {measured['steps']} passes over "
        f"{measured['sequences']} sequences)",
        "steps": record["settings"]["steps"],
        "sequences": record["num_sequences"],
        "data": record["data_sha256"],
        "settings": "\n".join(f"{name} = {value}" for name, value in settings.items()),
    }
    (directory / CARD_NAME).write_text(TEXT.substitute(values), encoding="utf-8")
