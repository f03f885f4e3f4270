"""What a bundle allows its models, and their ``config.pbtxt``, written from the table of tensors.

    python -m triton_repo.triton.config        # writes those of triton_repo/models again

The launcher's options are checked against the bundle: where its models run, how many requests decode at a
time, and with which options.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.core.bundle import DRAFT, GRAPH_STEP, HOST_STEP, MAX_NUM_NODES, PLAIN, BundleManifest
from runtime.core.cli import AUTO, num_nodes
from runtime.core.errors import RequestError
from runtime.core.options import (
    DEFAULT_MAX_QUEUE_SIZE,
    DEFAULT_MAX_QUEUE_TOKENS,
    DEFAULT_PREFIX_CACHE_MB,
    MAX_NUM_SEQS,
    MAX_NUM_THREADS,
    MAX_PREFIX_CACHE_MB,
    SHARED_PREFILL_CHUNK,
    choose_method,
    choose_prompt_lookup,
)
from triton_repo.triton.log import say
from triton_repo.triton.tensors import MODELS, PLAIN_MODEL, inputs_of, outputs_of

DEFAULT_MAX_NUM_SEQS = 16
# The values of switches among a model's parameters, which are texts.
YES, NO = "yes", "no"
# The first GPU.
DEFAULT_GPUS = (0,)


def gpu_numbers(text: str) -> tuple[int, ...]:
    """An argument type: numbers of GPUs, such as ``0,1``."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts) or len(set(map(int, parts))) < len(parts):
        raise argparse.ArgumentTypeError(f"must be numbers of different GPUs, such as 0,1, got {text!r}")
    return tuple(map(int, parts))


def choose_gpus(manifest: BundleManifest, gpus: Sequence[int] | None) -> Sequence[int] | None:
    """The GPUs of a bundle's models; None where they run on the CPU.

    gpus: those that were asked for
    Raises RequestError if GPUs were asked for and the engines cannot use them.
    """
    if manifest.is_for_gpu:
        return gpus or DEFAULT_GPUS
    if gpus:
        raise RequestError(f"--gpus: engines of the target {manifest.target} run on the CPU")
    return None


def instance_device(manifest: BundleManifest, args: Mapping[str, str]) -> str | None:
    """The runtime's name of the device that Triton gives an instance; None for the CPU.

    args: those of the model's ``initialize``
    Raises RequestError where the configuration's kind of instance is not the one that the engines need.
    """
    kind = args["model_instance_kind"]
    needed = "GPU" if manifest.is_for_gpu else "CPU"
    if kind != needed:
        raise RequestError(
            f"instance_group: engines of the target {manifest.target} need instances of KIND_{needed}, "
            f"got KIND_{kind}"
        )
    return f"cuda:{args['model_instance_device_id']}" if kind == "GPU" else None


def max_num_seqs(manifest: BundleManifest, wanted: int) -> int:
    """Requests that decode at a time: as many as wanted, or for 0 as the engines were compiled for."""
    plan = manifest.engine_plan
    return wanted or (plan.max_num_seqs if plan else DEFAULT_MAX_NUM_SEQS)


def switch(parameter: str) -> bool | None:
    """The value of a switch among a model's parameters; None where it leaves the choice to the decoder.

    Raises RequestError for a text that is no switch.
    """
    values = {YES: True, NO: False, "": None}
    if parameter not in values:
        raise RequestError(f"parameters: a switch is {YES}, {NO} or empty, got {parameter!r}")
    return values[parameter]


def check_options(manifest: BundleManifest, args: argparse.Namespace, rest: list[str]) -> bool:
    """Check the launcher's options before a server is started, and say which one is not taken as it is.

    Returns whether the models draft. Raises RequestError for the first option that no model of this bundle
    can be loaded with.

    rest: tritonserver's options
    """
    plan, model = manifest.engine_plan, manifest.model
    if any(option.partition("=")[0] == "--device" for option in rest):
        where = "GPUs, which --gpus chooses" if manifest.is_for_gpu else "the CPU"
        raise RequestError(
            f"--device: is no option of the server; this bundle's {manifest.target} runs on {where}"
        )
    method = choose_method(manifest, args.method, "the bundle", option="--method")
    drafts, step = method == DRAFT, args.step or (GRAPH_STEP if manifest.is_for_gpu else HOST_STEP)
    in_verify_pass = manifest.drafter is not None and manifest.drafter.drafts_in_verify_pass
    if step == GRAPH_STEP and in_verify_pass and (drafts or not manifest.step_nodes):
        raise RequestError("--step: the bundle holds streams of the verify pass, whose steps run on the host")
    if step == GRAPH_STEP and not manifest.step_nodes:
        raise RequestError("--step: the bundle has no graphs of steps; export it again with --step-nodes")
    if step == HOST_STEP and plan:
        raise RequestError(f"--step: engines of the target {manifest.target} run graph steps only")
    choose_prompt_lookup(manifest, method, step, args.prompt_lookup, option="--prompt-lookup")
    if plan:
        _check_most("--max-num-seqs", args.max_num_seqs, plan.max_num_seqs, "the engines were compiled for")
        _check_most("--max-length", args.max_length, plan.max_context, "the engines were compiled for")
    _check_most("--max-length", args.max_length, model.max_position_embeddings, "the model takes")
    if drafts and step == GRAPH_STEP:
        _check_most("--num-nodes", args.num_nodes, manifest.step_nodes[-1], "the bundle has graphs for")
    _check_most("--num-nodes", args.num_nodes, MAX_NUM_NODES, "a step verifies")
    _check_most("--max-num-seqs", args.max_num_seqs, MAX_NUM_SEQS, "a server decodes")
    _check_most("--threads", args.threads, MAX_NUM_THREADS, "an engine takes")
    _check_most("--prefix-cache-mb", args.prefix_cache_mb, MAX_PREFIX_CACHE_MB, "a cache takes")
    sizes, wanted = manifest.step_nodes, args.num_nodes
    if drafts and step == GRAPH_STEP and isinstance(wanted, int) and wanted not in sizes:
        larger = next(size for size in sizes if size > wanted)
        graphs = f"the bundle has graphs for {', '.join(str(size) for size in sizes if size)}"
        say(f"--num-nodes: steps have {larger} nodes in place of {wanted}; {graphs}")
    return drafts


def nodes_or_auto(text: str) -> int | str:
    """An argument type: as ``runtime.core.cli.num_nodes``, but ``auto`` stays as it is."""
    return num_nodes(text) or text


def _check_most(option: str, value: Any, most: int, why: str) -> None:
    if isinstance(value, int) and value > most:
        raise RequestError(f"{option}: {why} at most {most}, got {value}")


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
    num_instances: on the CPU, or on each of the GPUs, where Triton starts so many
    """
    from google.protobuf import json_format, text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    interface = MODELS[name]
    own = OWN_PARAMETERS.get(name, {})
    values = {"interface": interface, **PARAMETERS, **(parameters or {}), **own}
    place = {"kind": "KIND_CPU"} if gpus is None else {"kind": "KIND_GPU", "gpus": list(gpus)}
    fields = {
        "name": name,
        "backend": "python",
        "max_batch_size": 1,
        "model_transaction_policy": {"decoupled": True},
        "version_policy": {"latest": {"num_versions": 1}},
        "instance_group": [{"count": num_instances, **place}],
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
