"""A stand-in for a service that is asked over HTTP, in threads of the test's own process."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[str, Message, bytes], tuple[int, bytes]]
"""From path, headers and body (empty: a GET) to status and JSON; 0: it hangs up."""


@contextlib.contextmanager
def standing_in(answer: Answer) -> Iterator[str]:
    """Answers GET and POST for the block; yields the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            status, data = answer(self.path, self.headers, body)
            if not status:
                return
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
