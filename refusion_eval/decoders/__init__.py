"""The decoders by name. A decoder is a generator function with a settings class of its own; adding one is one line."""

from typing import Any, NamedTuple

from refusion_eval.decoders import (
    autoregressive,
    bd3lm,
    d2f,
    dream,
    esolm,
    fast_dllm_dream,
    fast_dllm_llada,
    llada,
    refusion,
)
from refusion_eval.decoders.refusion_settings import RefusionSettings
from refusion_eval.types import Decode


class DecoderEntry(NamedTuple):
    """A decoder and the class of its settings."""

    decode: Decode
    Settings: type[Any]


DECODERS: dict[str, DecoderEntry] = {
    "autoregressive": DecoderEntry(autoregressive.decode, autoregressive.AutoregressiveSettings),
    "bd3lm": DecoderEntry(bd3lm.decode, bd3lm.Bd3lmSettings),
    "d2f_dream": DecoderEntry(d2f.decode, d2f.D2fDreamSettings),
    "d2f_llada": DecoderEntry(d2f.decode, d2f.D2fLladaSettings),
    "dream": DecoderEntry(dream.decode, dream.DreamSettings),
    "esolm": DecoderEntry(esolm.decode, esolm.EsolmSettings),
    "fast_dllm_dream": DecoderEntry(fast_dllm_dream.decode, fast_dllm_dream.FastDllmDreamSettings),
    "fast_dllm_llada": DecoderEntry(fast_dllm_llada.decode, fast_dllm_llada.FastDllmLladaSettings),
    "llada": DecoderEntry(llada.decode, llada.LladaSettings),
    "refusion": DecoderEntry(refusion.decode, RefusionSettings),
}
