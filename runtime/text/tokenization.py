"""Prompts to token ids, with the chat template the exporter found."""

from tokenizers import Tokenizer

from runtime.core.bundle import TOKENIZER_NAME, Bundle
from runtime.core.errors import BundleError, RequestError
from runtime.text.unicode import encode_utf8


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
        self._longest_token = max(map(len, self.tokenizer.get_vocab()), default=1)

    def encode(
        self,
        text: str,
        *,
        raw: bool = False,
        max_tokens: int | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Token ids of a prompt, as a user's message in the chat template unless ``raw``.

        max_tokens: a text too long for so many tokens of any kind is refused before it is tokenized
        add_special_tokens: whether a text that is not put into the chat template gets the tokens that the
            tokenizer puts around every text, such as one for its beginning
        Raises RequestError for an empty prompt.
        """
        if not text.strip():
            raise RequestError("prompt: must not be empty")
        if max_tokens is not None and len(text) > max_tokens * self._longest_token:
            raise RequestError(
                f"prompt: must be shorter than the context of {max_tokens} tokens, got {len(text)} characters"
            )
        encode_utf8("prompt", text)
        templated = not raw and bool(self.prefix or self.suffix)
        if templated:
            text = self.prefix + text + self.suffix
        # A batch is encoded without Python's lock. A template contains its special tokens as text.
        special = add_special_tokens and not templated
        (encoding,) = self.tokenizer.encode_batch([text], add_special_tokens=special)
        return list(encoding.ids)
