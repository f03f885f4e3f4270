"""A tiny random target model, draft heads for it and their bundles, each made once a session."""

import gc
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from filelock import FileLock

if TYPE_CHECKING:
    from drafters.base import Drafter
    from export.verify.host_kernels import HostKernels

# Threads of torch gain nothing on models this small, and wait for each other on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Hypothesis measures no time, because a busy machine would fail a test that is right. Where it finds the
# environment variable CI, its examples are the same in every run.
hypothesis.settings.register_profile(
    "suite", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")

# One parallel drafter of every kind, as lines of a TOML file for one training run.
PARALLEL_HEADS = {
    "ctc": "",
    "ctc-markov": 'transition = "markov"\nattention_window = 24',
    "ctc-mlp": 'transition = "mlp"\nframe_start = "fused"\nsoft_labels = 0.5\nstart_size = 24\n'
    "draft_vocab_size = 120",
    "ctc-residual": 'trunk = "residual"',
    "block": 'drafter_type = "block"\nnum_frames = 5\nnum_labels = 5',
    "block-mlp": 'drafter_type = "block"\ntransition = "mlp"\nnum_layers = 2',
    "dspark": 'drafter_type = "block"\ntrunk = "dspark"\ntransition = "markov"\nmask_token_id = 1',
    "dflash": 'drafter_type = "block"\ntrunk = "dflash"\nmask_token_id = 1',
    "medusa": 'drafter_type = "medusa"\nown_lm_head = true\nsoft_labels = 1',
}
PROMPTS = ("How many?", "What is the sum of 12 and 30?", "x", "Ünïcödé ✓ text", "Why not?")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}Q: {{ message['content'] }}\nA:"
    "{% else %} {{ message['content'] }}{{ eos_token }}\n{% endif %}"
    "{% endfor %}"
)


