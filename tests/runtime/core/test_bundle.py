"""Bundles: the manifest's round trip, and a clear refusal of everything that is wrong with one."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, processors

from runtime.core.bundle import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    TOKENIZER_NAME,
    Bundle,
    BundleManifest,
    DrafterSpec,
    FileRecord,
    GraphSpec,
    ModelSpec,
    TensorSpec,
    sha256_of,
)
from runtime.core.errors import BundleError, RequestError, UserError
from runtime.text import PromptTokenizer

FILES = ("backbone.onnx", "backbone.onnx.data", "drafter.onnx", "drafter.onnx.data")
WORDS = ("hello", "world", "[UNK]")


def write_tokenizer(path: Path, words: tuple[str, ...] = WORDS) -> None:
    model = models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]")
    Tokenizer(model).save(str(path))


def make_manifest(directory: Path, *, drafter: bool = True) -> BundleManifest:
    """The manifest of the files that lie in ``directory``."""
    graph = GraphSpec(
        inputs=(
            TensorSpec("input_ids", ("B", "N"), "int64"),
            TensorSpec("attn_mask", ("B", 1, "N", "S"), "bool"),
        ),
        outputs=(TensorSpec("features", ("B", "N", 24), "float32"),),
    )
    names = sorted(file.name for file in directory.iterdir() if file.name != MANIFEST_NAME)
    return BundleManifest(
        target="onnxruntime",
        precision="fp32",
        model=ModelSpec(
            name="tiny",
            architecture="LlamaForCausalLM",
            vocab_size=3,
            hidden_size=8,
            num_layers=2,
            num_kv_heads=1,
            head_dim=4,
            max_position_embeddings=64,
            feature_size=24,
            eos_token_ids=(1, 2),
            bos_token_id=None,
            prompt_prefix="",
            prompt_suffix="",
        ),
        drafter=DrafterSpec("ctc", "parallel", 4, 8, 1, 1, 4, True, (0.75, -0.5)) if drafter else None,
        graphs={"backbone": graph, "drafter": graph} if drafter else {"backbone": graph},
        files={n: FileRecord(sha256_of(directory / n), (directory / n).stat().st_size) for n in names},
        versions={"onnxruntime": "1.24.0"},
        validation={"backbone": {"prefill": 1.5e-6, "tree": 2e-6}},
    )


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A complete bundle whose graphs are a few bytes."""
    directory = tmp_path / "engines"
    directory.mkdir()
    for index, name in enumerate(FILES):
        (directory / name).write_bytes(bytes(range(index, index + 64)))
    write_tokenizer(directory / TOKENIZER_NAME)
    (directory / "generation_config.json").write_text("{}\n", encoding="utf-8")
    write_manifest(directory, make_manifest(directory))
    return directory


