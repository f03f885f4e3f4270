"""Prompts to token ids, with the chat template the exporter found."""

from tokenizers import Tokenizer

from runtime.bundle import TOKENIZER_NAME, Bundle
from runtime.errors import BundleError, RequestError


class PromptTokenizer:
    """The bundle's tokenizer and its one-turn prompt format."""

    def __init__(self, bundle: Bundle):
        model = bundle.manifest.model
        try:
            self.tokenizer = Tokenizer.from_file(str(bundle.path / TOKENIZER_NAME))
        except Exception as error:
            raise BundleError(f"{bundle.path}: {TOKENIZER_NAME} cannot be read: {error}") from error
        size = self.tokenizer.get_vocab_size(with_added_tokens=True)
        if size > model.vocab_size:
            raise BundleError(
                f"{TOKENIZER_NAME} is not this model's: it must have at most {model.vocab_size} tokens, "
                f"got {size}"
            )
        self.prefix, self.suffix = model.prompt_prefix, model.prompt_suffix

    def encode(self, text: str, *, raw: bool = False) -> list[int]:
        """Token ids of a prompt, as a user's message in the chat template unless ``raw``.

        Raises RequestError for an empty prompt.
        """
        if not text.strip():
            raise RequestError("prompt: must not be empty")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"prompt: must be valid Unicode, got a lone surrogate at {error.start}"
            ) from None
        if raw or not (self.prefix or self.suffix):
            return list(self.tokenizer.encode(text).ids)
        # The template spells out its own special tokens.
        templated = self.prefix + text + self.suffix
        return list(self.tokenizer.encode(templated, add_special_tokens=False).ids)

    def decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))
