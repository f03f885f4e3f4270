"""The image and the Kubernetes manifest agree with the launcher and with a running server."""

import json
import re
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.triton_repo.servers import PATIENCE, Server
from triton_repo.serve import parse_args
from triton_repo.triton.server import DRAIN_SECONDS, PORTS

DIRECTORY = Path(__file__).resolve().parents[2] / "triton_repo"


@pytest.fixture
def dockerfile() -> str:
    return (DIRECTORY / "Dockerfile").read_text()


@pytest.fixture
def deployment() -> dict[str, Any]:
    manifest, _, _ = yaml.safe_load_all((DIRECTORY / "kubernetes.yaml").read_text())
    return dict(manifest["spec"]["template"]["spec"])


def entrypoint(dockerfile: str) -> list[str]:
    (command,) = re.findall(r"^ENTRYPOINT (.*)$", dockerfile, re.MULTILINE)
    return list(json.loads(command))


def test_the_arguments_are_the_launcher_s(dockerfile: str, deployment: dict[str, Any]) -> None:
    (container,) = deployment["containers"]
    command, arguments = entrypoint(dockerfile)[:4], entrypoint(dockerfile)[4:]
    assert command == ["python3", "-m", "ctc_speculator", "serve"]
    args, rest = parse_args([*arguments, *container["args"]])
    assert rest == []
    assert (args.host, str(args.bundle)) == ("0.0.0.0", "/engines")
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {name: getattr(args, f"{name}_port") for name in PORTS}
    (exposed,) = re.findall(r"^EXPOSE (.*)$", dockerfile, re.MULTILINE)
    assert [int(number) for number in exposed.split()] == list(ports.values())
    assert str(args.threads) == container["resources"]["limits"]["cpu"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["engines"] == str(args.bundle)


def test_the_gpu_variant_changes_what_there_is(dockerfile: str, deployment: dict[str, Any]) -> None:
    """Its limits are the GPUs that the launcher is told of, and all it names exists in the manifest."""
    kustomization = yaml.safe_load((DIRECTORY / "kustomization.yaml").read_text())
    assert kustomization["resources"] == ["kubernetes.yaml"]
    (patch_file,) = (patch["path"] for patch in kustomization["patches"])
    patch = yaml.safe_load((DIRECTORY / patch_file).read_text())
    manifest, _, _ = yaml.safe_load_all((DIRECTORY / "kubernetes.yaml").read_text())
    for key in ("apiVersion", "kind"):
        assert patch[key] == manifest[key]
    assert patch["metadata"]["name"] == manifest["metadata"]["name"]
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    (base,) = deployment["containers"]
    assert container.keys() <= base.keys()
    assert container["name"] == base["name"]
    assert f"-t {container['image'].partition(':')[0]} " in dockerfile
    args, rest = parse_args([*entrypoint(dockerfile)[4:], *container["args"]])
    assert rest == []
    assert len(args.gpus) == int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert str(args.threads) == base["resources"]["limits"]["cpu"]
    probe = container["livenessProbe"]["httpGet"]
    assert probe == base["readinessProbe"]["httpGet"]


def test_the_image_installs_extras_that_exist(dockerfile: str) -> None:
    project = tomllib.loads((DIRECTORY.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = re.findall(r"EXTRAS=([\w,-]+)", dockerfile)
    assert found == ["cpu,tensorrt-rtx,serve", "cpu,serve"]
    for extras in found:
        assert set(extras.split(",")) <= project["optional-dependencies"].keys()


def test_requests_have_the_time_to_end(deployment: dict[str, Any]) -> None:
    (container,) = deployment["containers"]
    sleep = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert deployment["terminationGracePeriodSeconds"] > DRAIN_SECONDS + sleep


def test_the_probes_succeed(server: Server, deployment: dict[str, Any]) -> None:
    (container,) = deployment["containers"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        url = f"http://localhost:{server.http_port}{container[name]['httpGet']['path']}"
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            assert answer.status == 200


def test_what_is_written_can_be_written(dockerfile: str, deployment: dict[str, Any]) -> None:
    """The file system is read-only except for the mounted volumes."""
    (container,) = deployment["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    caches = re.findall(r"^ENV (?:NUMBA_CACHE_DIR|CTC_OPERATOR_CACHE)=(.*)$", dockerfile, re.MULTILINE)
    assert len(caches) == 2
    writable = {m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")}
    assert {str(Path(cache).parent) for cache in caches} <= writable
    assert {"/tmp", "/dev/shm"} <= writable
    (user,) = re.findall(r"^USER (.*)$", dockerfile, re.MULTILINE)
    assert int(user) == deployment["securityContext"]["runAsUser"]
