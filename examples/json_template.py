"""Fills the holes of a JSON template: every token that is given stays, and a masked model fills what is between.

python examples/json_template.py [CHECKPOINT [DECODER]]

Without arguments it is the embedded LLaDA model, which has learned no JSON: it shows that the frame holds. A template
has the form of a prompt of token ids in which -1 stands for each token that is to be found.
"""

import re
import sys

import refusion_eval
from refusion_eval.types import HOLE

# [4] is a hole of four tokens.
TEMPLATE = 'There are 12 books on a shelf.\n{"number": [2], "things": "[4]", "place": "[4]"}\n'

checkpoint, decoder = (sys.argv[1:] + ["embedded:llada", "llada"][len(sys.argv[1:]) :])[:2]
model = refusion_eval.load_model(checkpoint)
tokenizer = model.tokenizer

prompt: list[int] = []
for part in re.split(r"(\[\d+\])", TEMPLATE):
    hole = re.fullmatch(r"\[(\d+)\]", part)
    prompt += [HOLE] * int(hole[1]) if hole else tokenizer.encode(part)

out = refusion_eval.generate(model, prompt, decoder=decoder, eos_ids=())
start = prompt.index(HOLE)
filled = [*prompt[:start], *out.tokens, *prompt[start + len(out.tokens) :]]
assert all(given in (HOLE, token) for given, token in zip(prompt, filled, strict=True))
print(tokenizer.decode(filled))
print(f"{prompt.count(HOLE)} tokens were filled in, in {out.num_forwards} forwards")
