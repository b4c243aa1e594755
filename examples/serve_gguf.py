"""Serves a GGUF file by llama.cpp's own server, with completions and chats.

    python examples/serve_gguf.py MODEL.gguf

The wheel of llama.cpp, `pip install xllamacpp`, is all that it needs. It serves on 127.0.0.1 at --port, or at $PORT,
until it is ended. Prompts are computed anew each time, because answers can depend on what is left of earlier ones.
"""

import argparse
import os
import signal

import xllamacpp


def settings_of(
    model: str, port: int, threads: int, context: int, float32_cache: bool = False
) -> "xllamacpp.CommonParams":
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel = model, context, 1
    settings.hostnames, settings.port = ["127.0.0.1"], port
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    settings.cache_prompt, settings.cache_ram_mib = False, 0
    settings.endpoint_metrics = True
    if float32_cache:
        settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return settings


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("--port", type=int, default=int(os.environ.get("PORT", "8000")))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=4096, help="tokens of prompt and answer")
    parser.add_argument("--float32-cache", action="store_true", help="keys and values in float32, no flash attention")
    given = parser.parse_args()
    server = xllamacpp.Server(settings_of(**vars(given)))
    print(server.listening_address, flush=True)
    signal.pause()
