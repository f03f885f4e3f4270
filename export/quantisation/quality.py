"""The quality of a quantised model: perplexity on a text, and how often the next token stays the same.

``Text`` and ``token_ids`` also give the text by whose activations weights are smoothed and rounded.
"""

import math
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch

from export.errors import ExportError
from export.source import Source


@dataclass(frozen=True)
class Text:
    """flag: the option that names another file; default: the file of the package"""

    flag: str
    default: str


QUALITY = Text("--quality-text", "quality_text.txt")
CALIBRATION = Text("--calibration-text", "calibration_text.txt")
# As many tokens as the text of the package has with a small vocabulary.
CALIBRATION_TOKENS = 2048


def read_text(text: Text, path: Path | None) -> str:
    """The content of a UTF-8 file; None takes the package's. Raises ExportError that names the flag."""
    try:
        return (path or files("export") / text.default).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ExportError(f"{text.flag}: {path} cannot be read as UTF-8 text: {error}") from error


def token_ids(source: Source, text: Text, path: Path | None, max_tokens: int) -> torch.Tensor:
    """The first tokens [1, L] of a text, int64. Raises ExportError if there are fewer than two."""
    ids = source.tokenizer(read_text(text, path), add_special_tokens=True, verbose=False).input_ids
    ids = ids[: min(max_tokens, source.spec.max_position_embeddings)]
    if len(ids) < 2:
        name = path.name if path else text.default
        raise ExportError(f"{text.flag}: {name} must have at least two tokens, got {len(ids)}")
    return torch.tensor([ids])


# A longer text is cut: more tokens change the second digit of a perplexity at most.
QUALITY_TOKENS = 1024
# The share of equal greedy tokens below which a build warns.
LEAST_SAME_GREEDY = 0.9


class QualityMeasurement:
    """Measures a model in float32 when it is made, and again, with rounded weights, in ``compare``."""

    def __init__(self, source: Source, text: Path | None):
        """text: a UTF-8 file; None takes the text that comes with the package. Raises ExportError."""
        self._name = text.name if text else QUALITY.default
        self._ids = token_ids(source, QUALITY, text, QUALITY_TOKENS)
        self._perplexity, self._greedy = self._evaluate(source)

    def compare(self, source: Source) -> dict[str, str | int | float]:
        """The quality of the model after its weights were rounded, as ``bundle.json`` has it.

        ``perplexity_fp32`` and ``perplexity`` are those before and after, by teacher forcing of
        ``num_tokens``. ``same_greedy`` is the share of positions at which both prefer the same next token.
        """
        perplexity, greedy = self._evaluate(source)
        return {
            "text": self._name,
            "num_tokens": greedy.numel(),
            "perplexity_fp32": self._perplexity,
            "perplexity": perplexity,
            "same_greedy": float((greedy == self._greedy).float().mean()),
        }

    @torch.no_grad()
    def _evaluate(self, source: Source) -> tuple[float, torch.Tensor]:
        """The perplexity, and the preferred next tokens."""
        source.model.set_attn_implementation("eager")
        logits = source.model(self._ids, use_cache=False).logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits, self._ids[0, 1:])
        return math.exp(float(loss)), logits.argmax(-1)


def warning(same_greedy: float, precision: str) -> str | None:
    """What to tell a user whose model prefers other tokens than before it was rounded; None if all is well.

    same_greedy: the share of positions at which both prefer the same next token
    precision: that of the target model's weights
    """
    if same_greedy >= LEAST_SAME_GREEDY:
        return None
    remedies = ["--precision int8"] if precision != "int8" else []
    remedies.append("--lm-head float")
    if precision == "int4":
        remedies.append("--calibration-text with a text like those that the model will write")
    remedies.append(
        "a checkpoint that was trained in this precision, such as a GGUF file of Q4_0, whose weights are "
        "kept exactly if its groups have 32 weights or a multiple of that"
    )
    return (
        f"warning: the model in {precision} prefers the same token as the float model at {same_greedy:.1%} "
        f"of the positions, less than {LEAST_SAME_GREEDY:.0%}; what helps: {'; '.join(remedies)}"
    )
