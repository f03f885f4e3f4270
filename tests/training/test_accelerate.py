"""The accelerate configurations: that accelerate understands every key, and a launch of two processes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors.torch import load_file

from training import train

ROOT = Path(train.__file__).parents[1]
CONFIGS = ROOT / "training" / "accelerate"
# Two processes add the same gradients in another order, and AdamW divides by their size.
PROCESSES_TOL = 1e-5
# Muon makes small gradients as large as the others, their rounding included.
MUON_TOL = 0.25


@pytest.mark.parametrize(
    ("name", "kind"), [("ddp.yaml", DistributedType.MULTI_GPU), ("fsdp.yaml", DistributedType.FSDP)]
)
def test_accelerate_reads_the_file(name: str, kind: DistributedType) -> None:
    """Its loader refuses keys that it does not know."""
    config = load_config_from_file(str(CONFIGS / name))
    assert config.distributed_type == kind
    assert (config.num_machines, config.machine_rank, config.num_processes) == (1, 0, 8)
    assert not config.use_cpu
    assert config.mixed_precision == "no"


# Rarely a thread of torch's gloo backend aborts a process that has done all its work and exits, and rarely a
# process on a busy machine dies inside torch (SIGSEGV, seen once in a resumed sharded run).
CRASH = "exitcode: -11"
EXIT_RACE = "terminate called without an active exception"


def launched_environment(name: str, *flags: str) -> dict[str, str]:
    """What the processes of a launch find in their environment."""
    argv = ["--config_file", str(CONFIGS / name), *flags, "-m", "training.train"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(argv))
    environment: dict[str, str] = prepare_multi_gpu_env(args)
    return environment


def test_fsdp_is_version_two_with_what_the_file_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike the file's own keys, those of fsdp_config are not checked when they are read."""
    environment = launched_environment("fsdp.yaml")
    assert environment["ACCELERATE_USE_FSDP"] == "true"
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.auto_wrap_policy is None
    assert environment["FSDP_OFFLOAD_PARAMS"] == "false"
    assert not plugin.cpu_ram_efficient_loading
    assert not plugin.activation_checkpointing
    assert environment["FSDP_STATE_DICT_TYPE"] == "FULL_STATE_DICT"
    file = load_config_from_file(str(CONFIGS / "fsdp.yaml"))
    known = {action.dest for action in launch_command_parser()._actions}
    assert set(file.fsdp_config) <= known


@pytest.mark.parametrize("name", ["ddp.yaml", "fsdp.yaml"])
def test_flags_of_several_hosts_come_before_the_file(name: str) -> None:
    argv = ["--num_machines", "2", "--machine_rank", "1", "--num_processes", "16"]
    argv += ["--main_process_ip", "10.0.0.1", "--main_process_port", "29501"]
    arguments = launch_command_parser().parse_args(
        ["--config_file", str(CONFIGS / name), *argv, "-m", "training.train"]
    )
    args, _, _ = _validate_launch_command(arguments)
    prepare_multi_gpu_env(args)
    found = (args.nnodes, args.node_rank, args.nproc_per_node, args.rdzv_backend, args.rdzv_endpoint)
    assert [str(value) for value in found] == ["2", "1", "8", "static", "10.0.0.1:29501"]
    assert args.module


# The runs of one launch, in the processes that accelerate starts. FSDP on the CPU, where accelerate trains
# with DDP because it looks for an accelerator first, is put in its place. A sharded run is interrupted in its
# third step and resumed from its second.
SCRIPT = """
import json, os, sys
import accelerate
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule
from training import train
from training.loop import run
from training.head_set import HeadSet

def sharded(*arguments, **options):
    accelerator = accelerate.Accelerator(*arguments, **options)
    plugin = FullyShardedDataParallelPlugin()
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    AcceleratorState._shared_state["distributed_type"] = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    assert accelerator.is_fsdp2
    return accelerator

def forward(heads, *given):
    global calls
    calls += 1
    assert isinstance(heads, FSDPModule)
    if calls == 3:
        raise KeyboardInterrupt
    return real(heads, *given)

# One process group serves all runs.
accelerate.Accelerator.end_training = lambda accelerator: None
replicated, environment, *runs = json.loads(sys.argv[1])
assert train.main(replicated) == 0
os.environ |= environment
run.Accelerator = sharded
real, HeadSet.forward = HeadSet.forward, forward
for argv in runs:
    calls = 0
    for status, flags in ((130, []), (0, ["--resume"])):
        AcceleratorState._reset_state(reset_partial_state=True)
        assert train.main([*argv, *flags]) == status
torch.distributed.destroy_process_group()
"""
# The main process distils and reads the features. Two micro steps each: gradients are summed before and after
# they are averaged.
DDP = {"steps": 2, "labels": "distill", "max_new_tokens": 8, "cache_features": True}
HEADS = {
    "first": "num_frames = 4\nnum_labels = 3",
    "second": 'drafter_type = "block"\ntransition = "mlp"\nsoft_labels = 0.5\nnum_frames = 3\nnum_labels = 4',
    "third": 'drafter_type = "medusa"\nown_lm_head = true\nnum_frames = 2',
    # Its adapters are called by layers that are not the head's own.
    "fourth": 'drafter_type = "streaming"\nnum_layers = 1\nlearning_rate = 0.001\nnum_frames = 2',
}
# Muon's sharded products take long, and those of the other heads' matrices are the same.
MUON_HEADS = ("first", "fourth")


