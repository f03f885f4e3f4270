"""SGLang's own worker, inputs and hooks on a CPU, where SGLANG_SOURCE names its sources.

Modules in REAL are executed as they are. Everything around them that needs a GPU, a server's settings or the
rest of the engine is a stand-in: those of ``fake_sglang``, what VALUES has, and for every other name an
object that accepts any use. The worker's constructor is left out, because it builds a model runner.
"""

import contextlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.sglang import fake_sglang, tree_engine

SOURCE = os.environ.get("SGLANG_SOURCE")
SPECULATIVE = "sglang.srt.speculative"
REAL = {
    "sglang.srt.plugins.hook_registry",
    *(
        f"{SPECULATIVE}.{name}"
        for name in (
            "base_spec_worker",
            "dflash_info",
            "dflash_info_v2",
            "dflash_worker_v2",
            "draft_worker_common",
            "eagle_utils",
            "ngram_info",
            "spec_info",
            "spec_registry",
            "spec_utils",
        )
    ),
}


class Anything:
    """Stands for whatever a module imports and a step on a CPU does not need; it is false."""

    def __init__(self, name: str):
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> "Anything":
        return self

    def __getattr__(self, name: str) -> "Anything":
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(f"{self.__name__}.{name}")

    def __bool__(self) -> bool:
        return False


class Stub(ModuleType):
    """A module in which every name is found."""

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules in REAL in the sources, and a stub for each of the others."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # The hooks ask for a class as if it were a module.
        if name.partition(".")[0] not in ("sglang", "sgl_kernel") or name.rpartition(".")[2][0].isupper():
            return None
        if name in REAL:
            file = Path(str(SOURCE)).joinpath(*name.split(".")).with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file)
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(VALUES.get(module.__name__, {}))


class ForwardBatch(SimpleNamespace):
    """As SGLang's class of this name."""

    @classmethod
    def init_new(cls, batch: Any, runner: Any, *, capture_hidden_mode: str, **kwargs: Any) -> "ForwardBatch":
        assert capture_hidden_mode == "full"
        return cls(**vars(batch), req_to_token=runner.req_to_token)


def positions_of(backend: str, starts: Tensor, counts: Tensor, total: int) -> tuple[Tensor, None]:
    found = [torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    return torch.cat(found), None


def extend_cache_locs(
    *, req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, end_offset: Tensor, **kwargs: Any
) -> Tensor:
    rows = zip(req_to_token[req_pool_indices], start_offset, end_offset, strict=True)
    return torch.cat([row[start:end] for row, start, end in rows])


def no(*args: Any) -> bool:
    return False


GRAPHS = SimpleNamespace(bs=[1, 8], backend="full")
EXECUTION = SimpleNamespace(
    graph=SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=GRAPHS)),
    mamba=SimpleNamespace(enable_mamba_extra_buffer=False),
)
VALUES: dict[str, dict[str, Any]] = {
    "sglang.srt.utils": {
        **dict.fromkeys(("is_cpu", "is_cuda", "is_hip", "is_musa", "is_npu", "is_xpu"), no),
        "async_h2d": lambda values, *, dtype, device: torch.tensor(values, dtype=dtype),
    },
    "sglang.srt.environ": {
        "envs": SimpleNamespace(
            **{
                name: SimpleNamespace(get=lambda: -1)
                for name in (
                    "SGLANG_SIMULATE_ACC_LEN",
                    "SGLANG_SIMULATE_ACC_METHOD",
                    "SGLANG_SIMULATE_ACC_TOKEN_MODE",
                )
            }
        )
    },
    "sglang.srt.lora.layers": {"unwrap_lora_layer": lambda layer: layer},
    "sglang.srt.mem_cache.memory_pool": {
        "KVWriteLoc": lambda loc, physical: SimpleNamespace(loc=loc),
    },
    "sglang.srt.runtime_context": {
        "get_exec": lambda: EXECUTION,
        "get_spec": lambda: SimpleNamespace(speculative_use_rejection_sampling=False),
    },
    "sglang.srt.model_executor.cuda_graph_config": {"Backend": SimpleNamespace(DISABLED="disabled")},
    "sglang.srt.managers.scheduler": {"GenerationBatchResult": SimpleNamespace},
    "sglang.srt.managers.utils": {"_async_d2h": lambda tensor: tensor},
    "sglang.srt.layers.dp_attention": {"is_dp_attention_enabled": no},
    "sglang.srt.model_executor.forward_batch_info": {
        "CaptureHiddenMode": SimpleNamespace(FULL="full", NULL="null"),
        "ForwardBatch": ForwardBatch,
        "ForwardMode": tree_engine.ForwardMode,
        "compute_position": positions_of,
        "enable_num_token_non_padded": no,
    },
    "sglang.kernels.ops.speculative.cache_locs": {
        "assign_extend_cache_locs_func": extend_cache_locs,
        "fill_front_out_cache_loc_func": tree_engine.fill_front_out_cache_loc,
    },
    "sglang.kernels.ops.speculative.eagle": {
        "fill_accept_out_cache_loc_func": tree_engine.fill_accept_out_cache_loc
    },
    "sglang.kernels.ops.speculative.reconstruct_tree": {
        "reconstruct_indices_from_tree_mask_func": tree_engine.reconstruct_indices_from_tree_mask
    },
    "sglang.kernels.ops.speculative.spec_tree": {"verify_tree_greedy_func": tree_engine.verify_tree_greedy},
}


