"""Texts as the demo's model reads them, for a head of the demo.

The environment variable ``DEMO_HEADS`` names directories with further heads for the demo's model, divided as
in PATH. The demo ships none of type ``block``; such a head has to be trained first.
"""

import os
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafters.build import load_drafter
from drafters.features import FeatureTap
from drafters.parallel import ParallelDrafter

ROOT = Path(__file__).parents[2]
DEMO, EXPORT = ROOT / "demo", ROOT / "export"
# Names of shipped heads, and directories of others.
HEADS = ("ctc", *filter(None, os.environ.get("DEMO_HEADS", "").split(os.pathsep)))


@torch.no_grad()
def demo_texts(name: str, *, count: int, length: int) -> tuple[ParallelDrafter, list[Tensor], list[Tensor]]:
    """A head of ``HEADS``, and of every text the features [length - 1, F*H] and the token after each."""
    base = AutoModelForCausalLM.from_pretrained(DEMO / "backbone", dtype=torch.float32)
    head = load_drafter(DEMO / "heads" / name).attach_model(base).eval()
    assert isinstance(head, ParallelDrafter)
    head.tabulate()
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "backbone")
    files = [EXPORT / f"{kind}_text.txt" for kind in ("quality", "calibration")]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    parts = tokenizer(text, return_tensors="pt").input_ids[:, : count * length].split(length, dim=1)
    tap = FeatureTap(base, head.config.target_layer_ids)
    texts, following = [], []
    for ids in parts:
        base(ids)
        texts.append(tap.take()[0, :-1])
        following.append(ids[0, 1:])
    tap.remove()
    return head, texts, following