def save_tiny_tokenizer(directory: Path) -> int:
    """Write a byte-level tokenizer (256 bytes, eos, pad) with a chat template; returns its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|endoftext|>", "<|pad|>"]
    vocab = {token: index for index, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=specials[0], pad_token=specials[1], model_max_length=512
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    return len(fast)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of training in the middle, where the second of two workers begins.

    They need few of the bundles that the first worker makes in the meantime. Otherwise each worker would
    often wait until the other has made a bundle that both need.
    """
    order = ("runtime", "benchmarks", "triton_repo", "", "training", "drafters", "integrations")
    root = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        package = item.path.relative_to(root).parts[0]
        package = "" if package.endswith(".py") else package
        return order.index(package) if package in order else len(order)

    items.sort(key=place)


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_interrupts() -> None:
    """Where a shell started the tests in the background, they and their children would ignore Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_search() -> None:
    """Let the search for garbage leave out what earlier modules have left, most of it imported libraries.

    It would go through nearly a million objects, which takes half a second, and every build asks for it.
    """
    gc.collect()
    gc.freeze()


# ``once(name, make)``: the directory of that name; ``make`` fills it for the first that asks.
Once = Callable[[str, Callable[[Path], None]], Path]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Once:
    """Directories that the workers of a run share, since making them takes longer than most tests."""
    root = tmp_path_factory.getbasetemp()
    root = root if worker_id == "master" else root.parent

    def get(name: str, make: Callable[[Path], None]) -> Path:
        directory, done = root / "once" / name, root / "once" / f"{name}.done"
        directory.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(root / "once" / f"{name}.lock"):
            if not done.exists():
                shutil.rmtree(directory, ignore_errors=True)
                directory.mkdir()
                make(directory)
                done.touch()
        return directory

    return get


@pytest.fixture(scope="session")
def tiny_model_dir(once: Once) -> Path:
    """A random two-layer Llama whose greedy text varies, with a tokenizer."""
    return once("tiny-model", write_tiny_model) / "model"


def write_tiny_model(parent: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = parent / "model"
    size = save_tiny_tokenizer(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,  # at the usual 0.02 greedy text is one token, repeated
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


@pytest.fixture(scope="session")
def make_tiny_head(tiny_model_dir: Path) -> Callable[..., "Drafter"]:
    """Random draft heads of any type for the tiny model: ``make_tiny_head("block", transition="mlp")``."""
    import torch
    from safetensors.torch import load_file

    from drafters.build import build_drafter
    from drafters.config import DrafterConfig

    base = load_file(tiny_model_dir / "model.safetensors")

    def make(drafter_type: str = "ctc", **settings: Any) -> "Drafter":
        trunk = settings.setdefault("trunk", "residual" if drafter_type == "medusa" else "attention")
        settings.setdefault("num_layers", int(trunk == "attention" and drafter_type != "hydra"))
        config = DrafterConfig(
            vocab_size=base["lm_head.weight"].shape[0],
            hidden_size=64,
            intermediate_size=128,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            base_model="model",
            drafter_type=drafter_type,
            **{"num_frames": 4, "base_num_layers": 2, "target_layer_ids": (0, 1), **settings},
        )
        torch.manual_seed(1)
        head = build_drafter(config)
        if head.draft_token_ids is not None:
            chosen = torch.randperm(config.vocab_size)[: config.label_count]
            head.set_draft_vocabulary(chosen.sort().values)
        head.attach_base(base["model.embed_tokens.weight"], base["lm_head.weight"])
        head.start_from(base["model.norm.weight"])
        with torch.no_grad():
            for parameter in head.parameters():
                # Many parameters start at zero, where they would have no effect.
                parameter.add_(torch.randn_like(parameter) * 0.1)
        return head.eval()

    return make


@pytest.fixture(scope="session")
def tiny_drafter_dir(make_tiny_head: Callable[..., "Drafter"], once: Once) -> Path:
    """A random CTC draft head for the tiny model."""
    parent = once("tiny-drafter", lambda parent: make_tiny_head().save_pretrained(parent / "drafter"))
    return parent / "drafter"


@pytest.fixture(scope="session")
def tiny_bundle_dir(
    tiny_model_dir: Path,
    tiny_drafter_dir: Path,
    copied_graphs: Callable[..., AbstractContextManager[None]],
    once: Once,
) -> Path:
    """The tiny model and its CTC head as an engine bundle. Read only: copy it before changing it."""
    from export.build_engines import build

    def make(parent: Path) -> None:
        with copied_graphs():
            build(tiny_model_dir, parent / "bundle", drafter_dir=tiny_drafter_dir)

    return once("tiny-bundle", make) / "bundle"


@pytest.fixture(scope="session")
def copied_graphs(once: Once) -> Callable[..., AbstractContextManager[None]]:
    """``with copied_graphs(backbone=BUNDLE):`` makes exports take that bundle's graph instead of tracing it.

    Tracing takes seconds. A copied graph is compared with PyTorch like a traced one. A graph whose contract
    differs from the bundle's is traced. The exporter changes the graphs with weights after that, so they are
    kept as they were traced where a bundle is built ``with copied_graphs():``. A model with other weights, as
    smoothing leaves them, is traced once.
    """
    import onnx_ir as ir

    from export import pipeline
    from export.step import build
    from runtime.core.bundle import Bundle

    store = once("traced-graphs", lambda _: None)
    really_write, really_trace, really_join = (
        pipeline.write_graph,
        pipeline.trace_standard,
        build.sampled_accept_graph,
    )

    def place(graph: Path) -> Path:
        """Where the graph is that was traced for this file of a bundle."""
        files = (graph, graph.with_name(f"{graph.name}.data"))
        content = b"".join(file.read_bytes() for file in files if file.exists())
        return store / f"{hashlib.sha256(content).hexdigest()}.onnx"

    def weights_of(module: Any) -> str:
        digest = hashlib.sha256()
        for parameter in module.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()

    def keep(model: Any, path: Path) -> None:
        written = path.with_suffix(f".{os.getpid()}")
        ir.save(model, written)
        written.replace(path)

    @contextmanager
    def copied(**bundles: Path) -> Iterator[None]:
        def copy_of(contract: Any, module: Any = None) -> Any:
            for name, source in bundles.items():
                if Bundle.load(source).manifest.graphs[name] == contract:
                    graph = source / f"{name}.onnx"
                    if name not in ("backbone", "drafter", "streaming"):
                        return ir.load(graph)
                    kept = place(graph)
                    if not kept.exists():
                        return None
                    weights = weights_of(module)
                    if kept.with_suffix(".weights").read_text() != weights:
                        kept = kept.with_suffix(f".{weights}")
                        if not kept.exists():
                            keep(really_trace(module, contract), kept)
                    return ir.load(kept)
            return None

        def trace(module: Any, contract: Any) -> Any:
            return copy_of(contract, module) or really_trace(module, contract)

        def join(contract: Any, length: int) -> Any:
            return copy_of(contract) or really_join(contract, length)

        def write(module: Any, contract: Any, path: Path, *arguments: Any, **options: Any) -> Any:
            def trace_and_keep(module: Any, contract: Any) -> Any:
                model = trace(module, contract)
                keep(model, kept)
                return model

            kept, weights = store / f"{os.getpid()}.onnx", weights_of(module)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(pipeline, "trace_standard", trace_and_keep)
                written = really_write(module, contract, path, *arguments, **options)
            place(path).with_suffix(".weights").write_text(weights)
            kept.replace(place(path))
            return written

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline, "write_graph", write)
            patch.setattr(pipeline, "trace_standard", trace)
            patch.setattr(build, "trace_standard", trace)
            patch.setattr(build, "sampled_accept_graph", join)
            yield

    return copied


@pytest.fixture(scope="session")
def make_tiny_bundle(
    tiny_model_dir: Path,
    tiny_bundle_dir: Path,
    trained_heads_dir: Path,
    copied_graphs: Callable[..., AbstractContextManager[None]],
    once: Once,
) -> Callable[..., Path]:
    """Builds bundles of other draft heads for the tiny model, each once. Read only."""
    from export.build_engines import build
    from export.options import COLUMNS, Options

    def make(drafter_dir: Path, options: Options | None = None) -> Path:
        options = options or Options()
        key = hashlib.sha256(f"{drafter_dir}{options}".encode()).hexdigest()[:16]
        return once(f"bundle-{key}", lambda parent: write(drafter_dir, options, parent / "bundle")) / "bundle"

    def write(drafter_dir: Path, options: Options, directory: Path) -> None:
        graphs = {"backbone": tiny_bundle_dir}
        exact = replace(
            options,
            precision="fp32",
            drafter_precision="fp32",
            lm_head=None,
            quantize_embedding=False,
            float_products=False,
            int8_scales=COLUMNS,
            int4_block_size=Options.int4_block_size,
            step_nodes=None,
        )
        if options != exact:  # the exporter rounds the weights after it has traced the exact head
            graphs["drafter"] = make(drafter_dir, exact)
        if options.step_nodes and drafter_dir != first_step_head:
            # The graphs that accept are the same for all heads of as many frames.
            graphs |= dict.fromkeys(("accept", "accept_sampled", "search_0"), make(first_step_head, options))
        with copied_graphs(**graphs):
            build(tiny_model_dir, directory, drafter_dir=drafter_dir, options=options)

    first_step_head = trained_heads_dir / "ctc"
    return make


@pytest.fixture(scope="session")
def tiny_step_bundle(make_tiny_bundle: Callable[..., Path], trained_heads_dir: Path) -> Path:
    """A trained CTC head's bundle with the graphs of steps of 0, 4 and 8 draft nodes. Read only."""
    from export.options import Options

    return make_tiny_bundle(trained_heads_dir / "ctc", Options(step_nodes=(4, 8)))


