"""What the plug-in and its stand-ins assume of SGLang, checked in a copy of its sources.

    SGLANG_SOURCE=PATH python -m pytest tests/integrations/sglang/test_source.py

PATH is the parent of the package: an unpacked wheel, or the site-packages of an environment. The sources are
parsed and not imported, because they import libraries of a GPU. What is checked:

- every function that has a hook, with the arguments that the hook reads;
- every member of a draft model that the worker reads, and the arguments of its calls;
- the registries of hooks and of models, and the entry point;
- the projections, the attention and what a pass returns;
- the kernels, the attention and the order of the start that trees need;
- that the final norm of a decoder takes a callback, and how a target model is told which layers to hand over;
- the server's arguments that the export writes.

What the calls compute is not checked.
"""

import ast
import inspect
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from drafters.parallel import ParallelDrafter
from integrations.sglang import hooks
from integrations.sglang.plugin import VERSIONS
from integrations.sglang.settings import TREE_BACKENDS
from tests.integrations.sglang import fake_sglang, tree_engine
from tests.integrations.sglang.test_model import load
from tests.integrations.sources import calls, definition, fields, members, parameters, parse_file
from tests.integrations.transformers.models import make_head, make_model

SOURCE = os.environ.get("SGLANG_SOURCE")
ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(SOURCE is None, reason="SGLANG_SOURCE names SGLang's sources")
HOOKED = {
    f"{hooks.WORKER}.init_cuda_graphs": ["self"],
    f"{hooks.WORKER}._maybe_build_draft_sampler": ["self"],
    f"{hooks.WORKER}._greedy_sample_from_vocab_parallel_head": ["self", "hidden_states"],
    f"{hooks.WORKER}.forward_batch_generation": ["self", "batch"],
    f"{hooks.WORKER}._append_target_hidden_to_draft_kv_by_loc": [
        "self",
        "target_hidden",
        "commit_lens",
        "extend_lens",
    ],
    f"{hooks.WORKER}.init_attention_backends": ["self"],
    f"{hooks.WORKER}._can_skip_verify_logits": ["self", "batch", "sampling_info"],
    f"{hooks.WORKER}._accept_block": ["self", "next_token_logits"],
    f"{hooks.VERIFY_INPUT}.prepare_for_verify": ["self", "batch", "target_worker"],
    f"{hooks.GRAMMAR_TREE}.from_linear_chain": ["cls", "verify_ids_2d"],
    f"{hooks.GRAPH_RUNNER}.get_spec_info": ["self", "num_tokens"],
    hooks.FINAL_NORM: ["capture"],
    **{f"{model}.set_dflash_layers_to_capture": ["self", "layer_ids"] for model in hooks.MODELS},
    **{f"{decoder}.forward": ["self"] for decoder in hooks.DECODERS},
}


def parse(module: str) -> ast.Module:
    path = Path(str(SOURCE)).joinpath(*module.split("."))
    return parse_file(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))


def function(target: str) -> ast.FunctionDef:
    """The definition of a function or of a class's method, by its full name."""
    owner, _, name = target.rpartition(".")
    if not Path(str(SOURCE)).joinpath(*owner.split(".")).with_suffix(".py").exists():
        module, _, owner_name = owner.rpartition(".")
        tree: ast.AST = definition(parse(module), owner_name)
    else:
        tree = parse(owner)
    found: ast.FunctionDef = definition(tree, name)
    return found


def names(function: ast.FunctionDef) -> list[str]:
    return [*parameters(function), *(argument.arg for argument in function.args.kwonlyargs)]


@pytest.fixture(scope="module")
def worker() -> Any:
    return definition(parse("sglang.srt.speculative.dflash_worker_v2"), "DFlashWorkerV2")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    head = make_head(make_model("llama"), frame_start="fused")
    assert isinstance(head, ParallelDrafter)
    return load(head, monkeypatch)


