"""Time and peak memory of exporting a large random model, and proof that the bundle decodes.

python -m benchmarks.checks.export_memory --out build/export_memory
python -m benchmarks.checks.export_memory --layers 4 --out build/export_memory

The default is a Llama of TinyLlama's shape (1.1 billion parameters, 4.4 GB in float32). It is exported
by ``export/build_engines.py`` in a process of its own, whose peak resident memory is read afterwards.
The last line is one JSON object.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from runtime.bundle import Bundle
from runtime.decoder import SpeculativeDecoder

ROOT = Path(__file__).parents[1]
NEW_TOKENS = 8
MAX_SECONDS, MAX_RATIO = 300.0, 3.0


def write_model(directory: Path, layers: int) -> int:
    """A random Llama of TinyLlama's shape in shards, with a byte tokenizer; returns its bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(directory, max_shard_size="1GB")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return sum(p.numel() * p.element_size() for p in model.parameters())


@dataclass(frozen=True)
class Cost:
    """Of one export. Resident memory counts the pages of mapped weight files, which the system can
    take back; private memory is what the export itself holds."""

    seconds: float
    cpu_seconds: float
    peak_resident: int
    peak_private: int


def export(model: Path, out: Path) -> Cost:
    """Run the exporter in a child process and watch it."""
    command = [sys.executable, "export/build_engines.py", "--model", str(model), "--out", str(out)]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    child = subprocess.Popen(command, cwd=ROOT)
    peak = private = 0
    process = psutil.Process(child.pid)
    stopped = threading.Event()

    def sample() -> None:
        nonlocal peak, private
        while not stopped.wait(0.05):
            try:
                memory = process.memory_info()
            except psutil.NoSuchProcess:
                return
            peak = max(peak, memory.rss)
            private = max(private, memory.rss - memory.shared)

    sampler = threading.Thread(target=sample)
    sampler.start()
    code = child.wait()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    stopped.set()
    sampler.join()
    if code:
        raise SystemExit(f"the export failed with code {code}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(seconds, cpu, peak, private)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=22, help="decoder layers (default 22)")
    parser.add_argument("--out", type=Path, required=True, help="directory for the bundle and report.json")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    bundle = args.out.resolve() / "bundle"
    with tempfile.TemporaryDirectory(dir=args.out) as scratch:
        model = Path(scratch).resolve() / "model"
        # A process of its own, so that this one's memory stays free for the export.
        writer = [sys.executable, "-c", _WRITER, str(model), str(args.layers)]
        weights = int(subprocess.run(writer, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
        cost = export(model, bundle)
    external = sum(
        record.size
        for name, record in Bundle.load(bundle, verify=False).manifest.files.items()
        if name.endswith(".data")
    )
    began = time.perf_counter()
    decoder = SpeculativeDecoder.from_bundle(bundle, method="vanilla")
    loaded = time.perf_counter()
    tokens = [
        token
        for chunk in decoder.stream(list(range(32)), max_new_tokens=NEW_TOKENS, stop_token_ids=())
        for token in chunk.token_ids
    ]
    decoded = time.perf_counter()
    report = {
        "layers": args.layers,
        "weights_bytes": weights,
        "external_data_bytes": external,
        "export_seconds": round(cost.seconds, 1),
        "export_cpu_seconds": round(cost.cpu_seconds, 1),
        "peak_rss_bytes": cost.peak_resident,
        "peak_rss_over_weights": round(cost.peak_resident / weights, 3),
        "peak_private_over_weights": round(cost.peak_private / weights, 3),
        "load_seconds": round(loaded - began, 1),
        "decode_seconds": round(decoded - loaded, 1),
        "decoded_tokens": len(tokens),
        "passed": cost.seconds < MAX_SECONDS
        and cost.peak_resident < MAX_RATIO * weights
        and len(tokens) == NEW_TOKENS,
    }
    (args.out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(bundle)
    print(f"weights            {weights / 1e9:8.2f} GB, written {external / weights:.3f} times")
    print(
        f"export             {cost.seconds:8.1f} s (limit {MAX_SECONDS:.0f}), "
        f"{cost.cpu_seconds:.1f} s of processor time"
    )
    for name, peak in (("peak resident", cost.peak_resident), ("peak private", cost.peak_private)):
        print(
            f"{name:18} {peak / 1e9:8.2f} GB, {peak / weights:.2f} times the weights (limit {MAX_RATIO:.0f})"
        )
    print(f"decoded {len(tokens)} tokens  {decoded - loaded:8.1f} s after loading for {loaded - began:.1f} s")
    print(json.dumps(report))
    return 0 if report["passed"] else 1


_WRITER = """
import sys
from pathlib import Path
from benchmarks.checks.export_memory import write_model
print(write_model(Path(sys.argv[1]), int(sys.argv[2])))
"""

if __name__ == "__main__":
    raise SystemExit(main())
