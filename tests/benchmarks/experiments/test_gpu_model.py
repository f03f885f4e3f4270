"""The paper model of a step on a GPU, against cases computed by hand."""

import pytest
import torch

from benchmarks.experiments import gpu_model
from benchmarks.experiments.gpu_model import FORMATS, GPUS, Kernels, Settings, Work
from benchmarks.experiments.step_table import count_layers
from drafters.build import build_drafter
from drafters.config import DrafterConfig

H100 = GPUS[0]
FP16, INT4 = FORMATS


def test_count_layers_is_the_docstring_example() -> None:
    counts = count_layers({"CONSTANT": 3, "CAST": 2, "TOPK": 1})
    assert counts == {"layers": 6, "working": 3, "not_elementwise": 1}


def test_weights_of_the_target_model() -> None:
    assert gpu_model.LAYER_WEIGHTS == 67_108_864 + 135_266_304
    assert gpu_model.TARGET_WEIGHTS == 32 * 202_375_168 + 131_072_000


def test_weights_of_the_head_are_those_of_the_module() -> None:
    config = DrafterConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        target_layer_ids=(1, 15, 29),
        base_num_layers=32,
        num_frames=12,
        num_layers=1,
        transition="mlp",
        frame_start="fused",
    )
    with torch.device("meta"):
        head = build_drafter(config)
    # The first two are no products; the others are tabulated when the head is exported.
    not_read = ("frame_queries", "blank.weight", "transition.previous", "transition.label", "transition.mix")
    matrices = {
        name: parameter.numel()
        for name, parameter in head.named_parameters()
        if parameter.ndim == 2 and not name.startswith(not_read)
    }
    expected = gpu_model.HEAD_WEIGHTS - gpu_model.LM_HEAD + gpu_model.START_WEIGHTS
    assert sum(matrices.values()) == expected


def test_attention_reads_its_positions_and_may_copy_them() -> None:
    cache = 2 * (2 * 10 * 4096 * 2)  # keys and values of two sequences
    assert gpu_model.attention(1, 10, 2, copies=False) == (cache + 20, 4 * 2 * 10 * 4096)
    assert gpu_model.attention(3, 10, 2, copies=True) == (3 * cache + 60, 4 * 2 * 3 * 10 * 4096)


def test_a_step_reads_the_caches_up_to_the_length_in_use() -> None:
    assert [gpu_model.positions_read(text, 8, 4096) for text in (1, 503, 504, 3000)] == [512, 512, 1024, 4096]
    whole, part = (gpu_model.stages(FP16, 8, 2, Settings(4096, text=text)) for text in (None, 900))
    positions = 4096 + 9 - 1024
    moved = positions * 32 * 2 * (3 * 2 * 4096 * 2 + 9)
    assert whole["verify"].moved - part["verify"].moved == moved
    assert whole["verify"].flops - part["verify"].flops == 32 * 4 * 2 * 9 * positions * 4096
    # Nothing is copied of a whole cache for one row, nor by PyTorch.
    plain = [
        gpu_model.stages(FP16, 0, 1, Settings(1024, text=text, engine=engine))["verify"].moved
        for text, engine in ((None, "tensorrt"), (None, "torch"), (900, "torch"), (900, "tensorrt"))
    ]
    assert plain[0] == plain[1]
    assert plain[3] - plain[2] == 32 * 2 * 2 * 1024 * 4096 * 2


def test_a_graph_takes_the_longer_of_moving_and_computing() -> None:
    kernels = Kernels(100, 300)
    assert Work(3.35e9, 0.5 * 989.4e9, kernels).milliseconds(H100) == pytest.approx((1.2, 1.6))
    assert Work(3.35e9, 2 * 989.4e9, kernels).milliseconds(H100) == pytest.approx((2.2, 2.6))


