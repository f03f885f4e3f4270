"""Sampled texts have the target model's distribution, whatever a head drafts."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.experiments.sampling import chi_square_p
from integrations.transformers.drafts import DraftOptions
from integrations.transformers.head import SpeculativeHead
from runtime.core.options import CHAIN, TREE
from tests.integrations.transformers.models import make_head, make_model

VOCAB_SIZE, PROMPT, LENGTH = 4, [1, 3, 2], 3
NUM_TEXTS = 600
SETTINGS = {"do_sample": True, "temperature": 0.8, "top_k": 0}
HEADS: dict[str, dict[str, Any]] = {
    "ctc": {"transition": "mlp", "frame_start": "fused"},
    "block": {"drafter_type": "block", "transition": "markov"},
    "medusa": {"drafter_type": "medusa"},
    "hydra": {"drafter_type": "hydra"},
    "eagle": {"drafter_type": "eagle"},
}


@pytest.fixture(scope="module")
def llama() -> Any:
    return make_model("llama", vocab_size=VOCAB_SIZE, pad_token_id=0, eos_token_id=None)


@pytest.fixture(scope="module")
def expected(llama: Any) -> NDArray[np.float64]:
    """The exact probability of every continuation of ``LENGTH`` tokens, in the order of ``product``."""
    texts = torch.tensor(list(product(range(VOCAB_SIZE), repeat=LENGTH)))
    with torch.no_grad():
        logits = llama(torch.cat((torch.tensor([PROMPT]).repeat(len(texts), 1), texts), 1)).logits
    log_probs = (logits[:, len(PROMPT) - 1 : -1] / SETTINGS["temperature"]).double().log_softmax(-1)
    found: NDArray[np.float64] = log_probs.gather(2, texts.unsqueeze(2)).sum((1, 2)).exp().numpy()
    return found


@pytest.mark.parametrize("shape", [TREE, CHAIN])
@pytest.mark.parametrize("name", HEADS)
def test_continuations_have_the_exact_distribution(
    llama: Any, expected: NDArray[np.float64], name: str, shape: str
) -> None:
    """Chi-square over all continuations."""
    options = DraftOptions(num_nodes=4, shape=shape, top_k=VOCAB_SIZE - 1)
    head = SpeculativeHead(make_head(llama, num_candidates=VOCAB_SIZE, **HEADS[name]), llama, options)
    torch.manual_seed(0)
    prompts = torch.tensor([PROMPT]).repeat(NUM_TEXTS, 1)
    texts = llama.generate(prompts, custom_generate=head, max_new_tokens=LENGTH, **SETTINGS)
    places = VOCAB_SIZE ** torch.arange(LENGTH - 1, -1, -1)
    numbers = (texts[:, len(PROMPT) :] * places).sum(1).numpy()
    counts = np.bincount(numbers, minlength=len(expected))
    assert chi_square_p(counts, NUM_TEXTS * expected) > 0.01
    assert head.tokens_per_step > 1.1
