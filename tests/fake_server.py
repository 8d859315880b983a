"""A small server that stands for an engine's, and whether processes have ended.

Knows no engine.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from eagle3.engines.server import Launch

# Answers GET with its environment variable and its pids: its own, and that of a child with a
# session of its own that ignores SIGTERM when told to.
FAKE = """
import http.server, json, os, signal, subprocess, sys
stubborn = len(sys.argv) > 3
wait = "import signal, time; " + ("signal.signal(signal.SIGTERM, signal.SIG_IGN); " * stubborn)
child = subprocess.Popen([sys.executable, "-c", wait + "time.sleep(600)"], start_new_session=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path != "/broken" else 503)
        self.end_headers()
        self.wfile.write(json.dumps([os.getpid(), child.pid, os.environ["FAKE_VALUE"]]).encode())
    def do_POST(self):
        self.send_response(400)
        self.end_headers()
        self.wfile.write(b"no such layer")
    def log_message(self, *args): pass
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""
# Answers every GET with a version.
TELLS = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"version": "0.1.0"}).encode())
    def log_message(self, *args): pass
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""


def launch(folder: Path, code: str = FAKE, *more: str) -> Launch:
    return Launch(
        engine="fake",
        command=lambda host, port: [sys.executable, "-c", code, host, str(port), *more],
        log=folder / "server.log",
        environ={"FAKE_VALUE": "7"},
    )


def ended(pid: int, seconds: float = 20.0) -> bool:
    """Whether a process ends in time; a zombie that only waits for its parent counts."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False