def test_plain_decoding_by_hand() -> None:
    weights = 2 * 6_607_077_376
    caches = 32 * (2 * 1025 * 4096 * 2 + 1025)
    activations = 32 * (8 * 4096 + 3 * (4096 + 11008)) * 2
    logits = 2 * 32000 * 4
    moving = 1e3 * (weights + caches + activations + logits) / 3.35e12
    # In every layer seven products, two norms, two rotations, attention, keys and values.
    kernels = 32 * 14 + 8 + 1 + 8
    works = gpu_model.stages(FP16, 0, 1, Settings())
    assert gpu_model.step_milliseconds(H100, works)[0] == pytest.approx(moving + 0.002 * kernels + 0.1)


def test_int4_moves_nine_thirty_seconds_of_the_weights_of_fp16() -> None:
    half, quarter = (gpu_model.verify(weights, 8, 1, 1033, copies=True).moved for weights in FORMATS)
    assert half - quarter == pytest.approx((2 - 9 / 16) * gpu_model.TARGET_WEIGHTS)
    assert INT4.bytes_per_weight / FP16.bytes_per_weight == 9 / 32


def test_many_rows_are_computed_for_longer_than_they_are_moved() -> None:
    work = gpu_model.verify(FP16, 64, 16, 1089, copies=True)
    assert work.flops == 2 * 1040 * 6_607_077_376 + 32 * 4 * 16 * 65 * 1089 * 4096
    busy = 1e3 * work.flops / 165.2e12
    assert work.milliseconds(GPUS[2])[0] == pytest.approx(busy + 0.002 * (32 * 14 + 8))


def test_the_cycles_of_our_search_by_hand() -> None:
    """With 8 nodes 25 prefixes are kept, in one tile. The first frame has the root, the second 17 of them."""
    assert gpu_model.sort_cycles(17) == 15 * 100
    assert gpu_model.sort_cycles(2048) == pytest.approx(66 * 1024 * 14 / 128)

    def frame(active: int) -> float:
        return 500 + active * 128 * (17 * 4 + 40) / 128 + 10 * 100 + 2 * 17 * 120

    sorts = [15 * 100, 45 * 100]  # of 32 and 512 keys
    first = frame(1) + frame(17) + sum(sorts)
    rest = [10 * (frame(25) + gpu_model.sort_cycles(count)) for count in (50, 425)]
    expected = [first + each + 10 * 100 for each in rest]
    assert gpu_model.search_cycles(8) == pytest.approx(tuple(expected))


def test_our_kernels_take_the_place_of_graphs() -> None:
    """One kernel for each stage, and the same weights."""
    graphs, own = (gpu_model.stages(FP16, 8, 2, Settings(own_kernels=kernels)) for kernels in (False, True))
    assert own.keys() == graphs.keys()
    for stage in ("search", "accept", "commit"):
        assert own[stage].kernels == Kernels(1, 1)
    assert own["draft"].kernels == gpu_model.HEAD + Kernels(1, 1)
    assert own["verify"] == graphs["verify"]
    assert own["commit"].moved == graphs["commit"].moved
    plain = gpu_model.stages(FP16, 0, 2, Settings(own_kernels=True))
    assert plain["commit"].kernels == plain["draft"].kernels == Kernels(0, 0)


@pytest.mark.parametrize(
    ("flags", "columns"),
    [
        ([], 8),
        (["--prompts", "gsm8k"], 8),
        (["--stages"], 8),
        (["--kernels"], 8),
        (["--kernels", "--stages", "--nodes", "32", "--sequences", "16"], 8),
        (["--over-plain", "--text", "900", "--engine", "torch", "--head-weights", "int4"], 7),
    ],
)
def test_command(flags: list[str], columns: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_model.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.count("|") == columns + 1 for line in lines)
    assert len(lines) == 2 + (6 if "--stages" in flags else 12)
    assert "RTX 4090" in lines[-1]


def test_command_refuses_a_context_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_model.main(["--context", "0"]) == 2
    assert "--context" in capsys.readouterr().err
