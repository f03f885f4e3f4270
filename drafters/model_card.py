"""The model card of a head, ``README.md``: training writes it, and publishing again for the hub."""

from string import Template
from typing import Any

from drafters.config import DrafterConfig
from drafters.head_types import HEAD_FAMILIES

CARD_NAME, RECORD_NAME = "README.md", "training.json"
# A card with this line was written by training, and publishing replaces it.
WRITTEN_BY_TRAINING = "<!-- written by training -->"

TEXT = Template("""\
---
${head}tags:
- speculative-decoding
${tag}- ctc-speculator
---
$begin
# A draft head for $model

A $kind head of ctc-speculator. It proposes the next tokens, and $model verifies them in one pass: the text is
the model's own, token for token when greedy, and of the model's own distribution when sampled.

$use| | |
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

USE = Template("""\
```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("$model")
model.generate(**inputs, custom_generate="$repository", trust_remote_code=True)
```

The project ctc-speculator has to be installed, with its extra `train`.

""")

SETTINGS = Template("""
`training.json` holds the curve, the versions and the commit. The settings of the head and of the run:

```
$settings
```
""")


def local_card(config: DrafterConfig, record: dict[str, Any]) -> str:
    """The card of a head that training has written; ``record``: the contents of its ``training.json``."""
    # The hub refuses a base model that is no name of its own.
    base = f"base_model: {config.base_model}\n" if "/" in config.base_model else ""
    values = {"head": base, "tag": "", "begin": f"{WRITTEN_BY_TRAINING}\n", "use": ""}
    return TEXT.substitute(values, model=config.base_model, **_facts(config, record))


def hub_card(config: DrafterConfig, record: dict[str, Any], *, repository: str, model: str) -> str:
    """The card of a head on the hub, which says how to use it.

    record: the contents of ``training.json``, {} if there is none
    repository, model: names of the head and of its target model
    """
    values = {
        "head": f"base_model: {model}\nlibrary_name: transformers\n",
        "tag": "- custom_generate\n",
        "begin": "",
        "use": USE.substitute(model=model, repository=repository),
    }
    return TEXT.substitute(values, model=model, **_facts(config, record))


def _facts(config: DrafterConfig, record: dict[str, Any]) -> dict[str, str]:
    curve = record.get("curve")
    trained = f"{curve[-1]['step']} steps on {record['num_sequences']} sequences" if curve else "not recorded"
    return {
        "kind": config.drafter_type,
        "digest": config.base_weights or "not recorded",
        "num_frames": str(config.num_frames),
        "layers": f"{', '.join(map(str, config.target_layer_ids))} of {config.base_num_layers}",
        "acceptance": _acceptance(config, record),
        "steps": trained,
        "data": record.get("data_sha256", "not recorded"),
        "settings": _settings(record),
    }


def _acceptance(config: DrafterConfig, record: dict[str, Any]) -> str:
    """Tokens per verify pass, and how they were measured."""
    way = HEAD_FAMILIES[config.family].measured
    measured = record.get("held_out")
    if measured:
        # Records of earlier releases do not have the number of sequences.
        over = f" over {measured['sequences']} sequences" if "sequences" in measured else ""
        return f"{measured['tokens_per_step']} ({way}, {measured['steps']} passes{over})"
    points = [point for point in record.get("curve", []) if "beta" in point]
    return f"{points[-1]['beta']} ({way})" if points else "not measured"


def _settings(record: dict[str, Any]) -> str:
    run = {name: value for name, value in record.get("settings", {}).items() if name != "out"}
    settings = record.get("head", {}) | run
    lines = "\n".join(f"{name} = {value}" for name, value in settings.items())
    return SETTINGS.substitute(settings=lines) if lines else ""
