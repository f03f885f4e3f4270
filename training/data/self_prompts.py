"""Prompts without a data set: an instruct model writes its own users (Magpie, Xu et al., arXiv 2406.08464).

The chat template is rendered up to the place of a user's first word. The model continues this text with a
message like those of the users it was trained on, and ends it as the template ends a user's message.
``SelfPrompts.problem`` says which messages are left out. System messages lead to users of a kind: "You help
with Python code." to programmers.
"""

import json
import re
import unicodedata
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from runtime.core.jsonl_store import JsonlStore
from training.data.conversations import PLACEHOLDER, Turn, chat_text, encode_rendered
from training.settings import PromptSettings, TrainingError

MIN_LETTERS = 8
# A text repeats itself if zlib compresses it to less than this share. Questions have 0.5 and more.
MIN_COMPRESSED_SHARE = 0.3
# No language that separates words by spaces has words of more letters than this.
MAX_WORD_LETTERS = 40
# Texts whose word triples have this Jaccard index count as nearly the same.
NEAR_DUPLICATE = 0.7
# The run ends after this many useless prompts in a row.
MAX_USELESS_IN_A_ROW = 1000


@dataclass(frozen=True)
class UserTemplate:
    """The text that a chat template writes around a user's first message.

    prefix: the text before the message, which includes the system's message
    suffix: the text behind the message, up to the first word of the assistant
    """

    prefix: str
    suffix: str

    @classmethod
    def of(cls, tokenizer: Any, system: str | None = None) -> "UserTemplate":
        """Render a conversation and split it. Raises TrainingError if there is no usable template.

        system: the system's message; None leaves it to the template
        """
        if not getattr(tokenizer, "chat_template", None):
            raise TrainingError(
                "--self-prompts: the model has no chat template, so it has seen no users to write as; give "
                "prompts with --data"
            )
        from jinja2 import TemplateError  # comes with every tokenizer that has a template

        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": PLACEHOLDER})
        try:
            text = chat_text(messages, tokenizer, add_generation_prompt=True)
        except (TemplateError, ValueError) as error:
            raise TrainingError(
                f"--self-prompts: the chat template refuses {_opening(system)}: {error}"
            ) from error
        parts = text.split(PLACEHOLDER)
        if len(parts) != 2:
            raise TrainingError(
                "--self-prompts: the chat template writes a user's message "
                f"{len(parts) - 1} times; expected once"
            )
        if not parts[1].strip():
            raise TrainingError(
                "--self-prompts: the chat template writes nothing behind a user's message, so it has no end"
            )
        if system is not None and system not in parts[0]:
            raise TrainingError(f"--prompt-systems: the chat template does not write {_opening(system)}")
        return cls(*parts)

    @classmethod
    def all_of(cls, tokenizer: Any, settings: PromptSettings) -> "list[UserTemplate]":
        """The templates in which the prompts are written in turn. Raises TrainingError as ``of`` does."""
        return [cls.of(tokenizer, system) for system in settings.prompt_systems or (None,)]

    @property
    def end_text(self) -> str:
        """The first line behind the message. A model that writes as a user ends its message with it."""
        return self.suffix.strip().partition("\n")[0]


def _opening(system: str | None) -> str:
    """A name for the opening of a conversation, for errors."""
    return "a user's message" if system is None else f"the system's message {system[:40]!r}"


def repeats_itself(text: str) -> bool:
    """Whether a text says the same over and over, which makes it compress far better than other texts."""
    data = text.encode()
    return len(zlib.compress(data, 9)) < MIN_COMPRESSED_SHARE * len(data)


def count_near_duplicates(texts: Sequence[str]) -> int:
    """The number of texts that are nearly the same as an earlier one.

    Two texts are nearly the same if the sets of their word triples have a Jaccard index of at least
    NEAR_DUPLICATE. Such sets share one of the rarest ``(1 - NEAR_DUPLICATE) * n + 1`` triples of each, so
    only texts that do are compared (prefix filtering: Chaudhuri et al., ICDE 2006).
    """
    sets = [_triples(normalised(text).split()) for text in texts]
    frequency = Counter(triple for each in sets for triple in each)
    by_rare_triple: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    found = 0
    for index, triples in enumerate(sets):
        ordered = sorted(triples, key=lambda triple: (frequency[triple], triple))
        rare = ordered[: int((1 - NEAR_DUPLICATE) * len(ordered)) + 1]
        others = {other for triple in rare for other in by_rare_triple[triple]}
        found += any(
            len(triples & sets[other]) >= NEAR_DUPLICATE * len(triples | sets[other]) for other in others
        )
        for triple in rare:
            by_rare_triple[triple].append(index)
    return found


