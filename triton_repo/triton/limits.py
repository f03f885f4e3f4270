"""The launcher's options against what the bundle was exported for, before a server is started."""

import argparse
from typing import Any

from runtime.core.bundle import DRAFT, GRAPH_STEP, HOST_STEP, MAX_NUM_NODES, BundleManifest
from runtime.core.cli import num_nodes
from runtime.core.errors import RequestError
from runtime.core.options import choose_method


def check_options(manifest: BundleManifest, args: argparse.Namespace, rest: list[str]) -> None:
    """Raises RequestError for the first option that no model of this bundle could be loaded with.

    rest: tritonserver's options
    """
    plan, model = manifest.engine_plan, manifest.model
    if any(option.partition("=")[0] == "--device" for option in rest):
        where = "GPUs, which --gpus chooses" if plan else "the CPU"
        raise RequestError(
            f"--device: is no option of the server; this bundle's {manifest.target} runs on {where}"
        )
    drafts = choose_method(manifest, args.method, "the bundle", option="--method") == DRAFT
    step = args.step or (GRAPH_STEP if plan else HOST_STEP)
    in_verify_pass = manifest.drafter is not None and manifest.drafter.drafts_in_verify_pass
    if step == GRAPH_STEP and in_verify_pass and (drafts or not manifest.step_nodes):
        raise RequestError("--step: the bundle holds streams of the verify pass, whose steps run on the host")
    if step == GRAPH_STEP and not manifest.step_nodes:
        raise RequestError("--step: the bundle has no graphs of steps; export it again with --step-nodes")
    if step == HOST_STEP and plan:
        raise RequestError(f"--step: engines of the target {manifest.target} run graph steps only")
    if plan:
        _check_most("--max-num-seqs", args.max_num_seqs, plan.max_num_seqs, "the engines were compiled for")
        _check_most("--max-length", args.max_length, plan.max_context, "the engines were compiled for")
    _check_most("--max-length", args.max_length, model.max_position_embeddings, "the model takes")
    if drafts and step == GRAPH_STEP:
        _check_most("--num-nodes", args.num_nodes, manifest.step_nodes[-1], "the bundle has graphs for")
    _check_most("--num-nodes", args.num_nodes, MAX_NUM_NODES, "a step verifies")


def nodes_or_auto(text: str) -> int | str:
    """An argument type: as ``runtime.core.cli.num_nodes``, but ``auto`` stays as it is."""
    return num_nodes(text) or text


def _check_most(option: str, value: Any, most: int, why: str) -> None:
    if isinstance(value, int) and value > most:
        raise RequestError(f"{option}: {why} at most {most}, got {value}")