def write_manifest(directory: Path, manifest: BundleManifest) -> None:
    (directory / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")


def edit_manifest(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = directory / MANIFEST_NAME
    values = json.loads(path.read_text(encoding="utf-8"))
    edit(values)
    path.write_text(json.dumps(values), encoding="utf-8")


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def refusal(directory: Path) -> str:
    with pytest.raises(BundleError) as caught:
        Bundle.load(directory)
    assert isinstance(caught.value, UserError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("drafter", [True, False], ids=["with drafter", "plain"])
def test_manifest_round_trip(bundle: Path, drafter: bool) -> None:
    manifest = make_manifest(bundle, drafter=drafter)
    again = BundleManifest.from_json(manifest.to_json())
    assert again == manifest
    assert again.to_json() == manifest.to_json()
    assert again.schema_version == SCHEMA_VERSION
    hash((again.model, again.drafter, again.graphs["backbone"]))  # tuples all the way, no lists


def test_a_head_that_is_not_calibrated(bundle: Path) -> None:
    edit_manifest(bundle, lambda values: values["drafter"].update(calibration=None))
    drafter = Bundle.load(bundle).manifest.drafter
    assert drafter is not None
    assert drafter.calibration is None


def test_load_a_bundle(bundle: Path) -> None:
    for path in (bundle, str(bundle)):
        loaded = Bundle.load(path)
        assert loaded.path == bundle
        assert loaded.manifest == make_manifest(bundle)


def test_load_a_bundle_without_a_drafter(bundle: Path) -> None:
    (bundle / "drafter.onnx").unlink()
    (bundle / "drafter.onnx.data").unlink()
    write_manifest(bundle, make_manifest(bundle, drafter=False))
    assert Bundle.load(bundle).manifest.drafter is None


@pytest.mark.parametrize("name", [*FILES, TOKENIZER_NAME])
def test_a_flipped_byte_is_refused(bundle: Path, name: str) -> None:
    flip_byte(bundle / name)
    message = refusal(bundle)
    assert f": {name} is not the file of the bundle" in message
    assert "sha256" in message
    Bundle.load(bundle, verify=False)


@pytest.mark.parametrize("name", [*FILES, TOKENIZER_NAME])
def test_a_missing_file_is_refused(bundle: Path, name: str) -> None:
    (bundle / name).unlink()
    assert f": {name} is missing" in refusal(bundle)
    with pytest.raises(BundleError, match=rf"{re.escape(name)} is missing"):
        Bundle.load(bundle, verify=False)


@pytest.mark.parametrize("size", [0, 63])
def test_a_truncated_file_is_refused(bundle: Path, size: int) -> None:
    path = bundle / "backbone.onnx.data"
    path.write_bytes(path.read_bytes()[:size])
    message = refusal(bundle)
    assert f": backbone.onnx.data must have 64 bytes, got {size}" in message
    assert "truncated" in message
    with pytest.raises(BundleError, match=r"backbone\.onnx\.data must have 64 bytes"):
        Bundle.load(bundle, verify=False)


def test_another_tokenizer_is_refused(bundle: Path) -> None:
    write_tokenizer(bundle / TOKENIZER_NAME, ("hello", "there", "[UNK]"))
    assert TOKENIZER_NAME in refusal(bundle)


def test_another_tokenizer_of_the_same_size_is_refused(bundle: Path) -> None:
    write_tokenizer(bundle / TOKENIZER_NAME, ("world", "hello", "[UNK]"))
    assert f"{TOKENIZER_NAME} is not the file of the bundle" in refusal(bundle)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(bundle: Path) -> None:
    write_tokenizer(bundle / TOKENIZER_NAME, (*WORDS, "more"))
    write_manifest(bundle, make_manifest(bundle))
    with pytest.raises(BundleError, match=r"tokenizer\.json is not this model's: .* at most 3 tokens, got 4"):
        PromptTokenizer(Bundle.load(bundle))


def test_a_tokenizer_that_cannot_be_read_is_refused(bundle: Path) -> None:
    (bundle / TOKENIZER_NAME).write_text("{}", encoding="utf-8")
    write_manifest(bundle, make_manifest(bundle))
    with pytest.raises(BundleError, match=r"tokenizer\.json cannot be read"):
        PromptTokenizer(Bundle.load(bundle))


def test_special_tokens_around_prompts_that_have_them_already(bundle: Path) -> None:
    """A rendered chat template begins with the text of the token for the beginning."""
    path = bundle / TOKENIZER_NAME
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["hello"])
    tokenizer.post_processor = processors.TemplateProcessing(single="hello $A", special_tokens=[("hello", 0)])
    tokenizer.save(str(path))
    write_manifest(bundle, make_manifest(bundle))
    prompts = PromptTokenizer(Bundle.load(bundle))
    assert prompts.encode("helloworld", raw=True) == [0, 0, 1]
    assert prompts.encode("helloworld", raw=True, add_special_tokens=False) == [0, 1]


def test_prompt_tokenizer_refuses_an_empty_prompt(bundle: Path) -> None:
    tokenizer = PromptTokenizer(Bundle.load(bundle))
    assert tokenizer.encode("hello") == [0]
    for text in ("", " \n"):
        with pytest.raises(RequestError, match="prompt: must not be empty"):
            tokenizer.encode(text)


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, SCHEMA_VERSION - 1, None, str(SCHEMA_VERSION)])
def test_another_schema_is_refused(bundle: Path, version: object) -> None:
    edit_manifest(bundle, lambda values: values.update(schema_version=version, from_the_future=True))
    message = refusal(bundle)
    assert f"{MANIFEST_NAME}: schema_version must be {SCHEMA_VERSION}" in message
    assert f"got {version!r}" in message


def test_what_is_not_a_bundle_is_refused(tmp_path: Path) -> None:
    a_file = tmp_path / "file"
    a_file.write_text("text", encoding="utf-8")
    (tmp_path / "directory" / MANIFEST_NAME).mkdir(parents=True)
    for path in (tmp_path, tmp_path / "nowhere", a_file, tmp_path / "directory"):
        message = refusal(path)
        assert message == f"{path} is no engine bundle: {MANIFEST_NAME} is missing"
    long = tmp_path / ("x" * 300)
    assert refusal(long) == f"{long}: {MANIFEST_NAME} cannot be read: File name too long"


