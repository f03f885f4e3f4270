"""A bundle's decoder: what most users need.

    decoder = SpeculativeDecoder.from_bundle("engines/")
    for chunk in decoder.stream(decoder.prompt_tokenizer.encode("..."), max_new_tokens=128):
        print(chunk.text, end="", flush=True)

The output is the target model's own, whatever the draft head proposes: greedy, token for token the same;
sampled, with the same seed, the same draws. ``runtime.decode.step.HostStep.step`` is a step on the host.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from runtime.core.bundle import DRAFT, GRAPH_STEP, HOST_STEP, MAX_NUM_NODES, PLAIN, STEPS, Bundle
from runtime.core.errors import RequestError
from runtime.core.lattice import Search
from runtime.core.options import (
    CHAIN,
    DEFAULT_NUM_NODES,
    MAX_NUM_SEQS,
    MAX_NUM_THREADS,
    MAX_PREFIX_CACHE_MB,
    SHAPES,
    TREE,
    choose_method,
    choose_prompt_lookup,
)
from runtime.core.prefix_search import chain_search, prefix_search
from runtime.core.prompts import Prompt
from runtime.decode.batch import Batch
from runtime.decode.budget import AdaptiveBudget, FixedBudget, NodeBudget, PastTexts
from runtime.decode.prefix_cache import PrefixCache
from runtime.decode.proposers.lookup import LookupProposer
from runtime.decode.sequence import Chunk, SequenceFactory, SequenceState
from runtime.decode.step import StepRunner
from runtime.decode.step_costs import StepCosts
from runtime.decode.step_times import measure_step_ms
from runtime.decode.target_model import TargetModel
from runtime.load.device import OpenDevice, load_graph_step, open_device
from runtime.load.host import load_host_step
from runtime.text import PromptTokenizer

LOGGER = logging.getLogger(__name__)
# Tokens of the first text, which is discarded.
WARMUP_TOKENS = 4


class SpeculativeDecoder:
    """Decodes one text at a time with ``stream``, or many with a ``runtime.serve.scheduler.Scheduler``.

    new_budget: makes the budget of a new text, or of a new batch of texts
    """

    def __init__(self, batch: Batch, sequence_factory: SequenceFactory, new_budget: Callable[[], NodeBudget]):
        self.batch = batch
        self.sequence_factory = sequence_factory
        self.new_budget = new_budget
        self.prompt_tokenizer = sequence_factory.prompt_tokenizer
        self.max_length = sequence_factory.max_length

    @classmethod
    def from_bundle(
        cls,
        path: Path | str,
        *,
        method: str | None = None,
        num_nodes: int | None = None,
        search: Search = prefix_search,
        tree: str = TREE,
        max_length: int | None = None,
        max_num_seqs: int = 1,
        num_threads: int | None = None,
        step: str | None = None,
        device: str | None = None,
        opener: OpenDevice = open_device,
        kept_nodes: int | None = None,
        prompt_lookup: bool | None = False,
        prefix_cache_mb: int = 0,
        target_model: TargetModel | None = None,
        verify: bool = True,
    ) -> "SpeculativeDecoder":
        """Load a bundle's engines.

        method: one of ``runtime.core.bundle.METHODS``; by default ``draft`` where the bundle has a draft head
        num_nodes: draft nodes that a step verifies for each sequence; by default as many as pay for
            themselves (``runtime.decode.budget``), or DEFAULT_NUM_NODES where all drafts come from the text
        search: makes a tree of a parallel head's lattice; others than the default are for comparison
        tree: ``tree``, or ``chain`` for drafts that are verified in a row, the best path of at most
            ``num_nodes``
        max_length: positions served, at most (and by default) the model's, or those that the engines were
            compiled for
        max_num_seqs: sequences that are decoded at a time
        step: ``host``, or ``graph``, where the graphs of a whole step run on a device; by default what the
            bundle's target is for
        device: of graph steps: ``cpu``, or a GPU as ``cuda:0``
        opener: opens the device of graph steps and makes its engines; others than the default are for tests
        kept_nodes: of speculative streams: drafts that go on to the upper layers; by default as exported
        prompt_lookup: whether drafts also come from earlier places of the text; without a draft head, they
            come from there alone. None: beside those of a draft head, in steps where they can
        prefix_cache_mb: MiB of keys and values that are kept for later prompts with the same beginning
        target_model: another decoder's, to be shared: of the same graph, features and options. Decoders that
            share one take turns, a text each.
        verify: whether to check the sha256 of every file
        Raises BundleError for a bundle that is damaged, RequestError for an option out of range, and
        DeviceError where a device is missing or lacks memory.
        """
        bundle = Bundle.load(path, verify=verify)
        model, plan = bundle.manifest.model, bundle.manifest.engine_plan
        _check_ranges(
            num_nodes=(num_nodes, 1, MAX_NUM_NODES),
            kept_nodes=(kept_nodes, 1, MAX_NUM_NODES),
            max_length=(max_length, 2, model.max_position_embeddings),
            max_num_seqs=(max_num_seqs, 1, MAX_NUM_SEQS),
            num_threads=(num_threads, 1, MAX_NUM_THREADS),
            prefix_cache_mb=(prefix_cache_mb, 0, MAX_PREFIX_CACHE_MB),
        )
        method = choose_method(bundle.manifest, method, path)
        step = step or (GRAPH_STEP if bundle.manifest.is_for_gpu else HOST_STEP)
        if step not in STEPS:
            raise RequestError(f"must be one of {', '.join(STEPS)}, got {step!r}", field="step")
        _check_search(tree, search, step, target_model)
        if tree == CHAIN:
            search = chain_search
        if kept_nodes is not None:
            _check_kept_nodes(bundle, method)
        prompt_lookup = choose_prompt_lookup(bundle.manifest, method, step, prompt_lookup, tree=tree)
        most = model.max_position_embeddings
        max_length = max_length or (min(most, plan.max_context) if plan else most)
        # Before the engines, so that a damaged file leaves no device's memory behind.
        sequence_factory = SequenceFactory(
            PromptTokenizer(bundle),
            vocab_size=model.vocab_size,
            max_length=max_length,
            eos_token_ids=model.eos_token_ids,
        )
        sizes: dict[str, Any] = {
            "max_num_seqs": max_num_seqs,
            "max_length": max_length,
            "num_threads": num_threads,
        }
        runner: StepRunner
        if step == GRAPH_STEP:
            runner = load_graph_step(bundle, method, device=device, opener=opener, **sizes)
        else:
            if device not in (None, "cpu"):
                problem = f"steps on the host run on the cpu, got {device!r}; a GPU runs step graph"
                raise RequestError(problem, field="device")
            runner = load_host_step(
                bundle, method, search=search, kept_nodes=kept_nodes, target_model=target_model, **sizes
            )
            if prompt_lookup:
                runner.proposer = LookupProposer(runner.proposer, max_num_seqs)
        # Plain decoding proposes nothing by itself, whatever its budget.
        count = 0 if method == PLAIN and not prompt_lookup else num_nodes or DEFAULT_NUM_NODES
        decoder = cls(Batch(runner), sequence_factory, partial(FixedBudget, count))
        try:
            # The first use compiles the search and allocates buffers: no request should wait for that.
            decoder.discard(WARMUP_TOKENS)
            if num_nodes is None and method == DRAFT:
                decoder._adapt(bundle, search)
            if prefix_cache_mb:
                num_bytes = runner.keep_prefixes(prefix_cache_mb * 2**20)
                if num_bytes:
                    decoder.batch.prefixes = PrefixCache(num_bytes)
                else:
                    LOGGER.warning(
                        "prefix_cache_mb: %d MiB hold no text of %d tokens, so no prefixes are kept",
                        *(prefix_cache_mb, max_length),
                    )
        except BaseException:
            decoder.close()
            raise
        return decoder

    def _adapt(self, bundle: Bundle, search: Search) -> None:
        """Measure the times of steps, and verify as many nodes from now on as pay for themselves."""
        spec = bundle.manifest.drafter
        # The calibration was fitted to the scores of the prefix search; another search's mean something else.
        calibration = spec.calibration if spec and search in (prefix_search, chain_search) else None
        sizes = self.batch.runner.tree_sizes
        new_sequence = partial(self.new_sequence, [0], max_new_tokens=self.max_length - 1, stop_token_ids=())
        step_ms = measure_step_ms(self.batch, new_sequence)

        budget = partial(AdaptiveBudget, calibration=calibration, tree_sizes=sizes)
        # Compiles the choice of the number of nodes. The times of these steps say nothing of later ones.
        self.discard(WARMUP_TOKENS, budget(StepCosts(step_ms)))
        self.new_budget = partial(budget, StepCosts(step_ms), past=PastTexts())

    def close(self) -> None:
        """Give back a device's memory; the decoder is not to be used afterwards.

        Raises DeviceError if the device's last work failed, after freeing all.
        """
        self.batch.runner.close()

    def discard(self, max_new_tokens: int, budget: NodeBudget | None = None) -> None:
        """Decode a text and drop it, to warm up. Arguments are those of ``stream``."""
        count = min(max_new_tokens, self.max_length - 1)
        for _ in self.stream([0], budget=budget, max_new_tokens=count, stop_token_ids=()):
            pass

    def new_sequence(self, prompt_ids: Sequence[int], **options: Any) -> SequenceState:
        """A sequence for ``batch``; arguments and errors are those of ``SequenceFactory.make``.

        Raises RequestError too for scores of the prompt where this kind of step gives none.
        """
        if options.get("prompt_log_probs") and not self.batch.runner.scores_prompts:
            raise RequestError("is not supported by graph steps and streams", field="prompt_log_probs")
        return self.sequence_factory.make(prompt_ids, **options)

    def stream(
        self,
        prompt_ids: Sequence[int],
        *,
        budget: NodeBudget | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
        **options: Any,
    ) -> Iterator[Chunk]:
        """Yield what each step accepts, the first chunk after the prompt has been read.

        budget: how many nodes the steps verify; by default the decoder's own
        is_stopped: asked between two passes; the text ends there once it is true
        options: those of ``SequenceFactory.make``, which is called before anything is computed
        A new stream takes the engines over: an unfinished one may be dropped, but not continued.
        """
        sequence = self.new_sequence(prompt_ids, **options)
        return self._stream(sequence, budget or self.new_budget(), is_stopped)

    def _stream(
        self, sequence: SequenceState, budget: NodeBudget, is_stopped: Callable[[], bool]
    ) -> Iterator[Chunk]:
        batch = self.batch
        batch.clear()
        batch.admit(sequence)
        chunk = batch.prefill(sequence)
        while chunk is None and not is_stopped():
            chunk = batch.prefill(sequence)
        if chunk is None:
            batch.remove(sequence)
            return
        try:
            yield _checked(chunk)
            while chunk.finish_reason is None:
                if sequence not in batch.sequences:
                    problem = "another one was started on this decoder, this one has ended"
                    raise RequestError(problem, field="stream")
                if is_stopped():
                    batch.remove(sequence)
                    return
                ((_, chunk),) = batch.step(budget)
                yield _checked(chunk)
        except GeneratorExit:
            # An answer that was stopped is kept for the next prompt, as one that has ended.
            if sequence in batch.sequences:
                batch.remove(sequence)
            raise


def encode_prompts(
    decoder: SpeculativeDecoder, prompts: Sequence[Prompt], *, where: str, **options: Any
) -> list[list[int]]:
    """Return the token ids of all prompts, after checking that each can be decoded with the options.

    where: names their file in errors
    options: those of ``SequenceFactory.make``
    Raises RequestError, before anything is decoded, that names the number of the prompt.
    """
    encoded = []
    for number, prompt in enumerate(prompts, 1):
        try:
            encoded.append(decoder.prompt_tokenizer.encode_prompt(prompt))
            decoder.new_sequence(encoded[-1], **options)
        except RequestError as error:
            raise RequestError(f"{where} prompt {number}: {error}") from error
    return encoded


def _checked(chunk: Chunk) -> Chunk:
    """Raises the RequestError that ended a text, if one did."""
    if chunk.error is not None:
        raise chunk.error
    return chunk


def _check_ranges(**options: tuple[int | None, int, int]) -> None:
    """options: value, least and most of every option; None is a default"""
    for name, (value, least, most) in options.items():
        if value is not None and not least <= value <= most:
            raise RequestError(f"must be between {least} and {most}, got {value}", field=name)


def _check_search(tree: str, search: Search, step: str, target_model: TargetModel | None) -> None:
    """Raises RequestError for a shape of trees or a search that a kind of step does not have."""
    if tree not in SHAPES:
        raise RequestError(f"must be one of {', '.join(SHAPES)}, got {tree!r}", field="tree")
    if tree == CHAIN:
        if search is not prefix_search:
            raise RequestError("a chain comes from the prefix search, got another search", field="tree")
        if step == GRAPH_STEP:
            raise RequestError("steps on the host verify a chain, graph steps trees only", field="tree")
    if step == GRAPH_STEP and (search is not prefix_search or target_model is not None):
        raise RequestError("graph steps have a search and a target model of their own", field="step")


def _check_kept_nodes(bundle: Bundle, method: str) -> None:
    """Raises RequestError where no draft head prunes trees."""
    spec = bundle.manifest.drafter
    if method == PLAIN or spec is None or not spec.drafts_in_verify_pass:
        problem = "is for streams that draft in the verify pass, which this decoder does not have"
        raise RequestError(problem, field="kept_nodes")
