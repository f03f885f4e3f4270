"""A draft head for ``generate`` of Transformers.

    head = SpeculativeHead.from_pretrained("heads/ctc", model)
    model.generate(**inputs, custom_generate=head)

A head of the hub is used by its name: ``model.generate(**inputs, custom_generate="USER/HEAD",
trust_remote_code=True)`` runs the ``custom_generate/generate.py`` of that repository, which
``integrations.transformers.publish`` has written. It receives all arguments of ``generate``, and calls
``generate_with``.
"""

import weakref
from pathlib import Path
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import StoppingCriteriaList, StopStringCriteria
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.utils import cached_file

from drafters.base import Drafter
from drafters.build import load_drafter
from drafters.config import CONFIG_NAME, WEIGHTS_NAME, DrafterConfigError
from integrations.transformers.checks import (
    GenerateError,
    check_config,
    check_head,
    check_model,
    check_options,
    check_tree_passes,
    prompts_of,
)
from integrations.transformers.drafts import DraftOptions, new_drafts
from integrations.transformers.loop import TargetPasses, Text, TokenChooser, decode, padded, steps

USUAL_OPTIONS = DraftOptions()
# The heads that ``generate_with`` has loaded for a model, by their names and options.
_heads: WeakKeyDictionary[Any, dict[tuple[str, int, str], "SpeculativeHead"]] = WeakKeyDictionary()


class SpeculativeHead:
    """A draft head of any type with its target model: a value of ``custom_generate``.

    drafter: the head, in the model's precision and on its device
    tokens_per_step: new tokens for each verify pass of the last call, over its sequences; 0.0 before one
    """

    def __init__(self, drafter: Drafter, model: Any, options: DraftOptions = USUAL_OPTIONS):
        """Raises GenerateError if the head was made for another model, or the model cannot verify trees."""
        check_options(options)
        check_model(model)
        check_head(drafter, model)
        self._window = check_tree_passes(model)
        try:
            drafter.attach_base(model.get_input_embeddings().weight, model.get_output_embeddings().weight)
        except DrafterConfigError as error:
            raise GenerateError(str(error)) from error
        self.drafter = drafter.eval().to(model.device)
        # The buffers keep their precision, because they hold the frequencies of the rotary embedding.
        for parameter in drafter.parameters():
            parameter.data = parameter.data.to(model.dtype)
        # What depends on labels alone is computed once: it takes a product with the whole LM head.
        drafter.tabulate()
        self.options = options
        self.tokens_per_step = 0.0
        # The reference is weak, so that ``_heads`` does not keep the model.
        self._model: weakref.ref[Any] = weakref.ref(model)

    @classmethod
    def from_pretrained(
        cls,
        directory: Path | str,
        model: Any,
        *,
        num_nodes: int = USUAL_OPTIONS.num_nodes,
        tree: str = USUAL_OPTIONS.shape,
    ) -> Self:
        """Load a head for a causal LM of Transformers.

        directory: as training writes it, or the name of a repository on the Hugging Face hub
        num_nodes: draft tokens that a step verifies
        tree: ``tree``, or ``chain`` for the best path alone
        Raises GenerateError for a name that is neither, DrafterConfigError for a directory without a head.
        """
        return cls(
            load_drafter(head_directory(directory)), model, DraftOptions(num_nodes=num_nodes, shape=tree)
        )

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        token_streamer: Any = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """What ``generate`` calls: input_ids [B, P] int64 -> [B, n] int64, or a GenerateDecoderOnlyOutput.

        token_streamer: a streamer for one sequence, under a name that ``generate`` hands to a callable; it
            keeps ``streamer`` and ``synced_gpus``
        Raises GenerateError for what cannot be decoded with drafts.
        """
        known: Any = self._model()
        if known is not model:
            raise GenerateError("model: expected the model that the head was loaded for, got another one")
        batch_size = input_ids.shape[0]
        check_config(generation_config, logits_processor, batch_size)
        prompts = prompts_of(input_ids, generation_config, model_kwargs, window=self._window, model=model)
        if token_streamer is not None:
            if batch_size > 1:
                raise GenerateError(f"token_streamer: expected one sequence, got {batch_size}")
            # ``generate`` does this with its own.
            token_streamer.put(input_ids.cpu())
        chooser = TokenChooser(
            logits_processor,
            stopping_criteria,
            do_sample=bool(generation_config.do_sample),
            keep_scores=bool(generation_config.return_dict_in_generate and generation_config.output_scores),
            keep_logits=bool(generation_config.return_dict_in_generate and generation_config.output_logits),
            on_token=None
            if token_streamer is None
            else lambda token: token_streamer.put(torch.tensor([token])),
        )
        with torch.no_grad(), TargetPasses(model, self.drafter.config.target_layer_ids) as passes:
            drafts = new_drafts(self.drafter, batch_size, self.options)
            texts, self.tokens_per_step = decode(
                passes, drafts, chooser, prompts, num_nodes=self.options.num_nodes
            )
        if token_streamer is not None:
            token_streamer.end()
        return _output(texts, prompts.cache, generation_config, input_ids.device)


