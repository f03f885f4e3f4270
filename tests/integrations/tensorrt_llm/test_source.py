"""What the plug-in and its stand-ins assume of TensorRT-LLM, checked in a copy of its sources.

    TRTLLM_SOURCE=PATH python -m pytest tests/integrations/tensorrt_llm/test_source.py

PATH is a source tree or the parent of an installed package. The sources are parsed and not imported, because
they import libraries of a GPU. What is checked:

- the version, the functions of the registry, and the mode;
- every member of a draft model that the worker reads, and the arguments of its calls;
- that a step makes the context of its rows before it drafts;
- how the engine loads a draft model, and the processor of logits;
- the types and limits of the fields of trtllm.yaml, what the engine reads in a draft model's directory, and
  what Triton's model makes of its file;
- which target models hand over hidden states;
- the weights of heads in DSpark's form.

What the calls compute is not checked.
"""

import ast
import inspect
import os
import typing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pydantic
import pytest
from pydantic import BaseModel

from drafters.parallel import ParallelDrafter
from integrations.tensorrt_llm.model import TARGET_MODEL_TYPES
from integrations.tensorrt_llm.plugin import VERSIONS
from tests.integrations.sources import (
    calls,
    definition,
    fields,
    limits,
    members,
    parameters,
    parse_file,
)
from tests.integrations.tensorrt_llm import arguments
from tests.integrations.tensorrt_llm.fake_tensorrt_llm import LogitsProcessor
from tests.integrations.tensorrt_llm.test_model import load
from tests.integrations.transformers.models import make_head, make_model

SOURCE = os.environ.get("TRTLLM_SOURCE")
pytestmark = pytest.mark.skipif(SOURCE is None, reason="TRTLLM_SOURCE names TensorRT-LLM's sources")
FILES = {"llama": "modeling_llama", "qwen3": "modeling_qwen3", "qwen3_moe": "modeling_qwen3_moe"}
CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
MODELS = (
    arguments.TorchLlmArgs,
    arguments.KvCacheConfig,
    arguments.DFlashDecodingConfig,
    arguments.DSparkDecodingConfig,
)
ONE_ENGINE = "SpecDecOneEngineForCausalLM"


def parse(path: str) -> ast.Module:
    return parse_file(Path(str(SOURCE)) / "tensorrt_llm" / path)


@pytest.fixture(scope="module")
def worker() -> Any:
    return definition(parse("_torch/speculative/dflash.py"), "DFlashWorker")


@pytest.fixture(scope="module")
def model() -> Any:
    head = make_head(make_model("llama"), frame_start="fused")
    assert isinstance(head, ParallelDrafter)
    return load(head)


def test_the_version() -> None:
    (assigned,) = (n for n in ast.walk(parse("version.py")) if isinstance(n, ast.Assign))
    assert isinstance(assigned.value, ast.Constant)
    assert VERSIONS.problem(str(assigned.value.value)) is None


def test_the_registry() -> None:
    tree = parse("_torch/models/modeling_utils.py")
    for name in ("register_draft_model", "get_registered_draft_model_builder"):
        assert parameters(definition(tree, name)) == ["mode"]
    mode = definition(parse("_torch/speculative/interface.py"), "SpeculativeDecodingMode")
    names = {ast.unparse(t) for n in ast.walk(mode) if isinstance(n, ast.Assign) for t in n.targets}
    assert "DFLASH" in names


def test_the_members_that_the_worker_reads(worker: Any, model: Any) -> None:
    """Of what is read only for paged caches, the draft model has nothing."""
    read = set(members(worker, "draft_model"))
    assert {"dflash_forward", "precompute_context_kv", "lm_head", "draft_model_full", "fc"} <= read
    assert {name for name in read if not hasattr(model, name)} <= {"_get_attention_mask_args"}
    assert hasattr(model.draft_model_full.model, "embed_tokens")


@pytest.mark.parametrize(
    "name", ["dflash_forward", "precompute_context_kv", "project_target_hidden", "logits_processor"]
)
def test_the_worker_s_calls(name: str, worker: Any, model: Any) -> None:
    found = calls(worker, f"draft_model.{name}")
    assert found
    signature = inspect.signature(getattr(model, name))
    for call in found:
        named = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
        signature.bind(*call.args, **named)


def test_the_context_of_a_step_comes_before_its_drafts(worker: Any) -> None:
    """The last context that the draft model was given is that of the rows which the step verified."""
    context = "draft_model.precompute_context_kv"
    assert len(calls(definition(worker, "prepare_1st_drafter_inputs"), context)) == 1
    forward = definition(worker, "_forward_impl")
    (prompt,) = calls(forward, "self._store_prefill_context")
    (rows,) = calls(forward, "self.prepare_1st_drafter_inputs")
    (drafts,) = calls(forward, "draft_model.dflash_forward")
    assert prompt.lineno < rows.lineno < drafts.lineno
    assert not calls(forward, context)


