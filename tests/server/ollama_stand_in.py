"""Ollama's `/api/chat` as its public protocol has it, in front of llama.cpp's server.

    python ollama_stand_in.py PORT URL

Answers stream a JSON object a line, fields that are zero are left out, times are in nanoseconds, and an answer of 30
equal parts in a row ends without `done`, as Ollama's server ends it.
"""

import json
import sys
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "sft:latest"
MOST_EQUAL = 30
NAMES = {"num_predict": "max_tokens"}
KNOWN = ("num_predict", "temperature", "seed", "stop", "top_p", "top_k", "min_p", "repeat_penalty")


class Handler(BaseHTTPRequestHandler):
    upstream = ""

    def log_message(self, *_):
        pass

    def whole(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        entry = {"id": MODEL, "object": "model", "created": 1790000000, "owned_by": "library"}
        known = {"/v1/models": {"object": "list", "data": [entry]}, "/api/version": {"version": "0.35.1"}}
        self.whole(200 if self.path in known else 404, known.get(self.path, {"error": "not found"}))

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["model"] != MODEL or self.path != "/api/chat":
            return self.whole(404, {"error": f"model '{asked['model']}' not found"})
        if asked.get("think"):
            return self.whole(400, {"error": f'"{MODEL}" does not support thinking'})
        fields = {NAMES.get(name, name): value for name, value in asked["options"].items() if name in KNOWN}
        body = {
            "messages": asked["messages"],
            "cache_prompt": False,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        request = urllib.request.Request(
            f"{self.upstream}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.end_headers()
        with urllib.request.urlopen(request) as answer:
            return self.stream(answer)

    def stream(self, answer):
        last, equal, reason = "", 0, ""
        for line in map(bytes.strip, answer):
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            choice = next(iter(chunk["choices"]), {})
            text, reason = choice.get("delta", {}).get("content") or "", choice.get("finish_reason") or reason
            equal, last = (equal + 1 if text and text == last else 0), text or last
            if equal >= MOST_EQUAL:
                return
            told = {"message": {"role": "assistant", "content": text}, "done": not choice}
            if not choice:  # the last one, with all counts
                times = chunk["timings"]
                told |= {"done_reason": reason, "eval_count": times["predicted_n"]}
                told |= {"prompt_eval_count": times["prompt_n"], "eval_duration": int(1e6 * times["predicted_ms"])}
                told |= {"prompt_eval_duration": int(1e6 * times["prompt_ms"])}
            self.wfile.write(json.dumps({"model": MODEL, **told}).encode() + b"\n")
            self.wfile.flush()


if __name__ == "__main__":
    Handler.upstream = sys.argv[2]
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