# The old name, for one release.
CTCHead = SpeculativeHead


def head_directory(name: Path | str) -> Path:
    """A directory as it is; a repository of the hub as the directory that it is downloaded to."""
    if Path(name).is_dir():
        return Path(name)
    try:
        files = [str(cached_file(str(name), file)) for file in (CONFIG_NAME, WEIGHTS_NAME)]
    except OSError as error:
        raise GenerateError(
            f"directory: expected a head's directory, or a repository of the hub, got {str(name)!r}: {error}"
        ) from error
    return Path(files[0]).parent


def _output(
    texts: list[Text], cache: Any, config: Any, device: torch.device
) -> Tensor | GenerateDecoderOnlyOutput:
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    padding = next((token for token in (config.pad_token_id, *ends) if token is not None), 0)
    sequences = padded(texts, padding).to(device)
    if not config.return_dict_in_generate:
        return sequences
    fields: dict[str, Any] = {"sequences": sequences, "past_key_values": cache}
    if config.output_scores:
        fields["scores"] = steps([text.scores for text in texts])
    if config.output_logits:
        fields["logits"] = steps([text.logits for text in texts])
    return GenerateDecoderOnlyOutput(**fields)


def generate_with(repository: str, model: Any, arguments: dict[str, Any]) -> Any:
    """What ``model.generate(**arguments)`` returns, decoded with the head of a repository or directory.

    arguments: those of ``generate``, and ``num_nodes`` and ``tree`` of ``SpeculativeHead.from_pretrained``
    Raises what loading the head raises, and GenerateError.
    """
    arguments = dict(arguments)
    options = (
        arguments.pop("num_nodes", USUAL_OPTIONS.num_nodes),
        arguments.pop("tree", USUAL_OPTIONS.shape),
    )
    streamer, tokenizer = arguments.pop("streamer", None), arguments.pop("tokenizer", None)
    # In the order in which ``generate`` looks for them.
    configs = (arguments.get("generation_config"), model.generation_config)
    found = [arguments.get("stop_strings"), *(getattr(config, "stop_strings", None) for config in configs)]
    stop_strings = next((strings for strings in found if strings is not None), None)
    if stop_strings is not None and tokenizer is not None:
        # ``generate`` does not hand the tokenizer to a callable, but a criterion reaches it.
        criteria = StoppingCriteriaList(arguments.get("stopping_criteria") or [])
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
        # None replaces what the configurations hold.
        arguments |= {"stopping_criteria": criteria, "stop_strings": None}
    head = _head(repository, model, *options)
    return model.generate(**arguments, custom_generate=head, token_streamer=streamer)


def _head(repository: str, model: Any, num_nodes: int, tree: str) -> SpeculativeHead:
    loaded = _heads.setdefault(model, {})
    key = (repository, num_nodes, tree)
    if key not in loaded:
        loaded[key] = SpeculativeHead.from_pretrained(repository, model, num_nodes=num_nodes, tree=tree)
    return loaded[key]
