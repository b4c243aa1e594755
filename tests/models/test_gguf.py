"""A GGUF file is a checkpoint: its tensors, tokenizer and names are those that its makers have, or it is refused."""

import ctypes
import hashlib
import importlib.util
import json
import os
import random
import struct
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer
from typer.testing import CliRunner

from refusion_eval import generate, load_model, loading
from refusion_eval.cli import app
from refusion_eval.errors import CheckpointError, ConfigError
from refusion_eval.models import gguf as reading
from refusion_eval.models.gguf import FAMILIES, TYPES, unpack
from refusion_eval.models.location import locate
from refusion_eval.models.tokenizer import Tokenizer
from refusion_eval.store.run_store import RunReader
from refusion_eval.training.checkpoints.to_gguf import convert
from refusion_eval.types import causal
from tests.models import tiny

DATA = Path(__file__).parents[1] / "data" / "gguf"
GOLDENS = {entry["file"]: entry for entry in json.loads((DATA / "index.json").read_text("utf-8"))}
REAL = Path(__file__).parents[3] / "shared" / "parity" / "real" / "decodings.jsonl"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def unpacked(path: Path, folder: Path, dtype: str | None = None) -> dict[str, torch.Tensor]:
    folder.mkdir()
    unpack(path, folder, dtype)
    return load_file(folder / "model.safetensors")


@pytest.mark.golden
@pytest.mark.parametrize("name", GOLDENS)
def test_tensors_and_sizes_are_the_recorded_ones(tmp_path, name):
    golden = GOLDENS[name]
    tensors = unpacked(DATA / name, tmp_path / "hf")
    hashes = {key: hashlib.sha256(tensor.float().numpy().tobytes()).hexdigest() for key, tensor in tensors.items()}
    assert hashes == golden["tensor_sha256"]
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert {key: config[key] for key in golden["config"]} == golden["config"]


@pytest.mark.golden
@pytest.mark.parametrize("name", GOLDENS)
def test_logits_and_greedy_tokens_are_the_recorded_ones(name):
    golden, model = GOLDENS[name], load_model(DATA / name, device="cpu", dtype="float32")
    prompt = golden["prompt_ids"]
    transformer = model.transformer
    cache = tiny.new_cache(transformer)
    logits = tiny.forward(transformer, cache, prompt, range(len(prompt)), causal(len(prompt)))
    wanted = np.load(DATA / "logits.npz")[name.removesuffix(".gguf")]
    np.testing.assert_allclose(logits[-8:].numpy(), wanted, atol=2e-4)
    decoded = generate(model, prompt, "autoregressive", gen_length=16, eos_ids=())
    assert list(decoded.tokens) == golden["greedy16"]


@pytest.mark.network
@pytest.mark.golden
def test_a_real_model_reads_its_prompts_and_answers_as_transformers():
    if not REAL.is_file():
        pytest.skip(f"needs {REAL}, beside the checkout")
    model = load_model("smollm2", device="cpu", dtype="float32")
    assert model.card.display_name == "SmolLM2-135M-Instruct, Q4_1"
    goldens = [json.loads(line) for line in REAL.read_text("utf-8").splitlines()]
    for golden in sorted(goldens, key=lambda golden: len(golden["output_ids"]))[:3]:
        prompt = model.tokenizer.render_chat([{"role": "user", "content": golden["message"]}])
        assert model.tokenizer.encode(prompt) == golden["prompt_ids"]
        decoded = generate(model, golden["prompt_ids"], "autoregressive", gen_length=96)
        assert list(decoded.tokens) == golden["output_ids"]


