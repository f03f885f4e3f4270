"""The decode loop: draft, transform, verify, accept, commit.

    decoder = SpeculativeDecoder.from_bundle("engines/")
    for chunk in decoder.stream(decoder.prompt_tokenizer.encode("..."), max_new_tokens=128):
        print(chunk.text, end="", flush=True)

The output is the backbone's own, whatever the draft head proposes: greedy, token for token the same;
sampled, with the same seed, the same draws (``runtime.decoding.sampling``).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from runtime.budget.step_times import measure_step_ms
from runtime.budget.tree_budget import TreeBudget
from runtime.bundle import Bundle
from runtime.decoding.acceptance import GreedyAcceptor
from runtime.decoding.batch import Batch, FixedPlan, Plan
from runtime.decoding.sampling import GREEDY, Sampler, SamplingParams
from runtime.decoding.sequence import Chunk, Row
from runtime.decoding.target_model import TargetModel
from runtime.errors import RequestError
from runtime.load import DEFAULT_TRANSFORM, load_drafter, load_target_model
from runtime.proposers.base import Proposer
from runtime.text.detokenizer import Detokenizer
from runtime.text.tokenization import PromptTokenizer

# The best fixed tree on a CPU, where a verify pass costs more with every node.
DEFAULT_NUM_NODES = 8
MAX_NUM_NODES = 256
# In place of a number: every step verifies as many drafts as pay for themselves, up to a limit.
AUTO = "auto"
# Tokens of the first, discarded stream.
WARMUP_TOKENS = 4
MAX_NUM_THREADS = 256
MAX_NUM_ROWS = 1024
# All of a text's are looked for after every token.
MAX_STOP_STRINGS, MAX_STOP_LENGTH = 32, 256


class SpeculativeDecoder:
    """One sequence at a time. ``drafter=NoProposer()`` makes it plain decoding.

    A new stream takes the engines over: an unfinished one may be dropped, but not continued.
    """

    def __init__(
        self,
        *,
        backbone: TargetModel,
        drafter: Proposer,
        prompt_tokenizer: PromptTokenizer,
        vocab_size: int,
        max_length: int,
        eos_token_ids: Sequence[int],
        num_nodes: int | str,
        num_rows: int = 1,
    ):
        self.batch = Batch(backbone, drafter, num_rows=num_rows)
        self.prompt_tokenizer = prompt_tokenizer
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.eos_token_ids = tuple(eos_token_ids)
        self.num_nodes = num_nodes
        # What ``AUTO`` chooses by.
        self.budget: TreeBudget | None = None

    @classmethod
    def from_bundle(
        cls,
        path: Path | str,
        *,
        method: str | None = None,
        num_nodes: int | str = DEFAULT_NUM_NODES,
        transform: str = "prefix",
        max_length: int | None = None,
        num_rows: int = 1,
        num_threads: int | None = None,
        backbone: TargetModel | None = None,
        verify: bool = True,
    ) -> "SpeculativeDecoder":
        """Load a bundle's engines.

        method: ``draft`` or ``vanilla``; by default ``draft`` where the bundle has a draft head
        num_nodes: drafts verified a step, or ``AUTO``: as many as pay for themselves
        transform: one of ``runtime.load.TRANSFORMS``
        max_length: positions served, at most (and by default) the model's
        num_rows: sequences at a time, for a ``runtime.scheduler.Scheduler``
        backbone: another decoder's, to be shared: of the same graph, features and options. Decoders
            that share one take turns, a text each.
        Raises BundleError for a bundle that is damaged, RequestError for an option out of range.
        """
        bundle = Bundle.load(path, verify=verify)
        model = bundle.manifest.model
        if num_nodes != AUTO and not (isinstance(num_nodes, int) and 1 <= num_nodes <= MAX_NUM_NODES):
            raise RequestError(f"num_nodes: must be {AUTO} or between 1 and {MAX_NUM_NODES}, got {num_nodes}")
        if max_length is not None and not 2 <= max_length <= model.max_position_embeddings:
            raise RequestError(
                f"max_length: must be between 2 and {model.max_position_embeddings}, got {max_length}"
            )
        if not 1 <= num_rows <= MAX_NUM_ROWS:
            raise RequestError(f"num_rows: must be between 1 and {MAX_NUM_ROWS}, got {num_rows}")
        if num_threads is not None and not 1 <= num_threads <= MAX_NUM_THREADS:
            raise RequestError(f"num_threads: must be between 1 and {MAX_NUM_THREADS}, got {num_threads}")
        method = method or ("draft" if bundle.manifest.drafter else "vanilla")
        max_length = max_length or model.max_position_embeddings
        drafter = load_drafter(
            bundle, method, transform=transform, num_rows=num_rows, num_threads=num_threads
        )
        decoder = cls(
            backbone=backbone
            or load_target_model(
                bundle,
                max_nodes=MAX_NUM_NODES,
                features=method != "vanilla",
                num_rows=num_rows,
                max_capacity=max_length,
                num_threads=num_threads,
            ),
            drafter=drafter,
            prompt_tokenizer=PromptTokenizer(bundle),
            vocab_size=model.vocab_size,
            max_length=max_length,
            eos_token_ids=model.eos_token_ids,
            num_nodes=DEFAULT_NUM_NODES,
            num_rows=num_rows,
        )
        # The search is compiled on its first use ever, the engines allocate on theirs: not in a request.
        decoder.discard(WARMUP_TOKENS)
        spec = bundle.manifest.drafter
        if method == "vanilla" or spec is None:
            return decoder
        if num_nodes == AUTO:
            # Fitted to the search's scores; another transform's mean something else.
            calibration = spec.calibration if transform == DEFAULT_TRANSFORM else None
            decoder.budget = TreeBudget(measure_step_ms(decoder), calibration)
        decoder.num_nodes = num_nodes
        return decoder

    def discard(self, max_new_tokens: int) -> None:
        """Decode for the sake of decoding: to warm up, or to be timed."""
        for _ in self.stream([0], max_new_tokens=min(max_new_tokens, self.max_length - 1), stop_token_ids=()):
            pass

    def stream(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        stop_token_ids: Sequence[int] | None = None,
        stop_strings: Sequence[str] = (),
        sampling: SamplingParams = GREEDY,
    ) -> Iterator[Chunk]:
        """Yield what each step accepts, the first chunk after the prompt has been read.

        Arguments and errors are those of ``row``, which is called before anything is computed.
        """
        row = self.row(
            prompt_ids,
            max_new_tokens=max_new_tokens,
            stop_token_ids=stop_token_ids,
            stop_strings=stop_strings,
            sampling=sampling,
        )
        return self._stream(row)

    def row(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        stop_token_ids: Sequence[int] | None = None,
        stop_strings: Sequence[str] = (),
        sampling: SamplingParams = GREEDY,
    ) -> Row:
        """A request that has been checked, for ``batch``.

        stop_token_ids: defaults to the model's end-of-text tokens; the stop token is part of the
            output's tokens, not of its text. A stop string is not part of the text; the tokens that spell
            it are among the output's.
        Raises RequestError for an option that cannot be served.
        """
        prompt = self._check(prompt_ids, max_new_tokens, stop_strings)
        argmax = sampling.is_argmax
        return Row(
            prompt,
            max_new_tokens=max_new_tokens,
            stops=frozenset(self.eos_token_ids if stop_token_ids is None else stop_token_ids),
            detokenizer=Detokenizer(self.prompt_tokenizer.tokenizer, prompt_ids, stop_strings),
            acceptor=GreedyAcceptor() if argmax else Sampler(sampling, prompt_ids, self.vocab_size),
        )

    def _stream(self, row: Row) -> Iterator[Chunk]:
        batch = self.batch
        plan = self.plan()
        batch.clear()
        batch.admit(row)
        chunk = None
        while chunk is None:
            chunk = batch.read_prompt()
        yield chunk
        while chunk.finish_reason is None:
            if row not in batch.rows:
                raise RequestError("stream: another one was started on this decoder, this one has ended")
            ((_, chunk),) = batch.step(plan)
            yield chunk

    def plan(self) -> Plan:
        """How many drafts the steps of a new text, or of a batch, verify."""
        if isinstance(self.num_nodes, int):
            return FixedPlan(self.num_nodes)
        if self.budget is None:
            raise RequestError(
                f"num_nodes: {self.num_nodes} needs a budget, as from_bundle(num_nodes={AUTO!r}) has it"
            )
        return self.budget.start()

    def _check(
        self, prompt_ids: Sequence[int], max_new_tokens: int, stop_strings: Sequence[str]
    ) -> np.ndarray:
        prompt = np.asarray(prompt_ids, dtype=np.int64)
        if prompt.ndim != 1 or prompt.size == 0:
            raise RequestError("prompt: must not be empty")
        if max_new_tokens < 1:
            raise RequestError(f"max_new_tokens: must be at least 1, got {max_new_tokens}")
        bad = np.flatnonzero((prompt < 0) | (prompt >= self.vocab_size))
        if bad.size:
            raise RequestError(
                f"prompt: token ids must be below {self.vocab_size}, got {prompt[bad[0]]} at index {bad[0]}"
            )
        if prompt.size >= self.max_length:
            raise RequestError(
                f"prompt: must be shorter than the context of {self.max_length} tokens, got {prompt.size}"
            )
        if prompt.size + max_new_tokens > self.max_length:
            raise RequestError(
                f"max_new_tokens: must be at most {self.max_length - prompt.size} after a prompt of "
                f"{prompt.size} tokens (the context is {self.max_length}), got {max_new_tokens}"
            )
        if "" in stop_strings:
            raise RequestError("stop_strings: must not hold an empty string")
        if len(stop_strings) > MAX_STOP_STRINGS:
            raise RequestError(f"stop_strings: must be at most {MAX_STOP_STRINGS}, got {len(stop_strings)}")
        longest = max(map(len, stop_strings), default=0)
        if longest > MAX_STOP_LENGTH:
            raise RequestError(
                f"stop_strings: must have at most {MAX_STOP_LENGTH} characters each, got {longest}"
            )
        return prompt
