"""The code for GPUs, unchanged, on a stand-in whose device memory is the host's."""

import itertools
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.core.bundle import PLAIN, Bundle
from runtime.core.errors import BundleError, DeviceError, DeviceMemoryError, RequestError
from runtime.decode.budget import AdaptiveBudget, FixedBudget
from runtime.decode.sampling_params import SamplingParams
from runtime.decode.step_costs import StepCosts
from runtime.decoder import SpeculativeDecoder
from runtime.device import tensorrt
from runtime.device.device import write_array
from runtime.device.kernel_file import DIRECTORY_VARIABLE
from runtime.device.step import GraphStep
from runtime.device.tensorrt import TensorRTEngine
from runtime.engines.recorder import StageRecorder, recording
from runtime.serve.scheduler import Scheduler
from tests.batch_runs import GenerateArguments, decode_together, mixed_requests, steps_together
from tests.conftest import PROMPTS
from tests.device_of_memory import FakeContext, FakeCudart, FakeEngine
from tests.engine_bundles import as_engine_bundle, device_of_memory

PENALISED = SamplingParams(temperature=0.9, presence_penalty=0.5, seed=5)


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch, tiny_engine_bundle: Path) -> FakeCudart:
    return device_of_memory(monkeypatch, tiny_engine_bundle)


