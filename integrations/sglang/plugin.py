"""What SGLang calls when it starts: the entry point ``sglang.srt.plugins``."""

import logging

from integrations.draft_directory import ARCHITECTURE, Versions
from integrations.sglang import hooks

# The version whose DFLASH worker the hooks fit.
VERSIONS = Versions("SGLang", ("sglang",), ("0.5.23",), "read, never run")


def register() -> None:
    """Make the draft heads known to SGLang; of another version of SGLang, say so in one line instead.

    SGLang calls this in every one of its processes, before models are built.
    """
    problem = VERSIONS.problem(VERSIONS.installed())
    if problem:
        logging.getLogger("sglang.srt.ctc_speculator").error(problem)
        return
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register("integrations.sglang")
    HookRegistry.register(f"{hooks.WORKER}.init_attention_backends", hooks.allow_trees, HookType.BEFORE)
    HookRegistry.register(f"{hooks.WORKER}.init_cuda_graphs", hooks.share_target, HookType.BEFORE)
    for name, hook in (
        (f"{hooks.WORKER}._maybe_build_draft_sampler", hooks.build_sampler),
        (f"{hooks.WORKER}._greedy_sample_from_vocab_parallel_head", hooks.sample),
        (f"{hooks.WORKER}.forward_batch_generation", hooks.note_requests),
        (f"{hooks.WORKER}._append_target_hidden_to_draft_kv_by_loc", hooks.keep_last),
        (f"{hooks.WORKER}._can_skip_verify_logits", hooks.need_logits),
        (f"{hooks.WORKER}._accept_block", hooks.accept_path),
        (f"{hooks.VERIFY_INPUT}.prepare_for_verify", hooks.verify_tree),
        (f"{hooks.GRAMMAR_TREE}.from_linear_chain", hooks.link_grammar),
        (f"{hooks.GRAPH_RUNNER}.get_spec_info", hooks.capture_tree),
        *((f"{model}.set_dflash_layers_to_capture", hooks.want_last) for model in hooks.MODELS),
        *((f"{decoder}.forward", hooks.hand_over_last) for decoder in hooks.DECODERS),
        (hooks.FINAL_NORM, hooks.capture_last),
    ):
        HookRegistry.register(name, hook, HookType.AROUND)
