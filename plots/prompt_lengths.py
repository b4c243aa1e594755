"""`bench --prompt-lengths --out FILE` -> one picture: the first forward and the speed after it by the prompt's length.

python plots/prompt_lengths.py FILE.json --out lengths.png

What was measured where is written to OUT with the ending .txt.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from refusion_eval.paper import style
from refusion_eval.store.atomic_write import prepare_output, write_output

PANELS = (
    ("first_seconds", 1e3, "First forward, ms"),
    ("decode_tps", 1, "Tokens/s after it"),
    ("tpf", 1, "Tokens a forward"),
)


def draw(measured: Mapping[str, Any], target: Path) -> None:
    """Writes the picture and its caption."""
    figures = [figure for figure in measured["figures"] if figure["num_answers"]]
    systems = list(dict.fromkeys(figure["system"] for figure in figures))
    with style.paper_style():
        picture = style.new_figure(style.TEXT_WIDTH, 2.2)
        for axes, (name, factor, title) in zip(picture.subplots(1, len(PANELS)), PANELS, strict=True):
            for system, look in zip(systems, style.ORDERED * len(systems), strict=False):
                own = [figure for figure in figures if figure["system"] == system and figure[name] is not None]
                lengths = [figure["prompt_tokens"] for figure in own]
                middle, low, high = ([factor * figure[name][place] for figure in own] for place in range(3))
                line = {"color": look.colour, "marker": look.marker, "linestyle": look.line}
                axes.plot(lengths, middle, label=style.in_legend(system), **line)
                axes.fill_between(lengths, low, high, color=look.colour, alpha=0.15, linewidth=0)
            _label(axes, title, sorted({round(figure["prompt_tokens"]) for figure in figures}))
        picture.legend(
            *picture.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=min(len(systems), 4)
        )
        prepare_output(target)
        picture.savefig(target, metadata={"Software": None})
    write_output(target.with_suffix(".txt"), f"{_caption(measured['conditions'])}\n")


def _label(axes: Axes, title: str, lengths: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("Tokens of the prompt")
    axes.set_ylabel(title)
    axes.set_ylim(bottom=0)


def _caption(conditions: Mapping[str, Any]) -> str:
    systems = conditions["systems"].values()
    machines = dict.fromkeys(f"{one['hardware']['gpu'] or one['hardware']['cpu']}, {one['dtype']}" for one in systems)
    endless = " End tokens ended no answer." if conditions.get("ignore_eos") else ""
    generated = " The text was generated, so tokens a forward are not those of real questions."
    return (
        "Left: time to the end of the first forward, which reads the prompt (of a server, to the first byte). Middle: "
        "tokens by seconds after it. Right: tokens by forwards. Bands: 95% interval by prompt. One request at a time, "
        f"in turns, rounds: {conditions['num_rounds']}; prompts: {conditions['prompts']}."
        f"{endless}{generated if conditions['generated'] else ''} Measured on {'; '.join(machines)}."
    )


def main() -> None:
    """Reads the figures and draws them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="what `bench --prompt-lengths --out` wrote")
    parser.add_argument("--out", type=Path, default=Path("prompt_lengths.png"))
    arguments = parser.parse_args()
    draw(json.loads(arguments.file.read_text(encoding="utf-8")), arguments.out)
    print(f"{arguments.out} {arguments.out.with_suffix('.txt')}")


if __name__ == "__main__":
    main()
