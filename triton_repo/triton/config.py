"""Write the models' ``config.pbtxt`` from the table of tensors.

python -m triton_repo.triton.config        # writes those of triton_repo/models again
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from runtime.core.bundle import PLAIN
from runtime.core.cli import AUTO
from runtime.core.options import (
    DEFAULT_MAX_QUEUE_SIZE,
    DEFAULT_MAX_QUEUE_TOKENS,
    DEFAULT_PREFIX_CACHE_MB,
    SHARED_PREFILL_CHUNK,
)
from triton_repo.triton.limits import NO, instance_group
from triton_repo.triton.tensors import MODELS, PLAIN_MODEL, inputs_of, outputs_of

REPOSITORY = Path(__file__).parents[1] / "models"
# What a model's name says of its parameters.
OWN_PARAMETERS = {PLAIN_MODEL: {"method": PLAIN, "prompt_lookup": NO}}
# The backend's settings. In config.pbtxt all of them are strings.
PARAMETERS: dict[str, str] = {
    "bundle": "",
    "method": "",
    "num_nodes": AUTO,
    "prompt_lookup": "",
    "step": "",
    "max_num_seqs": "0",
    "max_length": "0",
    "num_threads": "0",
    "max_queue_size": str(DEFAULT_MAX_QUEUE_SIZE),
    "max_queue_tokens": str(DEFAULT_MAX_QUEUE_TOKENS),
    "prefix_cache_mb": str(DEFAULT_PREFIX_CACHE_MB),
    "prefill_chunk_size": str(SHARED_PREFILL_CHUNK),
}
HEADER = """\
# Written by "python -m triton_repo.triton.config". Parameters: an empty "bundle" stands for the directory in
# the environment variable CTC_BUNDLE, or /engines; an empty "method" for "draft" if the bundle has a draft
# head; an empty "prompt_lookup" for "yes" beside a draft head in steps on the host, and else for "no"; an
# empty "step" for what the bundle's target is for, "host" or "graph"; "num_threads" 0 for all cores;
# "max_num_seqs" and "max_length" 0 for what the engines were compiled for, or else 16 and the model's
# context. Engines that were compiled for GPUs need an instance_group of KIND_GPU.
"""


def config_text(
    name: str,
    parameters: Mapping[str, str] | None = None,
    *,
    num_instances: int = 1,
    gpus: Sequence[int] | None = None,
) -> str:
    """The text of a model's ``config.pbtxt``.

    name: one of ``MODELS``
    parameters: replace some of ``PARAMETERS``
    num_instances: on the CPU, or on each of the GPUs
    """
    from google.protobuf import json_format, text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    interface = MODELS[name]
    own = OWN_PARAMETERS.get(name, {})
    values = {"interface": interface, **PARAMETERS, **(parameters or {}), **own}
    fields = {
        "name": name,
        "backend": "python",
        "max_batch_size": 1,
        "model_transaction_policy": {"decoupled": True},
        "version_policy": {"latest": {"num_versions": 1}},
        "instance_group": [instance_group(gpus, num_instances)],
        "input": [
            {"name": i.name, "data_type": i.triton_type, "dims": [i.size], "optional": i.optional}
            for i in inputs_of(interface)
        ],
        "output": [
            {"name": o.name, "data_type": o.triton_type, "dims": [o.size]} for o in outputs_of(interface)
        ],
        "parameters": {key: {"string_value": value} for key, value in values.items()},
    }
    message = json_format.ParseDict(fields, ModelConfig())
    return HEADER + text_format.MessageToString(message, use_short_repeated_primitives=True)


def main() -> None:
    for name in MODELS:
        (REPOSITORY / name / "config.pbtxt").write_text(config_text(name), encoding="utf-8")


if __name__ == "__main__":
    main()
