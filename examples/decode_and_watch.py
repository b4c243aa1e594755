"""Answers questions on three stories at once with the embedded ReFusion model, and shows the order of decoding.

python examples/decode_and_watch.py
"""

import refusion_eval
from refusion_eval.errors import DecodeError

STORIES = (
    "Omar has 6 boxes with 4 apples each. A friend brings 9 apples. Then 8 of them break.",
    "There are 12 books on a shelf and 5 in a bag. Then Ben gets 4 more. Ben sells 8 of them.",
    "On each of 7 days Anna finds 4 balls. Then Anna gets 9 more. Anna sells 5 of them.",
)
INSTRUCTION = "How many are there in the end?\n\nSolve this step by step. End with: The answer is <number>."

model = refusion_eval.load_model("embedded")
tokenizer = model.tokenizer
settings = refusion_eval.decoder_settings(model, "refusion", gen_length=96, slot_size=4, block_size=16)
requests = []
for story in STORIES:
    chat = tokenizer.render_chat([{"role": "user", "content": f"{story} {INSTRUCTION}"}])
    requests.append(("refusion", tokenizer.encode(chat), settings))

# The results come in the order in which they are ready.
for number, decoded in refusion_eval.generate_stream(model, requests, batch_size=3):
    if isinstance(decoded, DecodeError):
        print(f"{STORIES[number]}\n  {decoded}")
        continue
    print(f"{STORIES[number]}\n  {tokenizer.decode(decoded.tokens)}")
    forwards = decoded.trace.fixed_at()  # position -> number of the forward that made it final
    order = " ".join(f"{forwards[position]:2}" for position in range(len(decoded.tokens)))
    print(f"  made final by forward: {order}")
    print(f"  {len(decoded.tokens)} tokens in {decoded.num_forwards} forwards\n")