@contextlib.contextmanager
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """What the plug-in registers goes to ``models``; ``make_worker`` and ``draft_input`` are SGLang's."""
    found = fake_sglang.install(monkeypatch)
    for name, module in [*sys.modules.items()]:
        if name in REAL:
            monkeypatch.delitem(sys.modules, name)
        elif name.partition(".")[0] == "sglang":
            module.__class__ = Stub
            vars(module).update(VALUES.get(name, {}), __path__=[])
    # Nothing is compiled; a decorator at the top of a module asks for it.
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: lambda function: function)
    # A CPU has no streams.
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    finder = Finder()
    sys.meta_path.insert(0, finder)
    try:
        worker = importlib.import_module(f"{SPECULATIVE}.dflash_worker_v2")
        common = importlib.import_module(f"{SPECULATIVE}.draft_worker_common")
        hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
        vars(worker).update(
            draft_pp_context=contextlib.nullcontext,
            draft_tp_context=lambda layout: contextlib.nullcontext(),
        )

        def make_worker(draft_model: Any, target: Any, block_size: int, *, uses_graphs: bool) -> Any:
            GRAPHS.backend = "full" if uses_graphs else "disabled"
            made = worker.DFlashWorkerV2.__new__(worker.DFlashWorkerV2)
            vars(made).update(
                _target_worker=target,
                model_runner=target,
                draft_model=draft_model,
                draft_model_runner=tree_engine.DraftRunner(draft_model, target),
                _draft_worker=Anything("draft worker"),
                selector=None,
                lilicorr=None,
                block_size=block_size,
                page_size=1,
                device="cpu",
                draft_parallel_layout=None,
                use_compact_draft_cache=False,
                _is_domino=False,
                _mask_token_id=0,
                _noise_embed_scale=1.0,
                _full_embed_gpu=None,
                _block_pos_offsets=common.build_block_pos_offsets(length=block_size, device="cpu"),
                _draft_block_spec_info=common.make_draft_block_spec_info(
                    draft_token_num=block_size, device="cpu"
                ),
                _draft_block_ids_buf=None,
                _draft_sampler=None,
                _selector_sample=None,
                _target_logits_processor=None,
                _target_tp_rank=0,
                _tp_sync=Anything("sync"),
                _use_fused_kv_materialize=False,
                _fused_kv_helper=None,
                _use_triton_prepare_block=False,
                _warned_sampling_fallback=True,
            )
            draft_model.set_block_size(block_size)
            return made

        yield SimpleNamespace(
            models=found.models,
            make_worker=make_worker,
            draft_input=common.make_draft_input_v2,
            apply_hooks=hooks.HookRegistry.apply_hooks,
        )
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
            del sys.modules[name]