@pytest.mark.parametrize("name", ["../secret", "sub/file", "/etc/hostname", "..", ".", ""])
def test_a_path_as_a_file_name_is_refused(bundle: Path, name: str) -> None:
    edit_manifest(bundle, lambda values: values["files"].update({name: {"sha256": "0", "size": 1}}))
    assert refusal(bundle) == f"{MANIFEST_NAME}: files must be plain names, got {name!r}"


@pytest.mark.parametrize(
    "content",
    [b"{", b"", b'{"schema_version": 1,', b"\xff\xfe\x00", b"[" * 100000, b'{"files": ' + b"9" * 5000],
    ids=range(6),
)
def test_a_manifest_that_is_not_json_is_refused(bundle: Path, content: bytes) -> None:
    (bundle / MANIFEST_NAME).write_bytes(content)
    assert re.search(rf"{MANIFEST_NAME} is not (valid JSON|UTF-8 text)", refusal(bundle))


@pytest.mark.parametrize("content", ["[]", "3", "null", '"text"'])
def test_json_that_is_no_object_is_refused(bundle: Path, content: str) -> None:
    (bundle / MANIFEST_NAME).write_text(content, encoding="utf-8")
    assert f"{MANIFEST_NAME}: schema_version must be" in refusal(bundle)


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ((), "model"),
        ((), "drafter"),
        ((), "graphs"),
        ((), "files"),
        ((), "precision"),
        (("model",), "head_dim"),
        (("model",), "eos_token_ids"),
        (("drafter",), "num_frames"),
        (("drafter",), "merges_repeats"),
        (("drafter",), "calibration"),
        (("graphs", "backbone"), "inputs"),
        (("files", "backbone.onnx"), "sha256"),
    ],
)
def test_a_missing_field_is_named(bundle: Path, where: tuple[str, ...], name: str) -> None:
    def remove(values: dict[str, Any]) -> None:
        for key in where:
            values = values[key]
        del values[name]

    edit_manifest(bundle, remove)
    message = refusal(bundle)
    assert f"{MANIFEST_NAME} does not follow schema {SCHEMA_VERSION}" in message
    assert f"missing required field `{name}`" in message
    if where:
        assert f"at `$.{where[0]}" in message


def test_a_name_that_is_no_text_is_refused(bundle: Path) -> None:
    path = bundle / MANIFEST_NAME
    path.write_text(path.read_text(encoding="utf-8").replace('"precision"', r'"\ud800"'), encoding="utf-8")
    assert "does not follow schema" in refusal(bundle)


def test_an_unknown_field_is_named(bundle: Path) -> None:
    edit_manifest(bundle, lambda values: values["model"].update(surprise=1))
    assert "unknown field `surprise` - at `$.model`" in refusal(bundle)


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("target",), 3, "Expected `str`, got `int` - at `$.target`"),
        (("model", "vocab_size"), "many", "Expected `int`, got `str` - at `$.model.vocab_size`"),
        (("model", "eos_token_ids"), 2, "Expected `array`, got `int` - at `$.model.eos_token_ids`"),
        (("drafter", "merges_repeats"), 1, "Expected `bool`, got `int` - at `$.drafter.merges_repeats`"),
        (
            ("drafter", "calibration"),
            [1.0],
            "Expected `array` of length 2, got 1 - at `$.drafter.calibration`",
        ),
        (("step_nodes",), [None], "Expected `int`, got `null` - at `$.step_nodes[0]`"),
    ],
)
def test_a_value_of_another_type_is_named(
    bundle: Path, where: tuple[str, ...], value: object, message: str
) -> None:
    def change(values: dict[str, Any]) -> None:
        for key in where[:-1]:
            values = values[key]
        values[where[-1]] = value

    edit_manifest(bundle, change)
    assert refusal(bundle) == f"{MANIFEST_NAME} does not follow schema {SCHEMA_VERSION}: {message}"


@pytest.mark.parametrize("graph", ["backbone", "drafter"])
def test_a_graph_that_is_not_described_is_refused(bundle: Path, graph: str) -> None:
    edit_manifest(bundle, lambda values: values["graphs"].pop(graph))
    assert refusal(bundle) == f"{MANIFEST_NAME}: graph '{graph}' is not described"


def test_a_bundle_without_a_tokenizer_is_refused(bundle: Path) -> None:
    edit_manifest(bundle, lambda values: values["files"].pop(TOKENIZER_NAME))
    assert refusal(bundle) == f"{MANIFEST_NAME}: {TOKENIZER_NAME} is not listed"


def test_sha256_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "abc"
    path.write_bytes(b"abc")
    assert sha256_of(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
