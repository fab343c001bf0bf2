"""An endpoint of OpenAI's protocol that answers every completion with two words: for what sends loads."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self._say(json.dumps({"object": "list", "data": [{"id": "parrot"}]}).encode())

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        words = [{"choices": [{"index": 0, "text": word, "finish_reason": None}]} for word in ("so ", "so")]
        events = [*words, {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}]
        self._say(b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events) + b"data: [DONE]\n\n")

    def _say(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        """Say nothing."""


def start():
    """The address of a new endpoint, which ends with the process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"
