"""Decodes three questions at once with the embedded ReFusion model, and shows in which order each answer was filled in.

python examples/decode_and_watch.py
"""

import refusion_eval
from refusion_eval.errors import DecodeError

QUESTIONS = (
    "Omar buys 6 packs of 6 apples and finds 9 more. How many apples does Omar have?",
    "A shelf has 7 rows of 4 balls. Anna adds 9. How many balls are on the shelf now?",
    "There are 9 bags of 5 books. Ben loses 4 of them. How many books remain?",
)
INSTRUCTION = "Solve this step by step. End with: The answer is <number>."

model = refusion_eval.load_model("embedded")
tokenizer = model.tokenizer
settings = refusion_eval.decoder_settings(model, "refusion", gen_length=64, slot_size=8, block_size=16)
requests = []
for question in QUESTIONS:
    chat = tokenizer.render_chat([{"role": "user", "content": f"{question}\n\n{INSTRUCTION}"}])
    requests.append(("refusion", tokenizer.encode(chat), settings))

# The results come in the order in which they are ready.
for number, decoded in refusion_eval.generate_stream(model, requests, batch_size=3):
    if isinstance(decoded, DecodeError):
        print(f"{QUESTIONS[number]}\n  {decoded}")
        continue
    print(f"{QUESTIONS[number]}\n  {tokenizer.decode(decoded.tokens)}")
    forwards = decoded.trace.fixed_at()  # position -> number of the forward that made it final
    order = " ".join(f"{forwards[position]:2}" for position in range(len(decoded.tokens)))
    print(f"  made final by forward: {order}")
    print(f"  {len(decoded.tokens)} tokens in {decoded.num_forwards} forwards\n")
