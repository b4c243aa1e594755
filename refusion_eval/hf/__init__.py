"""This project's decoders from plain transformers: `model.generate(..., custom_generate=refusion_generate)`."""

from refusion_eval.hf.generate import DecodedOutput, generate_with, refusion_generate
from refusion_eval.hf.hosted import release
from refusion_eval.hf.streamer import SlotListener, SlotStreamer

__all__ = ["DecodedOutput", "SlotListener", "SlotStreamer", "generate_with", "refusion_generate", "release"]