class Ggml(NamedTuple):
    """llama.cpp's own conversion of rows to a type and back."""

    library: ctypes.CDLL

    def quantise(self, rows: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        data = np.zeros((rows.shape[0], rows.shape[1] // block * size), np.uint8)
        convert = self.library.ggml_quantize_chunk
        convert.restype = ctypes.c_size_t
        convert.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
        assert convert(int(kind), rows.ctypes.data, data.ctypes.data, 0, *rows.shape, None) == data.nbytes
        return data

    def dequantise(self, data: np.ndarray, kind: gguf.GGMLQuantizationType, shape: tuple[int, int]) -> np.ndarray:
        rows = np.zeros(shape, np.float32)
        convert = getattr(self.library, f"dequantize_row_{kind.name[:-1].lower()}{kind.name[-1]}")
        convert.argtypes, convert.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
        convert(data.ctypes.data, rows.ctypes.data, rows.size)
        return rows


@pytest.fixture(scope="module")
def ggml() -> Ggml:
    found = importlib.util.find_spec("xllamacpp")
    if found is None:
        pytest.skip("needs the package xllamacpp, which the extra dev installs on Linux")
    return Ggml(ctypes.CDLL(str(next(Path(found.origin).parent.glob("*.so")))))


BYTES = sorted(chr(number) for number in range(33, 127)) + [chr(number) for number in range(256, 420)]
TOKENS = ["<|bos|>", "<|end|>", "<|turn|>", "<tool>", *BYTES, "12", "123", "[PAD0]"]
TYPES_OF_TOKENS = [3, 3, 3, 4, *[1] * len(BYTES), 1, 1, 5]
MERGES = ["1 2", "12 3"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|turn|>{% endfor %}"


def write(path: Path, family="llama", kind="F32", ggml: Ggml | None = None, split="smollm", **changes) -> dict:
    """Writes a random GGUF file; returns the tensors that must be read from it, by their names there."""
    facts = {"hidden": 256, "layers": 2, "heads": 4, "groups": 2, "mlp": 256, "width": 32, "tied": True} | changes
    random_numbers = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(facts["layers"])
    writer.add_context_length(64)
    writer.add_embedding_length(facts["hidden"])
    writer.add_feed_forward_length(facts["mlp"])
    writer.add_head_count(facts["heads"])
    writer.add_head_count_kv(facts["groups"])
    writer.add_key_length(facts["width"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES_OF_TOKENS)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for key, value in facts.get("more", {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    q, kv, hidden = facts["heads"] * facts["width"], facts["groups"] * facts["width"], facts["hidden"]
    shapes = {"token_embd.weight": (len(TOKENS), hidden), "output_norm.weight": (hidden,)}
    if not facts["tied"]:
        shapes["output.weight"] = (len(TOKENS), hidden)
    for index in range(facts["layers"]):
        shapes |= {
            f"blk.{index}.{name}": shape
            for name, shape in {
                "attn_q.weight": (q, hidden),
                "attn_k.weight": (kv, hidden),
                "attn_v.weight": (kv, hidden),
                "attn_output.weight": (hidden, q),
                "ffn_gate.weight": (facts["mlp"], hidden),
                "ffn_up.weight": (facts["mlp"], hidden),
                "ffn_down.weight": (hidden, facts["mlp"]),
                "attn_norm.weight": (hidden,),
                "ffn_norm.weight": (hidden,),
                **({f"attn_{one}.bias": (size,) for one, size in zip("qkv", (q, kv, kv), strict=True)}),
                **({f"attn_{one}_norm.weight": (facts["width"],) for one in "qk"}),
            }.items()
            if not (name.endswith(".bias") and family != "qwen2")
            and not (name[6:] == "_norm.weight" and family != "qwen3")
        }
    shapes |= facts.get("shapes", {})
    tensors, exact = {}, ("F32", "F16", "BF16")
    for name, shape in shapes.items():
        values = random_numbers.normal(size=shape).astype(np.float32)
        wanted = gguf.GGMLQuantizationType[kind if len(shape) == 2 and shape[-1] % 256 == 0 else "F32"]
        if wanted.name in exact:
            data = gguf.quants.quantize(values, wanted)
            tensors[name] = gguf.quants.dequantize(data, wanted)
        else:
            data = ggml.quantise(values, wanted)
            tensors[name] = ggml.dequantise(data, wanted, shape)
        writer.add_tensor(name, data, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def side_by_side(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of Hugging Face's order as llama.cpp stores them: row i of the first half of a head, then of the second."""
    half = len(rows) // heads // 2
    pairs = [(head * 2 * half + i, head * 2 * half + half + i) for head in range(heads) for i in range(half)]
    return rows[np.ravel(pairs)]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_type_of_every_layout_is_read_as_llama_cpp_reads_it(tmp_path, ggml, family, kind):
    stored = write(tmp_path / "a.gguf", family, kind, ggml)
    tensors = {key: tensor.float().numpy() for key, tensor in unpacked(tmp_path / "a.gguf", tmp_path / "hf").items()}
    assert len(tensors) == len(stored)
    for name, theirs in {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k"}.items():
        mine = tensors[f"model.layers.1.{name}.weight"]
        mine = side_by_side(mine, 4 if theirs == "attn_q" else 2) if family == "llama" else mine
        np.testing.assert_array_equal(mine, stored[f"blk.1.{theirs}.weight"])
    for name, theirs in {"mlp.down_proj": "ffn_down", "self_attn.o_proj": "attn_output"}.items():
        np.testing.assert_array_equal(tensors[f"model.layers.0.{name}.weight"], stored[f"blk.0.{theirs}.weight"])
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], stored["token_embd.weight"])


def test_unquantised_weights_keep_their_dtype_and_others_can_be_asked_for(tmp_path):
    write(tmp_path / "a.gguf", "qwen3", "BF16")
    name = "model.layers.0.mlp.up_proj.weight"
    own = unpacked(tmp_path / "a.gguf", tmp_path / "own")
    assert {own[name].dtype, own["model.norm.weight"].dtype} == {torch.bfloat16, torch.float32}
    assert json.loads((tmp_path / "own" / "config.json").read_text())["dtype"] == "bfloat16"
    half = unpacked(tmp_path / "a.gguf", tmp_path / "half", "float16")
    assert {tensor.dtype for tensor in half.values()} == {torch.float16}
    torch.testing.assert_close(half[name], own[name].to(torch.float16), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["BF16", "F16"])
def test_16_bits_of_a_large_file_stay_and_decode_as_in_float32(tmp_path, monkeypatch, kind):
    write(tmp_path / "a.gguf", "llama", kind)
    monkeypatch.setattr(loading, "ONE_THREAD_BYTES", 0)
    kept, wide = (load_model(tmp_path / "a.gguf", device="cpu", attention=name) for name in ("auto", "sdpa"))
    sizes = [model.transformer.weights.layers[0].down.nbytes for model in (kept, wide)]
    assert 2 * sizes[0] == sizes[1]
    prompt = [3, 14, 15, 9, 26]
    tokens = [generate(model, prompt, decoder="autoregressive", gen_length=24).tokens for model in (kept, wide)]
    assert tokens[0] == tokens[1]


LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(("family", "scaled"), [("qwen2", False), ("qwen3", False), ("llama", False), ("llama", True)])
@pytest.mark.parametrize("tied", [False, True])
def test_what_convert_writes_is_read_back(tmp_path, family, scaled, tied):
    rope = {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8192}} if scaled else {}
    source = tmp_path / "hf"
    tiny.save_checkpoint(source, family=family, tie_word_embeddings=tied, vocab_size=len(TOKENS), **rope)
    write(tmp_path / "tokens.gguf", split="llama-bpe")
    unpacked(tmp_path / "tokens.gguf", tmp_path / "tokens")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (source / file).write_bytes((tmp_path / "tokens" / file).read_bytes())
    convert(str(source), tmp_path / "a.gguf")
    tensors, wanted = unpacked(tmp_path / "a.gguf", tmp_path / "back"), load_file(source / "model.safetensors")
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=0)
    back, own = (load_model(folder, device="cpu") for folder in (tmp_path / "back", source))
    assert back.config == own.config
    assert back.tokenizer.inner.get_vocab() == own.tokenizer.inner.get_vocab()
    assert back.tokenizer.inner.chat_template == TEMPLATE


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_matrices_are_written_in_16_bits(tmp_path, dtype):
    write(tmp_path / "whole.gguf", "qwen3", "F32")
    source = tmp_path / "hf"
    values = unpacked(tmp_path / "whole.gguf", source)
    convert(str(source), tmp_path / "half.gguf", dtype=dtype)
    kind = getattr(torch, dtype)
    for name, tensor in unpacked(tmp_path / "half.gguf", tmp_path / "back").items():
        assert tensor.dtype == (kind if tensor.ndim > 1 else torch.float32)
        torch.testing.assert_close(tensor, values[name].to(tensor.dtype), rtol=0, atol=0)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == dtype


def test_another_rotary_scaling_is_refused(tmp_path):
    write(tmp_path / "a.gguf", shapes={"rope_freqs.weight": (16,)})
    assert "rotary scaling of Llama 3" in refusal(tmp_path / "a.gguf", tmp_path / "hf")


@pytest.mark.parametrize(
    ("split", "pieces"),
    [("smollm", [*"1234"]), ("qwen2", [*"1234"]), ("llama-bpe", ["123", "4"])],
)
def test_numbers_are_split_as_the_pre_tokenizer_says(tmp_path, split, pieces):
    write(tmp_path / "a.gguf", split=split)
    unpacked(tmp_path / "a.gguf", tmp_path / "hf")
    tokenizer = Tokenizer(tmp_path / "hf")
    ids = tokenizer.encode("1234")
    assert [TOKENS[number] for number in ids] == pieces
    text = "<tool>a  b's\n\n12 <|turn|>"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.encode("<tool><|turn|>") == [3, 2]
    assert tokenizer.decode([3, 2]) == "<tool>"  # of the two only a control token is special
    assert tokenizer.encode("1", plain=True) == [*([0] if split == "llama-bpe" else []), TOKENS.index("1")]


def test_qwen2_writes_characters_in_one_way_as_its_publisher(tmp_path):
    write(tmp_path / "a.gguf", split="qwen2")
    unpacked(tmp_path / "a.gguf", tmp_path / "hf")
    tokenizer = Tokenizer(tmp_path / "hf")
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


@pytest.mark.parametrize("split", ["smollm", "qwen2", "llama-bpe"])
def test_transformers_reads_the_tokenizer_as_this_project(tmp_path, split):
    write(tmp_path / "a.gguf", split=split)
    unpacked(tmp_path / "a.gguf", tmp_path / "hf")
    text = "I'll  pay 1234 now\n\n <|turn|>don't"
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").encode(text, add_special_tokens=False) == Tokenizer(
        tmp_path / "hf"
    ).encode(text)


def test_template_and_end_tokens_are_those_of_the_file(tmp_path):
    write(tmp_path / "a.gguf")
    model = load_model(tmp_path / "a.gguf", device="cpu")
    assert model.card.eos_ids == (1, 2)
    assert model.tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == "Hi<|turn|>"


@pytest.mark.parametrize(
    ("file", "more", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", {"general.file_type": 3}, "SmolLM2-135M-Instruct, Q4_1"),
        ("mine-q4_k_m.gguf", {"general.file_type": 15}, "mine, Q4_K_M"),
        ("mine.gguf", {}, "mine, F32"),
        ("mine.gguf", {"general.file_type": 999}, "mine, F32"),
    ],
)
def test_a_model_is_called_by_the_name_of_its_file_and_its_quantisation(tmp_path, file, more, name):
    write(tmp_path / file, more=more)
    model = load_model(tmp_path / file, device="cpu")
    assert (model.card.display_name, model.card.backbone) == (name, name)


@pytest.mark.process
def test_a_run_calls_the_model_by_its_own_name(tmp_path):
    words = ["run", "--model", str(DATA / "llama-Q4_1.gguf"), "--decoder", "autoregressive", "--tasks", "mini_gsm8k"]
    words += ["--limit", "1", "--set", "gen_length=2", "--warmup", "0", "--device", "cpu"]
    result = CliRunner().invoke(app, [*words, "--run-dir", str(tmp_path / "own")])
    assert result.exit_code == 0, result.output
    assert "AR on llama, Q4_1" in " ".join(result.output.split())
    named = CliRunner().invoke(app, [*words, "--name", "Mine", "--run-dir", str(tmp_path / "named")])
    assert named.exit_code == 0, named.output
    with RunReader.open(tmp_path / "own") as own, RunReader.open(tmp_path / "named") as other:
        mine, theirs = own.run.manifest, other.run.manifest
    assert (mine.system, mine.backbone, theirs.system) == ("AR on llama, Q4_1", "llama, Q4_1", "Mine")
    assert mine.checkpoint_hash == theirs.checkpoint_hash != ""


def test_check_names_the_quantisation_and_small_sizes():
    words = ["check", "--model", str(DATA / "llama-Q4_1.gguf"), "--decoder", "autoregressive", "--device", "cpu"]
    told = CliRunner().invoke(app, words).stdout
    assert ": weights of llama, Q4_1\n" in told
    assert "35.7 thousand parameters; a forward reads 0.11 MB of them" in told
    assert json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["weights"] == "llama, Q4_1"


def test_a_file_that_another_process_unpacks_meanwhile_is_that_of_the_other(monkeypatch):
    path = DATA / "qwen3-Q4_0.gguf"

    def unpack_second(given, folder):
        monkeypatch.setattr(reading, "unpack", unpack)
        reading.unpacked(path)
        unpack(given, folder)

    monkeypatch.setattr(reading, "unpack", unpack_second)
    folder = reading.unpacked(path)
    assert [found.name for found in folder.parent.iterdir()] == [path.stem]
    assert (folder / "config.json").is_file()


def test_a_file_is_unpacked_once_for_its_content_and_name(tmp_path, cache):
    path = tmp_path / "a.gguf"
    write(path)
    first = locate(str(path), None).directory
    changed = (first / "model.safetensors").stat().st_mtime_ns
    assert locate(str(path), None).directory == first
    assert (first / "model.safetensors").stat().st_mtime_ns == changed
    assert first.is_relative_to(cache)
    assert sorted(path.name for path in first.parent.iterdir()) == ["a"]  # no half of a folder is left
    write(path, heads=2)
    assert locate(str(path), None).directory != first


def test_convert_writes_a_folder_that_is_the_same_model(tmp_path):
    words = ["convert", str(DATA / "qwen3-Q4_0.gguf"), str(tmp_path / "hf"), "--from", "gguf"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    prompt = GOLDENS["qwen3-Q4_0.gguf"]["prompt_ids"]
    decoded = generate(load_model(tmp_path / "hf", device="cpu"), prompt, "autoregressive", gen_length=16, eos_ids=())
    assert list(decoded.tokens) == GOLDENS["qwen3-Q4_0.gguf"]["greedy16"]
    again = CliRunner().invoke(app, words)
    assert isinstance(again.exception, ConfigError) or "exists already" in again.output
    assert CliRunner().invoke(app, [*words, "--to", "stock"]).exit_code == 2
    assert CliRunner().invoke(app, words[:3]).exit_code == 2


def refusal(path: Path, folder: Path) -> str:
    """The message with which a file is refused, which is one line that names the file."""
    folder.mkdir(exist_ok=True)
    with pytest.raises(CheckpointError) as caught:
        unpack(path, folder)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"family": "gemma3"}, "'gemma3'"),
        ({"split": "gpt-2"}, "pre-tokenizer 'gpt-2'"),
        ({"kind": "Q2_K"}, "type Q2_K"),
        ({"layers": 2, "more": {"llama.block_count": 3}}, "blk|no tensor|Duplicate"),
        ({"shapes": {"blk.0.attn_q.weight": (64, 256)}}, "has shape"),
        ({"shapes": {"blk.0.ffn_gate_exps.weight": (4, 256)}}, "1 tensors that no llama model has"),
        ({"more": {"llama.expert_count": 8}}, "experts"),
        ({"more": {"llama.rope.scaling.type": "yarn"}}, "'yarn'"),
        ({"more": {"llama.rope.scaling.factor": 4.0}}, "'linear'"),
        ({"more": {"llama.rope.dimension_count": 8}}, "8 of 32"),
        ({"more": {"split.count": 3}}, "part of a model"),
        ({"more": {"tokenizer.ggml.mask_token_id": 99_999}}, "mask_token_id is 99999"),
    ],
)
def test_what_is_not_read_is_one_line_that_names_it(tmp_path, ggml, changes, words):
    changes = {"ggml": ggml} | changes
    write(tmp_path / "a.gguf", **changes)
    message = refusal(tmp_path / "a.gguf", tmp_path / "hf")
    assert any(word in message for word in words.split("|")), message


def header(*values: bytes, tensors=0, facts=1, version=3) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, tensors, facts) + b"".join(values)


def text(content: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(content) if length is None else length) + content


U8, STRING, ARRAY = 0, 8, 9
HOSTILE = {
    "empty": b"",
    "only the magic": b"GGUF",
    "not GGUF": b"PK\x03\x04" + bytes(100),
    "version 1": header(version=1),
    "version 99": header(version=99),
    "other order of bytes": struct.pack(">4sIQQ", b"GGUF", 3, 0, 0) + bytes(64),
    "more facts than bytes": header(facts=2**63),
    "more tensors than bytes": header(facts=0, tensors=2**62),
    "a key of 2**62 bytes": header(text(b"a", 2**62)),
    "a text of 2**40 bytes": header(text(b"a"), struct.pack("<I", STRING), text(b"b", 2**40)),
    "a list of 2**60 bytes": header(text(b"a"), struct.pack("<IIQ", ARRAY, U8, 2**60), bytes(100)),
    "lists inside lists": header(text(b"a"), struct.pack("<I", ARRAY), struct.pack("<IQ", ARRAY, 1) * 5000),
    "an unknown type": header(text(b"a"), struct.pack("<I", 77), bytes(100)),
    "a name that is no UTF-8": header(text(b"\xff\xfe"), struct.pack("<I", U8), b"\0"),
    "the same key twice": header(*[text(b"a"), struct.pack("<IB", U8, 1)] * 2, facts=2),
    "more entries than numbers have": header(
        text(b"a"), struct.pack("<IQQIQ", 2, 2**63, 2**63, 0, 0), bytes(64), facts=0, tensors=1
    ),
    "a tensor far behind": header(text(b"a"), struct.pack("<IQIQ", 1, 4, 0, 2**63), bytes(64), facts=0, tensors=1),
    "a tensor of many axes": header(text(b"a"), struct.pack("<I", 2**31), bytes(64), facts=0, tensors=1),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_one_line(tmp_path, kind):
    path = tmp_path / "a.gguf"
    path.write_bytes(HOSTILE[kind])
    refusal(path, tmp_path / "hf")
    assert list((tmp_path / "hf").iterdir()) == []


def test_metadata_of_too_many_values_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_MOST_VALUES", 10_000)  # so that the test takes no seconds
    path = tmp_path / "a.gguf"
    path.write_bytes(header(text(b"a"), struct.pack("<IIQ", ARRAY, U8, 10_001), bytes(10_001)))
    assert "10000 values" in refusal(path, tmp_path / "hf")


def test_metadata_of_too_many_bytes_are_one_line(tmp_path):
    path = tmp_path / "a.gguf"
    with path.open("wb") as file:
        file.write(header(text(b"a"), struct.pack("<IQ", STRING, 65 << 20)))
        file.truncate(70 << 20)
    assert "64 MiB" in refusal(path, tmp_path / "hf")


def test_a_truncated_file_is_one_line_wherever_it_ends(tmp_path):
    whole = (DATA / "qwen3-Q4_0.gguf").read_bytes()
    path = tmp_path / "a.gguf"
    for end in [*range(5, 400, 37), *range(400, len(whole) - 64, 2111), len(whole) - 64]:
        path.write_bytes(whole[:end])
        assert "truncated" in refusal(path, tmp_path / "hf")


def test_damaged_bytes_give_a_model_or_one_line(tmp_path):
    whole, path, rng = (DATA / "llama-Q4_1.gguf").read_bytes(), tmp_path / "a.gguf", random.Random(0)
    messages = []
    for _ in range(120):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 4))):
            damaged[rng.randrange(8, 9000)] = rng.randrange(256)
        path.write_bytes(damaged)
        folder = tmp_path / "hf"
        folder.mkdir(exist_ok=True)
        try:
            unpack(path, folder)
        except CheckpointError as error:
            messages.append(str(error))
    assert len(messages) > 10
    assert "\n" not in "".join(messages)


def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match="named pipe"):
        locate(str(tmp_path / "a.gguf"), None)


def test_a_folder_of_gguf_files_names_them(tmp_path):
    write(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match=r"name one of these files: .*a\.gguf"):
        locate(str(tmp_path), None)


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="name another folder as XDG_CACHE_HOME"):
        locate(str(DATA / "qwen3-Q4_0.gguf"), None)