@pytest.fixture(scope="session")
def host_kernels() -> "HostKernels":
    """The kernels of a step on the host."""
    from export.verify.host_kernels import HostKernels, compiler

    if compiler() is None:
        pytest.skip("g++ compiles the kernels for the host, and is not installed")
    return HostKernels()


# Autoregressive heads whose steps run on a device. With as many frames as the CTC head they share its graphs.
LEVEL_HEADS: dict[str, dict[str, Any]] = {
    "hydra": {"drafter_type": "hydra"},
    "hydra++": {"drafter_type": "hydra", "num_layers": 1, "head_depth": 2},
    "eagle": {"drafter_type": "eagle"},
}


@pytest.fixture(scope="session")
def level_bundle_of(
    tiny_model_dir: Path,
    tiny_bundle_dir: Path,
    tiny_step_bundle: Path,
    make_tiny_head: Callable[..., "Drafter"],
    copied_graphs: Callable[..., AbstractContextManager[None]],
    once: Once,
) -> Callable[[str], Path]:
    """Bundles of ``LEVEL_HEADS``, random ones, with the graphs of steps of 0, 2 and 8 draft nodes. Read only.

    The host leaves out no level, as a device does not.
    """
    from export.build_engines import build
    from export.options import Options

    def write(name: str, parent: Path) -> None:
        make_tiny_head(**LEVEL_HEADS[name]).save_pretrained(parent / "head")
        graphs = dict.fromkeys(("accept", "accept_sampled", "search_0", "commit"), tiny_step_bundle)
        if name != "hydra":
            graphs |= dict.fromkeys(("search_2", "search_8", "expand"), get("hydra"))
        options = Options(step_nodes=(2, 8), min_level_probability=0)
        with copied_graphs(backbone=tiny_bundle_dir, **graphs):
            build(tiny_model_dir, parent / "bundle", drafter_dir=parent / "head", options=options)

    def get(name: str) -> Path:
        return once(f"level-bundle-{name}", lambda parent: write(name, parent)) / "bundle"

    return get


@pytest.fixture(scope="session")
def step_bundle_of(
    make_tiny_bundle: Callable[..., Path], trained_heads_dir: Path, level_bundle_of: Callable[[str], Path]
) -> Callable[[str], Path]:
    """Bundles with the graphs of device steps, of ``PARALLEL_HEADS`` and ``LEVEL_HEADS`` by name."""
    from export.options import Options

    def get(name: str) -> Path:
        if name in LEVEL_HEADS:
            return level_bundle_of(name)
        return make_tiny_bundle(trained_heads_dir / name, Options(step_nodes=(4, 8)))

    return get