def _triples(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[start : start + 3]) for start in range(max(len(words) - 2, 1))}


def normalised(text: str) -> str:
    """The letters of a text in lower case, with one space for everything between them."""
    return " ".join(re.findall(r"[^\W\d_]+", unicodedata.normalize("NFKC", text).casefold()))


def self_prompts_record(
    settings: PromptSettings, tokenizer: Any, *, model_name: str, seed: int
) -> dict[str, Any]:
    """Everything that determines the prompts except the batch size, for the file that keeps them.

    Their number is not in it, because a larger number only adds prompts. Raises TrainingError for a model
    without a usable chat template.

    model_name: name or hash of the model
    """
    templates = UserTemplate.all_of(tokenizer, settings)
    return {
        "model": model_name,
        "prefixes": [template.prefix for template in templates],
        "suffixes": [template.suffix for template in templates],
        "temperature": settings.prompt_temperature,
        "top_p": settings.prompt_top_p,
        "max_tokens": settings.max_prompt_tokens,
        "seed": seed,
    }


def check_seed(path: Path, seed: int) -> None:
    """Raises TrainingError for a file of self-written prompts that was begun with another ``--seed``."""
    try:
        with path.open(encoding="utf-8") as stream:
            begun = json.loads(stream.readline())["settings"]["seed"]
    except (OSError, ValueError, LookupError, TypeError):
        return  # There is no such file, or ``SelfPrompts`` says what is wrong with it.
    if begun != seed:
        raise TrainingError(
            f"--seed: {path} was begun with --seed {begun}, got {seed}; give --seed {begun} to go on, or "
            "another --out to begin anew"
        )


class SelfPrompts:
    """The prompts that a model has written so far, in a file to which every batch is added.

    Texts that differ only in case, digits, punctuation and space are duplicates.

    record: of ``self_prompts_record``; a file with another one is refused
    texts: the prompts that were kept
    drawn: the number of prompts that the model has written
    left_out: the number of prompts that were left out, by reason
    """

    def __init__(self, path: Path, record: dict[str, Any], markers: list[str], *, flag: str):
        """Read the batches of an earlier run. Raises UserError if it had other settings.

        markers: the special tokens, which a user's message never holds
        flag: the setting that errors name for the file
        """
        self.record = record
        self.texts: list[str] = []
        self.drawn = 0
        self.left_out: Counter[str] = Counter()
        self._useless = 0
        self._markers = [marker for marker in markers if marker.strip()]
        self._seen: set[str] = set()
        self._store = JsonlStore(path, record, self._read, flag=flag)

    def _read(self, batch: dict[str, Any]) -> None:
        for text, finished in zip(batch["texts"], batch["finished"], strict=True):
            self.drawn += 1
            problem = self.problem(text, finished=finished)
            if problem is None:
                self.texts.append(text)
            else:
                self.left_out[problem] += 1

    def problem(self, text: str, *, finished: bool) -> str | None:
        """The reason to leave a text out; None for a text to keep, which is remembered for duplicates.

        finished: whether the model ended the message before its limit
        """
        if not finished:
            return "unfinished"
        if any(marker in text for marker in self._markers):
            return "holds a special token"
        if "\ufffd" in text or any(
            unicodedata.category(c) in ("Cc", "Co", "Cn") for c in text if c not in "\n\t"
        ):
            return "broken characters"
        if sum(map(str.isalpha, text)) < MIN_LETTERS:
            return "too short"
        if any(len(word) > MAX_WORD_LETTERS for word in re.findall(r"[^\W\d_]+", text) if word.isascii()):
            return "no words"
        if repeats_itself(text):
            return "repeats itself"
        key = normalised(text)
        if key in self._seen:
            return "duplicate"
        self._seen.add(key)
        return None

    def add(self, texts: list[str], finished: list[bool]) -> int:
        """Write a batch to the file, and return how many of its prompts are kept.

        Raises TrainingError if none of the last MAX_USELESS_IN_A_ROW prompts was kept.
        """
        before = len(self.texts)
        batch = {"texts": texts, "finished": finished}
        self._store.append(batch)
        self._read(batch)
        added = len(self.texts) - before
        self._useless = 0 if added else self._useless + len(texts)
        if self._useless >= MAX_USELESS_IN_A_ROW:
            raise TrainingError(
                f"--self-prompts: of the last {self._useless:,} prompts that the model wrote none is of use "
                f"({self.left_out.most_common(1)[0][0]}); give prompts with --data"
            )
        return added

    def turns(self, count: int) -> list[Turn]:
        """The first ``count`` prompts, each the first message of a conversation."""
        return [
            Turn([{"role": "user", "content": text}], None, where=f"self-written prompt {number}")
            for number, text in enumerate(self.texts[:count], 1)
        ]

    def report(self) -> list[str]:
        """Lines about the prompts that were kept and those that were left out."""
        kept = len(self.texts)
        lengths = sorted(len(text.split()) for text in self.texts)
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.most_common())
        lines = [
            f"{kept:,} of {self.drawn:,} prompts that the model wrote as a user are kept; left out: "
            f"{reasons or 'none'}"
        ]
        if kept:
            tenth, half, most = (lengths[int(share * (kept - 1))] for share in (0.1, 0.5, 0.9))
            scripts = Counter(script(text) for text in self.texts)
            listed = ", ".join(f"{name} {count / kept:.1%}" for name, count in scripts.most_common(5))
            lines.append(
                f"half of them have up to {half} words, a tenth up to {tenth}, a tenth more than {most}"
            )
            lines.append(f"by script: {listed}")
            near = count_near_duplicates(self.texts)
            lines.append(f"{near:,} ({near / kept:.1%}) are nearly the same as an earlier one")
        return lines