@pytest.fixture(scope="module")
def flags(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """A short run's arguments, with those given."""
    directory = tmp_path_factory.mktemp("accelerate")
    data = directory / "data.jsonl"
    sums = ({"question": f"{i} + {i + 1}?", "answer": f"That is {2 * i + 1}."} for i in range(20))
    data.write_text("".join(json.dumps(row) + "\n" for row in sums))
    for optimizer, names in (("adamw", HEADS), ("muon", MUON_HEADS)):
        text = "".join(f'[[head]]\nname = "{name}"\n{HEADS[name]}\n' for name in names)
        (directory / f"{optimizer}.toml").write_text(text)

    def made(out: Path, **changed: Any) -> list[str]:
        settings: dict[str, Any] = {
            "model": tiny_model_dir, "data": data, "out": out, "labels": "data",
            "precision": "fp32", "optimizer": "adamw", "warmup": 1, "batch-size": 2, "num-anchors": 4,
            "holdout": 0.2, "eval-every": 2, "save-every": 2,
        }  # fmt: skip
        settings |= {name.replace("_", "-"): value for name, value in changed.items()}
        settings["heads"] = directory / f"{settings['optimizer']}.toml"
        named = {name: () if value is True else (str(value),) for name, value in settings.items()}
        return [part for name, value in named.items() for part in (f"--{name}", *value)]

    return made


@pytest.fixture(scope="module")
def launched(flags: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes train on the CPU: with DDP in ``ddp``, with FSDP in ``fsdp`` and ``fsdp-muon``."""
    directory = tmp_path_factory.mktemp("launched")
    done = launch(flags, directory)
    if CRASH in done.stderr:
        directory = tmp_path_factory.mktemp("launched")
        done = launch(flags, directory)
    assert done.returncode == 0 or EXIT_RACE in done.stderr, done.stderr[-3000:]
    # The main process writes every head of every run once.
    assert done.stdout.count("wrote ") == 2 * len(HEADS) + len(MUON_HEADS)
    assert "broadcast_buffers" not in done.stderr
    return directory


def launch(flags: Callable[..., list[str]], directory: Path) -> subprocess.CompletedProcess[str]:
    script = directory / "runs.py"
    script.write_text(SCRIPT)
    runs = [
        flags(directory / "ddp", grad_accumulation=2, **DDP),
        {name: value for name, value in launched_environment("fsdp.yaml").items() if name not in os.environ},
        flags(directory / "fsdp", steps=3),
        flags(directory / "fsdp-muon", steps=3, optimizer="muon"),
    ]
    launcher = ["accelerate.commands.launch", "--config_file", str(CONFIGS / "ddp.yaml")]
    launcher += ["--num_processes", "2", "--main_process_port", "0"]
    return subprocess.run(
        [sys.executable, "-m", *launcher, str(script), json.dumps(runs)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def train_alone(argv: list[str]) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    assert train.main(argv) == 0
    AcceleratorState._reset_state(reset_partial_state=True)


def assert_close(found: Path, expected: Path) -> None:
    """The weights, and how good the heads were on the way."""
    for head in HEADS:
        ours, theirs = (load_file(out / head / "model.safetensors") for out in (found, expected))
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=PROCESSES_TOL, atol=PROCESSES_TOL)
        records = [json.loads((out / head / "training.json").read_text()) for out in (found, expected)]
        first, second = ([point["beta"] for point in record["curve"]] for record in records)
        assert first == second


@pytest.mark.slow
def test_ddp_on_two_processes_equals_one_with_twice_the_micro_steps(
    launched: Path, flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    """On the CPU, as the file says. One process alone would have seen only half of the batches."""
    train_alone(flags(tmp_path, grad_accumulation=4, **DDP))
    assert_close(launched / "ddp", tmp_path)


@pytest.mark.slow
def test_fsdp_interrupted_and_resumed_equals_one_process(
    launched: Path, flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Every process has a part of the heads, their gradients and moments; what is written is whole."""
    train_alone(flags(tmp_path, steps=3, grad_accumulation=2))
    assert_close(launched / "fsdp", tmp_path)
    # The checkpoint too: moments and all, one process could go on with it.
    found, expected = (
        load_file(out.with_name(f"{out.name}.run") / "checkpoint" / "state.safetensors")
        for out in (launched / "fsdp", tmp_path)
    )
    torch.testing.assert_close(found, expected, rtol=PROCESSES_TOL, atol=PROCESSES_TOL)


@pytest.mark.slow
def test_fsdp_with_muon_takes_the_same_way(
    launched: Path, flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Muon's matrix products are of bfloat16, and their sums over the processes are rounded once more."""
    one, begun = tmp_path / "one", tmp_path / "begun"
    train_alone(flags(one, steps=3, optimizer="muon", grad_accumulation=2))
    train_alone(flags(begun, steps=1, optimizer="muon", warmup=10**9))
    for head in MUON_HEADS:
        found, expected, start = (
            load_file(out / head / "model.safetensors") for out in (launched / "fsdp-muon", one, begun)
        )
        for name, value in expected.items():
            if name.startswith("lora.") and name.endswith("A.weight"):
                continue  # its gradient is mostly rounding while B, which starts at zero, is small
            way = (value - start[name]).norm()
            assert (found[name] - value).norm() <= MUON_TOL * way, name
