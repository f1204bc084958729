"""A stand-in for an OpenEnv server that needs only Python: guess a number, at port 8000."""

import base64
import hashlib
import json
import struct
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SCHEMA = {"properties": {"metadata": {"type": "object"}, "guess": {"type": "string"}}}
_MAGIC = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/ws":
            self._session()
            return
        answer = {"status": "healthy"} if self.path == "/health" else {"action": SCHEMA}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _session(self) -> None:
        key = self.headers["Sec-WebSocket-Key"] + _MAGIC
        accepted = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        self.send_response(101)
        for name, value in (("Upgrade", "websocket"), ("Connection", "Upgrade")):
            self.send_header(name, value)
        self.send_header("Sec-WebSocket-Accept", accepted)
        self.end_headers()
        self.close_connection = True
        while (message := self._received()) is not None:
            if message["type"] == "close":
                return
            self._send({"type": "observation", "data": _observed(message)})

    def _received(self) -> dict[str, Any] | None:
        """Returns the next message; None at the end of the connection. Messages are small."""
        head = self.rfile.read(2)
        if len(head) < 2 or head[0] & 0x0F != 1:  # not a text
            return None
        size = head[1] & 0x7F
        if size == 126:
            (size,) = struct.unpack(">H", self.rfile.read(2))
        mask, data = self.rfile.read(4), self.rfile.read(size)
        text = bytes(byte ^ mask[place % 4] for place, byte in enumerate(data))
        message: dict[str, Any] = json.loads(text)
        return message

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        size = bytes([len(data)]) if len(data) < 126 else struct.pack(">BH", 126, len(data))
        self.wfile.write(b"\x81" + size + data)


def _observed(message: dict[str, Any]) -> dict[str, Any]:
    if message["type"] == "reset":
        text, reward, done = "Guess a number from 1 to 9.", None, False
    elif message["data"]["guess"] == "7":
        text, reward, done = "Right.", 1.0, True
    else:
        text, reward, done = "Another one.", 0.1, False
    return {"observation": {"text": text}, "reward": reward, "done": done}


ThreadingHTTPServer(("0.0.0.0", 8000), Handler).serve_forever()