# Draws prompts: (templates, seed of the first one, number of prompts that are missing) -> for every drawn one
# the text behind the prefix of its template and whether the model ended it. The templates take turns, and
# there may be more or fewer prompts.
Draw = Callable[[Sequence[UserTemplate], int, int], list[tuple[str, bool]]]


def write_self_prompts(draw: Draw, prompts: SelfPrompts, count: int) -> None:
    """Let a model write until at least ``count`` prompts are kept.

    Every batch is written to the file when it is done, so an interrupted run continues. Raises TrainingError
    for a model whose prompts are all useless.
    """
    record = prompts.record
    templates = [UserTemplate(*parts) for parts in zip(record["prefixes"], record["suffixes"], strict=True)]
    kept = min(len(prompts.texts), count)
    with tqdm(total=count, initial=kept, desc="writing prompts", unit="prompt", smoothing=0) as bar:
        while len(prompts.texts) < count:
            texts, finished = [], []
            first = prompts.drawn % len(templates)
            turns = templates[first:] + templates[:first]
            # A run that continues does not repeat a seed.
            drawn = draw(turns, record["seed"] * 1_000_003 + prompts.drawn, count - len(prompts.texts))
            for (text, ended), template in zip(drawn, cycle(turns), strict=False):
                message, end, _ = text.partition(template.end_text)
                texts.append(message.strip())
                finished.append(ended or bool(end))
            bar.update(min(prompts.add(texts, finished), count - bar.n))


def local_draw(
    model: Any, tokenizer: Any, settings: PromptSettings, *, end_token_ids: list[int], batch_size: int
) -> Draw:
    """Draws batches of ``batch_size`` prompts from a model on this machine."""
    # Imports torch, which takes seconds.
    from training.target_model import continue_prompts, input_device, nucleus_sampler

    special = set(tokenizer.all_special_ids)

    def draw(templates: Sequence[UserTemplate], seed: int, missing: int) -> list[tuple[str, bool]]:
        prefixes = [encode_rendered(template.prefix, tokenizer) for template in templates]
        suffixes = (encode_rendered(template.suffix.strip(), tokenizer) for template in templates)
        firsts = {token for suffix in suffixes for token in suffix[:1]}
        ends = sorted({*end_token_ids, *(firsts & special)})
        continuations = continue_prompts(
            model,
            list(islice(cycle(prefixes), batch_size)),
            max_new_tokens=settings.max_prompt_tokens,
            end_token_ids=ends,
            choose=nucleus_sampler(
                settings.prompt_temperature, settings.prompt_top_p, seed, input_device(model)
            ),
        )
        drawn = []
        for tokens in continuations:
            ended = tokens[-1] in ends
            text = tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=False)
            drawn.append((text, ended))
        return drawn

    return draw


def script(text: str) -> str:
    """The writing system of most letters of a text, such as Latin or Cyrillic."""
    names = Counter(unicodedata.name(c, "unknown").partition(" ")[0] for c in text if c.isalpha())
    return names.most_common(1)[0][0].capitalize() if names else "None"
