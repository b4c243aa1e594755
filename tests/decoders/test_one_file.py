"""A decoder is one file: added to a copy of the package, it is known to every command, table, plot and check."""

import os
import subprocess
import sys
from pathlib import Path

import refusion_eval
from refusion_eval.decoders import DECODERS

DECODER_FILE = '''"""Fills masks from left to right, the same number in every forward."""

from refusion_eval.config import PositiveInt, settings_class
from refusion_eval.decoders.canvas import Canvas, MaskedSettings
from refusion_eval.decoders import Decoder, Reads, Style
from refusion_eval.types import Commit, Forward, causal


@settings_class("leftmost")
class Settings(MaskedSettings):
    """Settings: how many tokens each forward fixes."""

    per_forward: PositiveInt = 4


def decode(prompt, settings, trace):
    """Decodes one prompt."""
    canvas, num_cached, commit, step = Canvas(prompt, settings, trace), 0, Commit(), 0
    while masked := canvas.masked()[: settings.per_forward]:
        end = canvas.start + masked[-1] + 1
        rows = [canvas.start + position - num_cached for position in masked]
        read, fed = settings.read(rows, step, masked), range(num_cached, end)
        (readout,) = yield Forward(canvas.tokens[num_cached:end], fed, causal(len(fed)), (read,), commit)
        commit, num_cached = Commit(range(rows[0])), canvas.start + masked[0]
        canvas.fix(masked, readout.tokens)
        step += 1
        if reason := canvas.settled():
            return canvas.finish(reason)
    return canvas.finish()


DECODER = Decoder(
    decode,
    Settings,
    label="Leftmost",
    reads=Reads("causal", masked="own"),
    fits=("masked",),
    style=Style("#123456", "o"),
)
'''

CHECKS = """
import sys
from typer.testing import CliRunner
import refusion_eval
from refusion_eval import api
from refusion_eval.cli import app
from refusion_eval.errors import ConfigError
from refusion_eval.paper.style import style_of

def command(*words):
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return result.output

def refusal(do, *args, **kwargs):
    try:
        do(*args, **kwargs)
    except ConfigError as error:
        return str(error)
    raise AssertionError("not refused")

assert "leftmost" in command("systems")
model, causal = (refusion_eval.load_model(name) for name in sys.argv[1:3])
decoded = refusion_eval.generate(model, [5, 6, 7], decoder="leftmost", gen_length=8, eos_ids=())
assert (len(decoded.tokens), decoded.num_forwards) == (8, 2)
api.check_fit(model, "leftmost", mask_id_given=False)
assert "does not fit decoder=leftmost" in refusal(api.check_fit, causal, "leftmost", mask_id_given=False)
refused = refusal(refusion_eval.generate, model, [5], "leftmost", per_forward=0)
assert refused == "leftmost: per_forward=0; it must be at least 1"
assert style_of("leftmost").colour == "#123456"
command("run", "--model", "embedded:refusion", "--decoder", "leftmost", "--tasks", "gsm8k", "--limit", "1",
        "--run-dir", sys.argv[3])
assert "Leftmost" in command("table", sys.argv[3])
"""


def test_a_decoder_in_one_file_is_known_everywhere(tmp_path):
    package = Path(refusion_eval.__file__).parent
    copy = tmp_path / "refusion_eval"
    (copy / "decoders").mkdir(parents=True)
    for source in [*package.iterdir(), *(package / "decoders").iterdir()]:
        target = copy / source.relative_to(package)
        if not target.exists() and source.name != "__pycache__":
            target.symlink_to(source)
    (tmp_path / "tasks").symlink_to(package.parent / "tasks")
    (copy / "decoders" / "leftmost.py").write_text(DECODER_FILE)
    assert DECODER_FILE.count("\n") < 60
    checkpoints = [str(package / "embedded" / name) for name in ("refusion", "autoregressive")]
    result = subprocess.run(
        [sys.executable, "-c", CHECKS, *checkpoints, str(tmp_path / "run")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_no_two_methods_share_a_colour_because_curves_and_bars_are_drawn_by_it_alone():
    # One method on Dream and on LLaDA has one colour; no checkpoint is of both, and marker and line differ.
    methods = {}
    for name, decoder in DECODERS.items():
        methods.setdefault(decoder.style.colour, set()).add(name.removesuffix("_llada").removesuffix("_dream"))
    assert [names for names in methods.values() if len(names) > 1] == []
    looks = [(decoder.style.marker, str(decoder.style.line), decoder.style.colour) for decoder in DECODERS.values()]
    assert len({(marker, colour) for marker, _, colour in looks}) == len({look[1:] for look in looks}) == len(looks)