@pytest.mark.parametrize("target", HOOKED)
def test_a_function_with_a_hook(target: str) -> None:
    found = names(function(target))
    assert [name for name in found if name in HOOKED[target]] == HOOKED[target]


def test_every_hook_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fake_sglang.install(monkeypatch)
    from integrations.sglang.plugin import register

    register()
    assert set(found.hooks) == set(HOOKED)


def test_the_worker_names_the_arguments_that_the_hooks_read(worker: Any) -> None:
    appended = calls(worker, "self._append_target_hidden_to_draft_kv_by_loc")
    keywords = [{keyword.arg for keyword in call.keywords} for call in appended]
    assert all("target_hidden" in found for found in keywords)
    assert sum("extend_lens" in found for found in keywords) == 1
    assert sum("commit_lens" in found for found in keywords) == 1
    for call in calls(worker, "self._greedy_sample_from_vocab_parallel_head"):
        assert "hidden_states" in {keyword.arg for keyword in call.keywords}


def test_the_members_that_the_worker_reads(worker: Any, model: Any) -> None:
    """What is read of heads of other kinds, only such heads have."""
    others = {"prefix_gru", "embed_proj", "shift_label", "lm_head"}
    read = set(members(worker, "self.draft_model"))
    assert {"layers", "set_block_size", "project_target_hidden", "prepare_context_hidden_for_kv"} <= read
    assert {name for name in read if not hasattr(model, name)} <= others
    attention = set(members(worker, "attn")) - {"qkv_proj", "rotary_emb", "forward_prepare_npu", "v_scale"}
    assert {"kv_proj_only", "apply_k_norm", "apply_k_rope", "num_kv_heads", "head_dim"} <= attention
    layer = model.layers[0].self_attn
    # The scales of keys and values are the attention's own.
    assert {name for name in attention if not hasattr(layer, name)} <= {"k_scale"}


@pytest.mark.parametrize("name", ["project_target_hidden", "prepare_context_hidden_for_kv", "set_block_size"])
def test_the_worker_s_calls(name: str, worker: Any, model: Any) -> None:
    found = calls(worker, f"self.draft_model.{name}")
    assert found
    for call in found:
        inspect.signature(getattr(model, name)).bind(*call.args)


def test_a_pass(model: Any) -> None:
    """The engine's own draft model has the same arguments, and returns the same."""
    own = definition(parse("sglang.srt.models.dflash"), "DFlashDraftModel")
    forward = inspect.signature(model.forward)
    assert names(definition(own, "forward")) == ["self", *forward.parameters]
    output = fields(parse("sglang.srt.layers.logits_processor"), "LogitsProcessorOutput")
    assert {"next_token_logits", "hidden_states"} <= set(output)


def test_the_layers() -> None:
    linear = parse("sglang.srt.layers.linear")
    for name, first in (
        ("QKVParallelLinear", ["hidden_size", "head_size", "total_num_heads", "total_num_kv_heads", "bias"]),
        ("MergedColumnParallelLinear", ["input_size", "output_sizes", "bias"]),
        ("RowParallelLinear", ["input_size", "output_size", "bias"]),
    ):
        found = names(definition(definition(linear, name), "__init__"))
        assert found[1 : len(first) + 1] == first
        assert "prefix" in found
    attention = parse("sglang.srt.layers.radix_attention")
    found = names(definition(definition(attention, "RadixAttention"), "__init__"))
    own = list(inspect.signature(fake_sglang.RadixAttention.__init__).parameters)
    assert found[:6] == own[:6]
    assert "attn_type" in found
    kinds = definition(attention, "AttentionType")
    assert "ENCODER_ONLY" in {ast.unparse(n.targets[0]) for n in kinds.body if isinstance(n, ast.Assign)}
    for module, name in (
        ("sglang.srt.distributed.communication_op", "tensor_model_parallel_all_gather"),
        ("sglang.srt.model_loader.weight_utils", "default_weight_loader"),
        ("sglang.srt.runtime_context", "get_parallel"),
        ("sglang.srt.runtime_context", "get_exec"),
    ):
        assert definition(parse(module), name)


