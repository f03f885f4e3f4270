"""Decoding with a head of the Hugging Face hub, or of a directory, by its name.

``model.generate(**inputs, custom_generate="USER/HEAD", trust_remote_code=True)`` runs the
``custom_generate/generate.py`` of that repository, which ``integrations.transformers.publish`` has
written. It receives all arguments of ``generate``, and calls ``generate_with``.
"""

from typing import Any
from weakref import WeakKeyDictionary

from transformers import StoppingCriteriaList, StopStringCriteria

from integrations.transformers.drafts import DraftOptions
from integrations.transformers.head import CTCHead
from runtime.core.options import TREE

# Of every model, the heads that have been loaded for it, by their names and options.
_heads: WeakKeyDictionary[Any, dict[tuple[str, int, str], CTCHead]] = WeakKeyDictionary()


def generate_with(repository: str, model: Any, arguments: dict[str, Any]) -> Any:
    """What ``model.generate(**arguments)`` returns, decoded with the head of a repository or directory.

    arguments: those of ``generate``, and ``num_nodes`` and ``tree`` of ``CTCHead.from_pretrained``
    Raises what loading the head raises, and GenerateError.
    """
    arguments = dict(arguments)
    options = arguments.pop("num_nodes", DraftOptions.num_nodes), arguments.pop("tree", TREE)
    streamer, tokenizer = arguments.pop("streamer", None), arguments.pop("tokenizer", None)
    stop_strings = arguments.pop("stop_strings", None)
    if stop_strings is not None and tokenizer is not None:
        # ``generate`` does not hand the tokenizer to a callable, but a criterion reaches it.
        criteria = StoppingCriteriaList(arguments.get("stopping_criteria") or [])
        arguments["stopping_criteria"] = [*criteria, StopStringCriteria(tokenizer, stop_strings)]
        arguments["stopping_criteria"] = StoppingCriteriaList(arguments["stopping_criteria"])
    elif stop_strings is not None:
        arguments["stop_strings"] = stop_strings
    head = _head(repository, model, *options)
    return model.generate(**arguments, custom_generate=head, token_streamer=streamer)


def _head(repository: str, model: Any, num_nodes: int, tree: str) -> CTCHead:
    loaded = _heads.setdefault(model, {})
    key = (repository, num_nodes, tree)
    if key not in loaded:
        loaded[key] = CTCHead.from_pretrained(repository, model, num_nodes=num_nodes, tree=tree)
    return loaded[key]
