"""The models' ``config.pbtxt``: written from the list of tensors, checked against it when loaded."""

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.decoder import AUTO
from runtime.errors import UserError
from runtime.scheduling.scheduler import DEFAULT_MAX_QUEUE_SIZE, DEFAULT_PREFILL_CHUNK_SIZE
from triton_repo.tensors import TEXT, TOKENS, TensorInfo, inputs_of, outputs_of

MODEL, PLAIN_MODEL, TOKENS_MODEL = "ctc_llm", "ctc_llm_plain", "ctc_llm_tokens"
MODELS = {MODEL: TEXT, PLAIN_MODEL: TEXT, TOKENS_MODEL: TOKENS}
# The same bundle without its draft head, to be compared with.
METHOD_OF = {PLAIN_MODEL: "vanilla"}
# Where the bundle is when the repository is mounted as it stands.
BUNDLE_VARIABLE = "CTC_BUNDLE"
DEFAULT_BUNDLE = "/engines"
DEFAULT_MAX_NUM_SEQS = 16
# What a model is started with; all are strings in config.pbtxt.
PARAMETERS: dict[str, str] = {
    "bundle": "",
    "method": "",
    "num_nodes": AUTO,
    "num_rows": str(DEFAULT_MAX_NUM_SEQS),
    "max_length": "0",
    "num_threads": "0",
    "max_queue_size": str(DEFAULT_MAX_QUEUE_SIZE),
    "prompt_tokens": str(DEFAULT_PREFILL_CHUNK_SIZE),
}
HEADER = """\
# Written by triton_repo/config.py. "bundle" empty: the environment's CTC_BUNDLE, or /engines; "method" empty:
# with the draft head, where the bundle has one; "num_threads" 0: all cores; "max_length" 0: the model's.
"""


def model_config(
    name: str,
    interface: str,
    parameters: Mapping[str, str] | None = None,
    *,
    num_instances: int = 1,
    gpus: Sequence[int] = (),
) -> str:
    """The text of a model's ``config.pbtxt``; ``parameters`` replace some of ``PARAMETERS``.

    num_instances: in all, or with ``gpus`` on each of them
    """
    kind = f"KIND_GPU, gpus: [ {', '.join(map(str, gpus))} ]" if gpus else "KIND_CPU"
    values = {"interface": interface, **PARAMETERS, **(parameters or {})}
    values["method"] = METHOD_OF.get(name, values["method"])
    lines = [
        f'name: "{name}"',
        'backend: "python"',
        "max_batch_size: 1",
        "model_transaction_policy { decoupled: true }",
        "version_policy { latest { num_versions: 1 } }",
        f"instance_group [ {{ kind: {kind}, count: {num_instances} }} ]",
        *(f"input [ {_tensor(info, optional=info.optional)} ]" for info in inputs_of(interface)),
        *(f"output [ {_tensor(info, optional=False)} ]" for info in outputs_of(interface)),
        *(
            f'parameters {{ key: "{key}", value: {{ string_value: {_quoted(value)} }} }}'
            for key, value in values.items()
        ),
    ]
    return HEADER + "\n".join(lines) + "\n"


def check_tensors(config: Mapping[str, Any], interface: str) -> None:
    """Raises UserError unless a loaded configuration has this interface's tensors."""
    for kind, infos in (("input", inputs_of(interface)), ("output", outputs_of(interface))):
        expected = {info.name: (info.triton_type, [info.size]) for info in infos}
        found = {t["name"]: (t["data_type"], [int(size) for size in t["dims"]]) for t in config[kind]}
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                raise UserError(
                    f"config.pbtxt: {kind} {name} must be {expected.get(name, 'absent')}, "
                    f"got {found.get(name, 'none')}"
                )


def _tensor(info: TensorInfo, *, optional: bool) -> str:
    text = f'{{ name: "{info.name}", data_type: {info.triton_type}, dims: [ {info.size} ]'
    return f"{text}, optional: true }}" if optional else f"{text} }}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