@pytest.fixture(scope="session")
def stream_bundle_of(
    tiny_model_dir: Path, copied_graphs: Callable[..., AbstractContextManager[None]], once: Once
) -> Callable[[str], Path]:
    """Bundles of ``tests.stream_heads.HEADS`` by name, with the head in ``head`` beside them. Read only."""

    def write(name: str, parent: Path) -> None:
        from export.build_engines import build
        from tests.stream_heads import HEADS, fit, load_model, make_stream_head

        fit(make_stream_head(load_model(tiny_model_dir), **HEADS[name])).save_pretrained(parent / "head")
        with copied_graphs():
            build(tiny_model_dir, parent / "bundle", drafter_dir=parent / "head")

    return lambda name: once(f"stream-bundle-{name}", lambda parent: write(name, parent)) / "bundle"


@pytest.fixture(scope="session")
def own_pass_bundle_of(
    tiny_model_dir: Path,
    tiny_step_bundle: Path,
    stream_bundle_of: Callable[[str], Path],
    copied_graphs: Callable[..., AbstractContextManager[None]],
    once: Once,
) -> Callable[[str], Path]:
    """The same heads with streams in a pass of their own; ``streaming`` with device steps too. Read only."""
    from export.build_engines import build
    from export.options import OWN_PASS, Options

    def write(name: str, parent: Path) -> None:
        head = stream_bundle_of(name).parent / "head"
        options = Options(stream_pass=OWN_PASS, step_nodes=(4,) if name == "streaming" else None)
        graphs = dict.fromkeys(("accept", "accept_sampled", "search_0", "commit"), tiny_step_bundle)
        with copied_graphs(backbone=stream_bundle_of(name), **graphs):
            build(tiny_model_dir, parent / "bundle", drafter_dir=head, options=options)

    return lambda name: once(f"own-pass-bundle-{name}", lambda parent: write(name, parent)) / "bundle"


@pytest.fixture(scope="session")
def tiny_engine_bundle(tiny_step_bundle: Path, once: Once) -> Path:
    """The same with engines for three sequences, for ``tests.engine_bundles.device_of_memory``. Read only."""
    from tests.engine_bundles import as_engine_bundle

    def make(parent: Path) -> None:
        as_engine_bundle(
            tiny_step_bundle, parent / "bundle", max_num_seqs=3, max_context=256, prefill_chunk=16
        )

    return once("tiny-engine-bundle", make) / "bundle"


@dataclass(frozen=True)
class TrainedHead:
    """A head that has learnt what its model writes after ``prompts``, and its bundle."""

    name: str
    directory: Path
    bundle: Path
    prompts: tuple[str, ...]


@pytest.fixture(scope="session")
def trained_heads_dir(tiny_model_dir: Path, once: Once) -> Path:
    """A run that trained ``PARALLEL_HEADS`` on so little text that they know it by heart."""
    return once("trained-heads", lambda directory: train_heads(tiny_model_dir, directory)) / "out"


def train_heads(tiny_model_dir: Path, directory: Path) -> None:
    from accelerate.state import AcceleratorState

    from training import train
    from training.loop import writer

    with (directory / "heads.toml").open("w", encoding="utf-8") as stream:
        for name, settings in PARALLEL_HEADS.items():
            sizes = "" if "num_frames" in settings else "num_frames = 4\nnum_labels = 4"
            stream.write(f'[[head]]\nname = "{name}"\nlearning_rate = 0.01\n{sizes}\n{settings}\n')
    (directory / "data.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS), encoding="utf-8"
    )
    paths = ["--model", str(tiny_model_dir), "--data", str(directory / "data.jsonl")]
    paths += ["--out", str(directory / "out"), "--heads", str(directory / "heads.toml")]
    flags = "--precision fp32 --max-new-tokens 24 --holdout 0.01 --steps 60 --warmup 10 --batch-size 4"
    flags += " --num-anchors 12 --eval-every 20 --target-layer-ids 0 1"  # the tiny bundle's layers
    # accelerate keeps its first settings for the life of a process.
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "MIN_CALIBRATION_STEPS", 1)  # these texts are short
        assert train.main([*paths, *flags.split()]) == 0
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session", params=list(PARALLEL_HEADS))
def trained_head(
    request: pytest.FixtureRequest, trained_heads_dir: Path, make_tiny_bundle: Callable[..., Path]
) -> TrainedHead:
    """Each head of ``PARALLEL_HEADS`` in turn."""
    directory = trained_heads_dir / request.param
    return TrainedHead(request.param, directory, make_tiny_bundle(directory), PROMPTS)
