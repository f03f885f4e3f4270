"""The table of engines: which kinds of step a target has, and how a bundle is refused that none can run."""

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from export.targets import TARGETS
from runtime.core.bundle import Bundle
from runtime.core.errors import BundleError
from runtime.decoder import SpeculativeDecoder
from runtime.load.device import load_graph_step
from runtime.load.engines import ENGINES, check_files, device_opener, host_engine
from runtime.load.host import load_target_model
from tests.engine_bundles import as_torch_bundle


def of_target(source: Path, target: str) -> Bundle:
    bundle = Bundle.load(source, verify=False)
    return Bundle(bundle.path, replace(bundle.manifest, target=target))


def test_every_export_target_has_an_engine() -> None:
    assert set(TARGETS) == set(ENGINES)
    for record in ENGINES.values():
        assert record.suffix.startswith(".")
        assert record.on_host or record.on_device


@pytest.mark.parametrize("target", ENGINES)
def test_what_a_record_holds_is_found(tiny_step_bundle: Path, target: str) -> None:
    bundle = of_target(tiny_step_bundle, target)
    assert device_opener(bundle) is ENGINES[target].on_device
    if ENGINES[target].on_host:
        assert host_engine(bundle) is ENGINES[target].on_host
    else:
        with pytest.raises(
            BundleError, match=f"^target: this runtime runs onnxruntime, torch on the host, got '{target}'"
        ):
            host_engine(bundle)


def test_a_target_of_another_runtime_is_refused(tiny_step_bundle: Path) -> None:
    bundle = of_target(tiny_step_bundle, "abacus")
    with pytest.raises(
        BundleError, match=r"^target: this runtime runs onnxruntime, torch on the host, got 'abacus'"
    ):
        load_target_model(bundle, max_nodes=4)
    known = "onnxruntime, torch, tensorrt-rtx, tensorrt"
    with pytest.raises(BundleError, match=f"^target: this runtime runs {known} on a device, got 'abacus'"):
        load_graph_step(bundle, "plain", max_length=8)


def test_the_host_runs_the_files_of_the_target_torch(tiny_bundle_dir: Path, tmp_path: Path) -> None:
    """As a reference: there its passes read the whole caches."""
    bundle = as_torch_bundle(tiny_bundle_dir, tmp_path / "bundle")
    found = []
    for path in (tiny_bundle_dir, bundle):
        decoder = SpeculativeDecoder.from_bundle(path, step="host", num_threads=1)
        chunks = decoder.stream([5, 6, 7], max_new_tokens=12, stop_token_ids=())
        found.append([token for chunk in chunks for token in chunk.token_ids])
    assert found[0] == found[1]


def test_the_host_refuses_half_precision(tiny_bundle_dir: Path) -> None:
    bundle = of_target(tiny_bundle_dir, "torch")
    graph = bundle.manifest.graphs["backbone"]
    in_half = replace(
        graph,
        outputs=tuple(
            replace(tensor, dtype="float16") if tensor.dtype == "float32" else tensor
            for tensor in graph.outputs
        ),
    )
    manifest = replace(bundle.manifest, graphs={**bundle.manifest.graphs, "backbone": in_half})
    with pytest.raises(BundleError, match=r"^backbone\..*onnx: .* expected float32, .* got float16"):
        load_target_model(Bundle(bundle.path, manifest), max_nodes=4)


def test_a_graph_without_a_file_is_named(tiny_step_bundle: Path) -> None:
    check_files(of_target(tiny_step_bundle, "onnxruntime"), ["backbone"])
    bundle = of_target(tiny_step_bundle, "tensorrt")
    with pytest.raises(BundleError, match=rf"^{re.escape(str(bundle.path))}: backbone.engine is missing$"):
        check_files(bundle, ["backbone"])
