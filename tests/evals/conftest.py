"""A grader, and an OpenAI-compatible server over real sockets that does whatever a test wants it to do wrong."""

import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from beam_rl.evals import runner, sources
from beam_rl.evals.endpoint import Endpoint, Retry
from beam_rl.evals.grader import Grader
from beam_rl.evals.journal import opened
from beam_rl.evals.results import Results, Sampling
from beam_rl.evals.runner import Run

Body = dict[str, Any]
CLOSE, HANG, CUT = "close", "hang", "cut"
"""Ends the connection without a word; never answers; ends the connection in the middle of the answer."""


def reply(text: str | None, finish: str | None = "stop", tokens: int | None = 5, **message: Any) -> Body:
    """A chat completion."""
    return {
        "choices": [{"message": {"role": "assistant", "content": text, **message}, "finish_reason": finish}],
        "usage": {"completion_tokens": tokens, "prompt_tokens": 7},
    }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def owner(self) -> "Server":
        return self.server.owner  # type: ignore[attr-defined, no-any-return]

    def do_GET(self) -> None:
        answers: dict[str, Any] = {
            "/v1/models": {"data": [{"id": name, **self.owner.entry} for name in self.owner.models]},
            "/version": {"version": "1.0"},
        }
        if self.owner.weights is not None:
            answers["/weight_info"] = {"weight_version": self.owner.weights}
        found = answers.get(self.path)
        self.send(200 if found else 404, found or {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.owner.counting():
            time.sleep(random.uniform(0, 0.005))  # whoever relies on an order among requests in flight fails soon
            self.owner.requests.append(body)
            self.owner.keys.add(self.headers["authorization"])
            answer = self.owner.answer(body)
            if answer == HANG:
                self.owner.released.wait(60)
            elif isinstance(answer, dict):
                self.send(200, answer)
            elif isinstance(answer, tuple):
                self.send(*answer)
            elif answer == CUT:
                self.send_response(200)
                self.send_header("content-length", "1000")
                self.end_headers()
                self.wfile.write(b'{"choices": [')
                self.close_connection = True
            else:
                self.reset()

    def send(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"content-length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


class _Http(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        pass  # a client that went away


class Server:
    """`answer` gets a request's body: a dict is sent, a tuple is (status, content[, headers]), or CLOSE, HANG, CUT."""

    def __init__(self) -> None:
        self.answer: Callable[[Body], Any] = lambda body: reply(r"\boxed{1}")
        self.requests: list[Body] = []
        self.keys: set[str | None] = set()
        self.models = ["m"]
        self.entry: Body = {"max_model_len": 4096, "owned_by": "test"}
        self.weights: str | None = None
        self.released = threading.Event()
        self.now = self.most = 0
        self._lock = threading.Lock()
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._http = _Http(("127.0.0.1", self.port), Handler)
        self._http.owner = self  # type: ignore[attr-defined]
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Refuse connections from now on."""
        self._http.shutdown()
        self._http.server_close()
        self.released.set()

    def counting(self) -> Any:
        return _Count(self)

    def asked(self) -> list[str]:
        """The user's messages, as they arrived: requests in flight at once have no order."""
        return [body["messages"][-1]["content"] for body in list(self.requests)]


class _Count:
    """The number of requests at a time."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def __enter__(self) -> None:
        with self.server._lock:
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)

    def __exit__(self, *_: object) -> None:
        with self.server._lock:
            self.server.now -= 1


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.stop()


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """Ten problems; the answer to `problem 3` is 3."""
    path = tmp_path / "ten.jsonl"
    path.write_text("".join(json.dumps({"problem": f"problem {n}", "answer": n}) + "\n" for n in range(10)))
    return path


def solve(body: Body) -> Body:
    """The right answer to one of `problems`."""
    time.sleep(0.005)
    return reply(f"\\boxed{{{body['messages'][-1]['content'].split()[-1]}}}")


@pytest.fixture
def right() -> Callable[[Body], Body]:
    return solve


@pytest.fixture
def say() -> Callable[..., Body]:
    return reply


@pytest.fixture
def retry() -> Retry:
    """How often `evaluate` asks again: little enough to wait for."""
    return Retry(attempts=4, first_pause=0.02)


@pytest.fixture
def evaluate(
    server: Server, problems: Path, tmp_path: Path, right: Callable[[Body], Body], retry: Retry
) -> Callable[..., Results]:
    """Evaluates the ten problems, two samples each, in `tmp_path/out`."""
    server.answer = right

    def go(**changes: Any) -> Results:
        given = {"samples": 2, "temperature": 1.0, "top_p": 1.0, "max_tokens": 100}
        given |= {key: changes.pop(key) for key in list(changes) if key in Sampling.model_fields}
        sampling = Sampling.model_validate(given)
        endpoint = Endpoint(
            server.url, api_key=changes.pop("api_key", None), timeout=changes.pop("timeout", 30.0), retry=retry
        )
        task = sources.load(changes.pop("task", str(problems)), prompt=changes.pop("prompt", None))
        with opened(tmp_path / "out") as journal:
            return runner.evaluate(Run(task, sampling, endpoint, **({"concurrency": 4} | changes)), journal)

    return go


@pytest.fixture(scope="module")
def symbolic() -> Iterator[Grader]:
    """A grader with time enough for every answer that does not hang."""
    grader = Grader(workers=2, timeout=20.0)
    yield grader
    grader.close()
