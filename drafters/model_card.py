"""The model card of a draft head, ``README.md`` in its directory: where it came from, how much it drafts."""

from string import Template
from typing import Any

from drafters.config import DrafterConfig
from drafters.head_types import PARALLEL

CARD_NAME = "README.md"
# A card with this line was written by training, and publishing replaces it with a more complete one.
WRITTEN_BY_TRAINING = "<!-- written by training -->"
# Nodes of the trees with which training measures a parallel head.
MEASURED_NODES = 16

TEXT = Template("""\
---
${head}tags:
- speculative-decoding
${tags}- ctc-speculator
---
$start
# A draft head for $model

A $kind head of ctc-speculator. It proposes the next tokens, and $model verifies them in one pass: the text is
the model's own, token for token when greedy, and of the model's own distribution when sampled.
$usage
| | |
|---|---|
| type | $kind |
| base model | $model |
| digest of the base model's last norm and first embeddings | $digest |
| frames, or depth of a draft | $num_frames |
| target model's layers that it reads | $layers |
| tokens per verify pass on held-out text | $acceptance |
| trained for | $steps |
| SHA-256 of the training tokens | $data |
$settings""")
USAGE = Template("""
```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("$model")
model.generate(**inputs, custom_generate="$repository", trust_remote_code=True)
```

The project ctc-speculator has to be installed, with its extra `train`.
""")
SETTINGS = Template("""
`training.json` holds the curve, the versions and the commit. The settings of the head and of the run:

```text
$settings
```
""")


def model_card(
    config: DrafterConfig, record: dict[str, Any], *, model: str, repository: str | None = None
) -> str:
    """The text of a card.

    record: the contents of ``training.json``; {} for a head without it
    model: name of the target model
    repository: the head's own name on the hub; None for a head that is not published
    """
    is_on_hub = "/" in model or repository is not None  # the hub refuses a base model without an owner
    head = f"base_model: {model}\n" if is_on_hub else ""
    usage = USAGE.substitute(model=model, repository=repository) if repository else ""
    values = {
        "head": head + ("library_name: transformers\n" if repository else ""),
        "tags": "- custom_generate\n" if repository else "",
        "start": "" if repository else f"{WRITTEN_BY_TRAINING}\n",
        "model": model,
        "kind": config.drafter_type,
        "usage": usage,
        "digest": config.base_weights or "not recorded",
        "num_frames": config.num_frames,
        "layers": f"{', '.join(map(str, config.target_layer_ids))} of {config.base_num_layers}",
        "acceptance": _acceptance(config, record),
        "steps": _steps(record),
        "data": record.get("data_sha256", "not recorded"),
        "settings": _settings(record),
    }
    return TEXT.substitute(values)


def _acceptance(config: DrafterConfig, record: dict[str, Any]) -> str:
    way = f"trees of {MEASURED_NODES} nodes" if config.family == PARALLEL else "its one best draft"
    if "held_out" in record:
        found = record["held_out"]
        over = f" over {found['sequences']} sequences" if "sequences" in found else ""
        return f"{found['tokens_per_step']} ({way}, {found['steps']} passes{over})"
    curve = [point for point in record.get("curve", []) if "beta" in point]
    return f"{curve[-1]['beta']} ({way})" if curve else "not measured"


def _steps(record: dict[str, Any]) -> str:
    curve = record.get("curve", [])
    return (
        f"{curve[-1]['step']} steps on {record.get('num_sequences')} sequences" if curve else "not recorded"
    )


def _settings(record: dict[str, Any]) -> str:
    settings = {**record.get("head", {}), **record.get("settings", {})}
    settings.pop("out", None)
    lines = "\n".join(f"{name} = {value}" for name, value in settings.items())
    return SETTINGS.substitute(settings=lines) if lines else ""