def load(bundle: Path, **options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_bundle(
        bundle, **{"max_length": 200, "num_threads": 1, "num_nodes": 8, **options}
    )


def tokens(decoder: SpeculativeDecoder, prompt: list[int], **options: Any) -> list[int]:
    options = {"max_new_tokens": 20, "stop_token_ids": (), **options}
    return [token for chunk in decoder.stream(prompt, **options) for token in chunk.token_ids]


def runner_of(decoder: SpeculativeDecoder) -> GraphStep:
    runner = decoder.batch.runner
    assert isinstance(runner, GraphStep)
    return runner


def count_calls(cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Calls of the driver from now on, by function."""
    calls: dict[str, int] = {}

    def counted(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return function(*arguments)

        return call

    for name in dir(cudart):
        function = getattr(cudart, name)
        # The rest are classes, such as cudaError_t.
        if name.startswith("cuda") and not isinstance(function, type):
            monkeypatch.setattr(cudart, name, counted(name, function))
    return calls


@pytest.fixture(scope="module")
def mixed(tiny_step_bundle: Path) -> tuple[list[GenerateArguments], list[list[int]]]:
    """Requests of every kind, and what the host answers."""
    host = load(tiny_step_bundle, step="host")
    # The last prompt is longer than what one pass reads.
    prompts = [host.prompt_tokenizer.encode(text) for text in (*PROMPTS, "a b " * 20)]
    requests = mixed_requests(prompts)
    requests[3][1]["sampling"] = PENALISED
    return requests, [tokens(host, list(prompt), **options) for prompt, options in requests]


@pytest.mark.parametrize(("sizes", "in_place"), [([1, 2, 3], False), ([3], False), ([3], True)])
def test_batches(
    mixed: tuple[list[GenerateArguments], list[list[int]]],
    tiny_step_bundle: Path,
    tiny_engine_bundle: Path,
    cudart: FakeCudart,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    sizes: list[int],
    in_place: bool,
) -> None:
    """Requests of every kind join and leave, with another size of tree in every step.

    Where all steps have three slots, prompts are read in slots that are idle in the steps between. Texts come
    to the next length for which there are steps in their middle, unless passes read whole caches in place.
    """
    monkeypatch.setattr("runtime.device.plan.SHORTEST_READ", 64)
    monkeypatch.setattr("runtime.load.device.batch_sizes", lambda max_num_seqs: sizes)
    requests, expected = mixed
    if in_place:
        tiny_engine_bundle = as_engine_bundle(
            *(tiny_step_bundle, tmp_path / "bundle"),
            max_num_seqs=3,
            max_context=256,
            prefill_chunk=16,
            in_place=True,
        )
        device_of_memory(monkeypatch, tiny_engine_bundle)
    device = load(tiny_engine_bundle, max_num_seqs=3)
    for seed in range(2):
        assert decode_together(device, requests, np.random.default_rng(seed)) == expected
    lengths = {length for *_, length in runner_of(device)._steps}
    assert lengths == ({200} if in_place else {40, 104, 200})


def test_prompts_are_padded_to_few_shapes(
    tiny_step_bundle: Path, tiny_engine_bundle: Path, cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All shapes of passes over prompts run when the bundle is loaded, and padding changes no text."""
    monkeypatch.setattr("runtime.device.plan.SHORTEST_READ", 64)
    monkeypatch.setattr("runtime.load.device.PROMPT_SIZES", (4, 8))
    shapes: list[Any] = []
    really = TensorRTEngine.run

    def run(self: TensorRTEngine, arrays: Any) -> None:
        shapes.append((self._name, *(arrays[tensor.name].shape for tensor in self._contract.inputs)))
        really(self, arrays)

    monkeypatch.setattr(TensorRTEngine, "run", run)
    host, device = load(tiny_step_bundle, step="host"), load(tiny_engine_bundle)
    at_load = set(shapes)
    assert len(at_load) == 2 * 3 * 3  # of two graphs, three lengths and three sizes
    for count in (1, 3, 4, 5, 9, 15, 16, 17, 33, 40, 120, 190):
        prompt = [5 + index % 50 for index in range(count)]
        assert tokens(device, prompt, max_new_tokens=4) == tokens(host, prompt, max_new_tokens=4)
    assert set(shapes) == at_load


def test_the_next_start_compiles_nothing(
    tiny_engine_bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor does any request: all kernels are compiled while the bundle is loaded."""
    counts = []
    for _ in range(2):
        device_of_memory(monkeypatch, tiny_engine_bundle)
        monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
        decoder, library = load(tiny_engine_bundle), tensorrt.import_tensorrt("tensorrt-rtx").trt
        counts.append(library.num_compiled)
        for prompt in ([5], list(range(5, 60))):
            tokens(decoder, prompt)
        assert library.num_compiled == counts[-1]
        decoder.close()
    assert counts[0] > 10
    assert counts[1] == 0


def test_no_padding_is_written_behind_the_caches(
    tiny_step_bundle: Path, tiny_engine_bundle: Path, cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.load.device.PROMPT_SIZES", (4, 8))
    host, device = (load(bundle, max_length=256) for bundle in (tiny_step_bundle, tiny_engine_bundle))
    prefill = runner_of(device)._prefill
    monkeypatch.setattr(prefill, "_last", 260)
    for count in (241, 249, 250, 251, 255):
        prompt = [5 + index % 50 for index in range(count)]
        assert tokens(device, prompt, max_new_tokens=1) == tokens(host, prompt, max_new_tokens=1)
    ends = [prefill._end_of_part(start, 256) for start in (240, 245, 249, 252, 255)]
    assert ends == [256, 253, 256, 256, 256]


def test_plain_steps_need_no_head(
    tiny_step_bundle: Path, tiny_engine_bundle: Path, cudart: FakeCudart
) -> None:
    host, device = load(tiny_step_bundle, method=PLAIN, step="host"), load(tiny_engine_bundle, method=PLAIN)
    for prompt in ([5], list(range(2, 40))):
        assert tokens(device, prompt) == tokens(host, prompt)
    runner_of(device).close()
    assert cudart.leftovers() == []


@pytest.mark.parametrize("sizes", [[1], [3]])
def test_a_step_is_one_launch_and_one_read(
    tiny_engine_bundle: Path, cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    """Even where slots of the step are idle."""
    monkeypatch.setattr("runtime.load.device.batch_sizes", lambda max_num_seqs: sizes)
    decoder = load(tiny_engine_bundle, max_num_seqs=sizes[-1])
    for sampling in (SamplingParams(), SamplingParams(temperature=0.8, top_p=0.9, seed=3)):
        steps = decoder.stream(
            [5, 6, 7], budget=FixedBudget(8), max_new_tokens=60, stop_token_ids=(), sampling=sampling
        )
        next(steps)  # the prompt
        calls = count_calls(cudart, monkeypatch)
        next(steps)
        # Choosing the GPU is no call of the driver where the thread has it already.
        assert calls == {"cudaSetDevice": 2, "cudaGraphLaunch": 1, "cudaStreamSynchronize": 1}


@pytest.mark.parametrize("sampling", [SamplingParams(), PENALISED])
def test_a_part_of_a_prompt_is_waited_for_once(
    tiny_engine_bundle: Path, cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams
) -> None:
    """Its passes, of target model and head, get their inputs by two copies each."""
    decoder = load(tiny_engine_bundle)
    batch = decoder.batch
    sequence = decoder.new_sequence(list(range(2, 34)), max_new_tokens=9, sampling=sampling)
    batch.admit(sequence)
    calls = count_calls(cudart, monkeypatch)
    assert batch.prefill(sequence) is None
    assert calls["cudaStreamSynchronize"] == 1
    assert calls["cudaMemcpyAsync"] == 4
    calls.clear()
    assert batch.prefill(sequence) is not None
    assert calls["cudaStreamSynchronize"] == 1
    assert not calls.keys() & {"cudaMalloc"}


def test_no_request_allocates(
    tiny_engine_bundle: Path, cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of all kinds are captured while the decoder is loaded."""
    decoder = load(tiny_engine_bundle, max_num_seqs=3)
    requests = mixed_requests([[5, 6, 7], [8], list(range(2, 40))])
    # The host's copy of a prompt's first result is allocated once, for all prompts.
    tokens(decoder, [5], sampling=SamplingParams(temperature=0.5, seed=1))
    calls = count_calls(cudart, monkeypatch)
    decode_together(decoder, requests, np.random.default_rng(0))
    assert not calls.keys() & {"cudaMalloc", "cudaHostAlloc", "cudaStreamBeginCapture"}
    assert calls["cudaGraphLaunch"] > 0


def test_steps_share_the_passes_before_acceptance(
    tiny_engine_bundle: Path, cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine needs memory for every execution context."""
    contexts: Counter[str] = Counter()
    really_create = FakeEngine.create_execution_context

    def create(self: FakeEngine, strategy: int = 0) -> FakeContext:
        contexts[self.path.stem] += 1
        return really_create(self, strategy)

    monkeypatch.setattr(FakeEngine, "create_execution_context", create)
    decoder = load(tiny_engine_bundle, max_num_seqs=2)
    batch_sizes, tree_sizes = 2, len(Bundle.load(tiny_engine_bundle).manifest.step_nodes)
    # The prompts' passes take one more.
    assert contexts["backbone"] == batch_sizes * tree_sizes + 1
    assert contexts["accept"] == contexts["accept_sampled"] == batch_sizes * tree_sizes
    assert contexts["search_4"] == batch_sizes
    decoder.close()


def test_the_engines_of_a_step_share_one_block_of_scratch_memory(
    tiny_engine_bundle: Path, cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        FakeEngine, "device_memory_size_v2", property(lambda self: 70001 + len(self.path.stem))
    )
    load(tiny_engine_bundle, max_num_seqs=2)
    names = Bundle.load(tiny_engine_bundle).manifest.graphs
    sizes = [block.size for block in cudart.blocks if 70001 < block.size < 70100]
    assert sizes == [70001 + max(map(len, names))]


def test_a_decoder_takes_no_more_memory_with_every_prompt(
    tiny_engine_bundle: Path, cudart: FakeCudart
) -> None:
    decoder = load(tiny_engine_bundle, num_nodes=4)
    tokens(decoder, [5])
    before = len(cudart.memory.live()), len(cudart.memory.live(is_pinned=True))
    for prompt in ([6], [7, 8], [9]):
        tokens(decoder, prompt)
    assert (len(cudart.memory.live()), len(cudart.memory.live(is_pinned=True))) == before


def test_the_work_of_a_device_is_timed_in_steps_captured_or_not(
    tiny_engine_bundle: Path, cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load(tiny_engine_bundle, num_nodes=4)
    runner = runner_of(decoder)
    found = []
    for capture in (True, False):
        runner.capture, runner.times_device = capture, True
        calls = count_calls(cudart, monkeypatch)
        with recording(runner, StageRecorder(wants_stages=False)) as recorder:
            found.append(tokens(decoder, [5]))
        assert calls.get("cudaGraphLaunch", 0) == (len(recorder.steps) if capture else 0)
        for step in recorder.steps:
            assert [name for name, _ in step.stages] == ["device"]
            assert 0 < step.stage_ms("device") < step.step_ms
    assert found[0] == found[1]


def test_limits_of_the_engines(tiny_engine_bundle: Path, cudart: FakeCudart) -> None:
    with pytest.raises(RequestError, match="max_num_seqs: the engines were compiled for at most 3, got 4"):
        load(tiny_engine_bundle, max_num_seqs=4)


def poison(decoder: SpeculativeDecoder, slots: slice) -> None:
    """Fill the caches and features of slots with NaN, as a sequence may leave them."""
    runner = runner_of(decoder)
    assert runner._buffers.path_features
    for array in runner._buffers.slot_arrays:
        rows = array.rows(slots.start, slots.stop)
        write_array(runner._device, rows, np.full(rows.shape, np.nan, rows.dtype))


@pytest.mark.parametrize("sizes", [[1, 2, 3], [3]])
def test_numbers_that_are_not_finite_stay_with_their_sequence(
    tiny_engine_bundle: Path, cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    """Attention multiplies masked values too, so a slot must be cleared for the next sequence."""
    monkeypatch.setattr("runtime.load.device.batch_sizes", lambda max_num_seqs: sizes)
    prompts = [[5, 6, 7], [8, 9], list(range(2, 14))]
    decoder = load(tiny_engine_bundle, max_num_seqs=3)
    expected = steps_together(decoder, prompts, 20)
    poison(decoder, slice(0, 3))
    assert steps_together(decoder, prompts, 20) == expected


def test_a_sequence_can_move_to_where_numbers_were_not_finite(
    tiny_engine_bundle: Path, cudart: FakeCudart
) -> None:
    decoder = load(tiny_engine_bundle, max_num_seqs=2)
    options: dict[str, Any] = {"max_new_tokens": 20, "stop_token_ids": ()}
    expected = tokens(decoder, [8, 9])
    batch = decoder.batch
    failing, other = (decoder.new_sequence(prompt, **options) for prompt in ([5, 6, 7], [8, 9]))
    batch.enter(failing)
    found = batch.enter(other).token_ids
    poison(decoder, slice(0, 1))
    batch.remove(failing)
    while batch.sequences:
        ((_, chunk),) = batch.step(FixedBudget(4))
        found = [*found, *chunk.token_ids]
    assert found == expected


@pytest.mark.parametrize("function", ["cudaGraphLaunch", "cudaStreamSynchronize"])
def test_a_driver_error_ends_the_decoder_and_a_new_one_can_be_made(
    tiny_engine_bundle: Path, cudart: FakeCudart, function: str
) -> None:
    decoder = load(tiny_engine_bundle)
    expected = tokens(decoder, [5, 6, 7])
    stream = decoder.stream([5, 6, 7], max_new_tokens=20, stop_token_ids=())
    next(stream)
    # An error that a driver recovers from in a new context.
    cudart.fail_next(function, 1)
    with pytest.raises(DeviceError, match=function):
        list(stream)
    with pytest.raises(DeviceError, match=f"unusable since {function}"):
        tokens(decoder, [5, 6, 7])
    assert tokens(load(tiny_engine_bundle), [5, 6, 7]) == expected


def test_what_fails_first_is_what_is_told(
    tiny_engine_bundle: Path, cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed step the device cannot be closed without a further error."""

    def fail(self: FakeContext, stream_handle: int) -> bool:
        cudart.fail_next("cudaStreamSynchronize", 999)
        raise DeviceError("the first error")

    monkeypatch.setattr(FakeContext, "execute_async_v3", fail)
    with pytest.raises(DeviceError, match=r"^the first error$"):
        load(tiny_engine_bundle)
    assert cudart.memory.live() == []


def test_out_of_memory_says_what_needs_less(tiny_engine_bundle: Path, cudart: FakeCudart) -> None:
    cudart.memory_limit = 2**16
    with pytest.raises(DeviceError, match=r"out of memory.*max_length"):
        load(tiny_engine_bundle)
    assert cudart.leftovers() == []


def test_memory_that_prepared_steps_exceed_is_told_with_the_figures(
    tiny_engine_bundle: Path, cudart: FakeCudart, capsys: pytest.CaptureFixture[str]
) -> None:
    """The library and the driver allocate for contexts and captured steps by themselves."""
    cudart.fail_next("cudaGraphInstantiate", 2)
    message = (
        r"cudaGraphInstantiate: out of memory; \d+ of the GPU's 1073741824 bytes were free before steps were "
        r"prepared; a smaller max_num_seqs, or .* fewer --step-nodes"
    )
    with pytest.raises(DeviceMemoryError, match=message):
        load(tiny_engine_bundle)
    assert cudart.leftovers() == []
    assert "prepare steps" in capsys.readouterr().err


@pytest.mark.parametrize(("left", "level"), [(2**29, "INFO"), (2**20, "WARNING")])
def test_memory_that_prepared_steps_take_is_logged(
    tiny_engine_bundle: Path,
    cudart: FakeCudart,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    left: int,
    level: str,
) -> None:
    really_warm_up = GraphStep.warm_up

    def warm_up(self: GraphStep) -> None:
        really_warm_up(self)
        cudart.memory_limit = left + sum(block.size for block in cudart.blocks)

    monkeypatch.setattr(GraphStep, "warm_up", warm_up)
    with caplog.at_level("INFO", logger="runtime.load.device"):
        load(tiny_engine_bundle)
    (record,) = (each for each in caplog.records if "prepared steps take" in each.getMessage())
    assert record.levelname == level
    assert f"{left} of {2**30} are free; a smaller max_num_seqs" in record.getMessage()


def test_memory_for_logits_that_is_lacking_ends_no_other_request(
    tiny_engine_bundle: Path, cudart: FakeCudart
) -> None:
    """Steps with penalties need memory that the others do without."""
    decoder = load(tiny_engine_bundle)
    expected = tokens(decoder, [5, 6, 7])
    cudart.memory_limit = sum(block.size for block in cudart.memory.live()) + 1000
    options = {"max_new_tokens": 20, "stop_token_ids": ()}
    with Scheduler(decoder) as scheduler:
        with pytest.raises(DeviceError, match="out of memory"):
            list(scheduler.stream([5, 6, 7], sampling=PENALISED, **options))
        found = [token for chunk in scheduler.stream([5, 6, 7], **options) for token in chunk.token_ids]
    assert found == expected


def test_a_budget_that_asks_for_any_number_of_nodes(
    tiny_step_bundle: Path, tiny_engine_bundle: Path, cudart: FakeCudart
) -> None:
    """A device verifies more than were asked for where it has no tree of that size."""

    class Asks(AdaptiveBudget):
        def num_nodes(self, num_seqs: int) -> int:
            super().num_nodes(num_seqs)
            self._num_nodes = next(numbers) % 11
            return self._num_nodes

    expected = tokens(load(tiny_step_bundle, step="host"), [5, 6, 7], max_new_tokens=60)
    numbers = itertools.count()
    budget = Asks(StepCosts(np.ones((1, 11)).cumsum(1)), None)
    assert tokens(load(tiny_engine_bundle), [5, 6, 7], max_new_tokens=60, budget=budget) == expected
    adaptive = load(tiny_engine_bundle, num_nodes=None)
    assert tokens(adaptive, [5, 6, 7], max_new_tokens=60) == expected


def test_a_plan_of_another_version_or_gpu(
    tiny_engine_bundle: Path, cudart: FakeCudart, tmp_path: Path
) -> None:
    """The library refuses it; the message says what it was compiled with and for."""
    bundle = shutil.copytree(tiny_engine_bundle, tmp_path / "bundle")
    plan = bundle / "search_4.engine"
    plan.write_text("x" * plan.stat().st_size)
    with pytest.raises(DeviceError, match=r"search_4.*was compiled by tensorrt_of_memory 0 for sm89"):
        load(bundle, verify=False)
    assert cudart.leftovers() == []


def test_swapped_plans(tiny_engine_bundle: Path, cudart: FakeCudart, tmp_path: Path) -> None:
    bundle = shutil.copytree(tiny_engine_bundle, tmp_path / "bundle")
    names = ("search_0.engine", "search_4.engine")
    first, second = ((bundle / name).read_text() for name in names)
    (bundle / names[0]).write_text(second)
    (bundle / names[1]).write_text(first)
    with pytest.raises(BundleError, match=r"search_0\.engine is not the file"):
        load(bundle)
    with pytest.raises(DeviceError, match="search_0"):
        load(bundle, verify=False)
    assert cudart.leftovers() == []