def test_the_engine_loads_a_draft_model() -> None:
    tree = parse("_torch/models/modeling_speculative.py")
    (settings,) = calls(definition(tree, "external_drafter_config_kwargs"), "dict")
    assert "trust_remote_code=True" in {ast.unparse(keyword) for keyword in settings.keywords}
    engine = definition(tree, ONE_ENGINE)
    lines = {ast.unparse(node) for node in ast.walk(engine) if isinstance(node, (ast.Assign, ast.Expr))}
    assert "self.draft_model.logits_processor = self.logits_processor" in lines
    assert "self.draft_model.load_weights(weights=weights, weight_mapper=weight_mapper)" in lines
    assert "self.draft_model.load_weights_from_target_model(self)" in lines
    assert parameters(definition(tree, "get_draft_model")) == [
        "model_config",
        "draft_config",
        "lm_head",
        "model",
    ]


def test_the_processor_of_logits() -> None:
    forward = definition(
        definition(parse("_torch/modules/logits_processor.py"), "LogitsProcessor"), "forward"
    )
    assert parameters(forward) == list(inspect.signature(LogitsProcessor.forward).parameters)


@pytest.mark.parametrize("model", MODELS)
def test_the_fields_of_trtllm_yaml(model: type[BaseModel]) -> None:
    """Their types and limits are those that what is written was validated against."""
    tree = parse("llmapi/llm_args.py")
    written, limited = fields(tree, model.__name__), limits(tree, model.__name__)
    names = {**vars(typing), **vars(pydantic), **vars(arguments), "List": list}
    for name, field in model.model_fields.items():
        found = pydantic.create_model("Found", value=(eval(written[name], names), ...)).model_fields["value"]
        assert found.annotation == field.annotation, name
        assert limited[name] == {key: value for part in field.metadata for key, value in asdict(part).items()}


def test_the_decoding_type_chooses_the_class() -> None:
    assigned = [
        node
        for node in ast.walk(parse("llmapi/llm_args.py"))
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "SpeculativeConfig"
    ]
    text = ast.unparse(assigned[0])
    for part in ("DFlashDecodingConfig", "DSparkDecodingConfig", "Field(discriminator='decoding_type')"):
        assert part in text


def test_what_the_engine_reads_in_the_draft_model_s_directory() -> None:
    check = definition(parse("llmapi/llm_args.py"), "validate_speculative_config")
    constants = {node.value for node in ast.walk(check) if isinstance(node, ast.Constant)}
    assert {"config.json", "dflash_config", "target_layer_ids", "mask_token_id", "block_size"} <= constants
    assert "spec_cfg.block_size != spec_cfg.max_draft_len" in ast.unparse(check)


def test_other_fields_are_forbidden() -> None:
    assert "'forbid'" in ast.unparse(definition(parse("llmapi/utils.py"), "StrictBaseModel"))
    for name in ("KvCacheConfig", "DecodingBaseConfig", "BaseLlmArgs"):
        bases = definition(parse("llmapi/llm_args.py"), name).bases
        assert "StrictBaseModel" in {ast.unparse(base) for base in bases}


def test_triton_s_settings() -> None:
    """The model of Triton's backend is in the repository and not in a package."""
    path = Path(str(SOURCE)) / "triton_backend/all_models/llmapi/tensorrt_llm/1/model.py"
    if not path.exists():
        pytest.skip("Triton's model is not among these sources")
    text = ast.unparse(parse_file(path))
    assert "bool(triton_config['decoupled'])" in text
    assert "int(triton_config['max_batch_size'])" in text
    assert "exclude_keys=['triton_config']" in text


def test_dspark_s_form() -> None:
    """The decoding type of heads in this form takes any architecture whose layers are known by their type."""
    dspark = parse("_torch/models/modeling_dspark.py")
    names = {node.value for node in ast.walk(dspark) if isinstance(node, ast.Constant)}
    assert {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"} <= names
    standalone = definition(dspark, "GQADSparkForCausalLM")
    assert [ast.unparse(base) for base in standalone.bases] == ["DFlashForCausalLM"]
    dflash = definition(parse("_torch/models/modeling_dflash.py"), "DFlashForCausalLM")
    names = {node.value for node in ast.walk(dflash) if isinstance(node, ast.Constant)}
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "ForCausalLM"} <= names


@pytest.mark.parametrize("model_type", TARGET_MODEL_TYPES)
def test_the_target_models(model_type: str) -> None:
    """They derive from the class with one engine for both models, and their layers hand over their output."""
    tree = parse(f"_torch/models/{FILES[model_type]}.py")
    bases = [ast.unparse(base) for base in definition(tree, CLASSES[model_type]).bases]
    assert any(base.startswith(ONE_ENGINE) for base in bases)
    captured = "spec_metadata.maybe_capture_hidden_states"
    assert calls(tree, captured)
    for call in calls(tree, captured):
        assert ast.unparse(call.args[0]) == "self.layer_idx"


def test_a_target_model_without_hidden_states() -> None:
    bases = definition(parse("_torch/models/modeling_qwen.py"), "Qwen2ForCausalLM").bases
    assert not any(ONE_ENGINE in ast.unparse(base) for base in bases)