def test_the_registries() -> None:
    hook_registry = parse("sglang.srt.plugins.hook_registry")
    assert names(definition(definition(hook_registry, "HookRegistry"), "register"))[1:4] == [
        "target",
        "hook",
        "hook_type",
    ]
    kinds = definition(hook_registry, "HookType")
    assigned = {ast.unparse(n.targets[0]) for n in kinds.body if isinstance(n, ast.Assign)}
    assert {"BEFORE", "AROUND"} <= assigned
    models = parse("sglang.srt.models.registry")
    assert parameters(definition(models, "register"))[:2] == ["self", "package_name"]
    assert definition(models, "get_supported_archs")
    plugins = {ast.unparse(n) for n in ast.walk(parse("sglang.srt.plugins")) if isinstance(n, ast.Assign)}
    assert "GENERAL_PLUGINS_GROUP = 'sglang.srt.plugins'" in plugins
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["sglang.srt.plugins"] == {
        "ctc_speculator": "integrations.sglang.plugin:register"
    }


def test_the_last_layer() -> None:
    """The final norm hands the updated residual to a callback, and models capture before the next layer."""
    norm = function(hooks.FINAL_NORM)
    assert any(ast.unparse(call) == "capture(residual)" for call in calls(norm, "capture"))
    for decoder, model in zip(hooks.DECODERS, hooks.MODELS, strict=True):
        assert calls(function(f"{decoder}.forward"), "residual_batch.final_norm")
        told = ast.unparse(function(f"{model}.set_dflash_layers_to_capture"))
        assert "self.model.layers_to_capture = [val + 1 for val in layer_ids]" in told


def test_trees() -> None:
    """What the hooks for trees ask beside the code that ``test_trees`` runs."""
    reconstruct = parse("sglang.kernels.ops.speculative.reconstruct_tree")
    own = inspect.signature(tree_engine.reconstruct_indices_from_tree_mask)
    assert parameters(definition(reconstruct, "reconstruct_indices_from_tree_mask_func")) == [*own.parameters]
    own = inspect.signature(tree_engine.verify_tree_greedy)
    verify = parse("sglang.kernels.ops.speculative.spec_tree")
    assert parameters(definition(verify, "verify_tree_greedy_func")) == [*own.parameters]
    policy = definition(parse("sglang.srt.speculative.dflash_utils"), "resolve_dflash_verify_mask_policy")
    assert names(policy) == ["attn_backend"]
    for module, backend in zip(("flashinfer", "triton"), TREE_BACKENDS, strict=True):
        assert TREE_BACKENDS[backend] == module
        assert definition(parse(f"sglang.srt.layers.attention.{module}_backend"), backend)
    runner = ast.unparse(function(f"{hooks.GRAPH_RUNNER}.get_spec_info"))
    assert "custom_mask=self.buffers.custom_mask" in runner
    assert "draft_token_num=self.captured_req_width" in runner
    assert definition(parse("sglang.srt.managers.tp_worker"), "get_memory_pool")
    # The target model's passes are captured after the worker's attention is there.
    started = ast.unparse(definition(parse("sglang.srt.managers.scheduler"), "init_model_worker"))
    assert started.index("self.init_all_attention_backends()") < started.index("self.init_all_cuda_graphs()")


def test_the_server_s_arguments() -> None:
    tree = parse("sglang.srt.arg_groups.field_order")
    found = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert {
        "model_path",
        "speculative_algorithm",
        "speculative_draft_model_path",
        "speculative_num_draft_tokens",
        "attention_backend",
    } <= found


def test_the_version() -> None:
    """An unpacked wheel has its version beside it, in the name of a directory."""
    found = [path.name.split("-")[1] for path in Path(str(SOURCE)).glob("sglang-*.dist-info")]
    assert len(found) == 1
    assert VERSIONS.problem(found[0]) is None
