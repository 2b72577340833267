"""`beam-rl serve` on one GPU, in both profiles, with a drafter: what it reports of itself, and whether reasoning,
answers and tool calls come out parsed and as they were constrained.

The model is untrained: what it says is random, so only the grammar can make it a valid answer.
"""

import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from beam_rl.eval_server import free_ports
from beam_rl.model.checkpoint import save_hf
from beam_rl.model.tensors import initial_tensors
from beam_rl.rollout import drafter
from beam_rl.rollout.drafter import DrafterShape
from tests.gpu.checks import Checks
from tests.gpu.engines import Tell
from tests.gpu.models import small
from tests.gpu.serving import Server, started

PROFILES = {
    "latency": ("CUDA graphs", "prefix caching", "chunked prefill", "speculation"),
    "throughput": ("CUDA graphs", "prefix caching", "chunked prefill", "speculation", "8-bit KV cache"),
}
"""By name, what must be on."""
REQUESTS = 8
"""Of each kind, at a time."""

SPECIAL = [
    "<pad>",
    "<eos>",
    "<user>",
    "<assistant>",
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "<call>",
    "</call>",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<user>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
RESPONSE_TEMPLATE = {
    "start_anchor": "<assistant>",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "content": {"open": "<answer>", "close": "</answer>"},
        "tool_calls": {
            "open_pattern": r"<call>(?P<name>\w+)\n",
            "close": "</call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
"""How vLLM's parser of Beam is told a checkpoint's format, from the tokenizer's configuration."""


def choice(name: str, *values: str) -> dict[str, Any]:
    """JSON schema of an object with one key."""
    properties = {name: {"type": "string", "enum": list(values)}}
    return {"type": "object", "properties": properties, "required": [name], "additionalProperties": False}


KINDS: dict[str, dict[str, Any]] = {
    "free": {},
    "by a schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "c", "schema": choice("colour", "red", "blue")},
        }
    },
    "tool call": {
        "tools": [{"type": "function", "function": {"name": "move", "parameters": choice("way", "left", "right")}}],
        "tool_choice": "required",
    },
}
"""What is added to a request, by kind."""


def run(report: Tell) -> None:
    checks = Checks()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(folder)
        ports = dict(zip(PROFILES, free_ports(len(PROFILES)), strict=True))
        commands = {name: command(folder, name, ports[name]) for name in PROFILES}
        with started(folder, commands, ports, {}) as servers:
            for name, server in servers.items():
                with checks.attempt(name):
                    report(f"{name}: seconds to start", server.wait())
                    reported(name, server, report, checks)
                    for kind in KINDS:
                        answered(name, server, kind, report, checks)
    checks.done()


def write(folder: Path) -> None:
    """A small Beam with a tokenizer of characters, and a drafter for it."""
    config = small()
    config.vocab_size, config.initializer_range = 128, 0.02  # every token is likely, also those that end something
    save_hf(folder / "model", config, initial_tensors(config, 1, torch.bfloat16))
    write_tokenizer(folder / "model")
    drafter.write_random(folder / "drafter", config, DrafterShape(), config.vocab_size - 1, seed=2)


def write_tokenizer(folder: Path) -> None:
    """A token for each printable character, and the special ones that the templates need."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    texts = [*SPECIAL, *map(chr, range(32, 127)), "\n"]
    tokenizer = Tokenizer(models.BPE(vocab={text: place for place, text in enumerate(texts)}, merges=[]))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"response_template": RESPONSE_TEMPLATE}))


def command(folder: Path, profile: str, port: int) -> list[str]:
    """Of a server that leaves room for the other one."""
    engine = {"max_model_len": 1024, "gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 2**31}
    options = {"profile": profile, "drafter": folder / "drafter", "port": port, "name": "beam", "store": folder}
    return [
        *(sys.executable, "-m", "beam_rl", "serve", str(folder / "model")),
        *(part for name, value in options.items() for part in (f"--{name}", str(value))),
        *(part for name, value in engine.items() for part in ("--engine", f"{name}={value}")),
    ]


def reported(name: str, server: Server, report: Tell, checks: Checks) -> None:
    """The start-up report of fast paths."""
    lines = [line.removeprefix("beam-rl serve: ") for line in server.log.read_text().splitlines()]
    paths = [line for line in lines if line.startswith(("on  ", "off "))]
    for line in paths:
        report(f"{name}: {line[4:38].strip()}", f"{line[:3]} {line[39:]}".strip())
    for wanted in PROFILES[name]:
        checks.expect(any(line.startswith(f"on  {wanted}") for line in paths), f"{name}: {wanted} is not on")


def answered(name: str, server: Server, kind: str, report: Tell, checks: Checks) -> None:
    """Requests of a kind: each must end by itself, with reasoning, and with what was asked for."""

    def ask(seed: int) -> dict[str, Any]:
        body = {"model": "beam", "messages": [{"role": "user", "content": "?"}], "max_tokens": 950, "seed": seed}
        return server.post("/v1/chat/completions", body | KINDS[kind])["choices"][0]

    with ThreadPoolExecutor(REQUESTS) as pool:
        choices = list(pool.map(ask, range(REQUESTS)))
    wrong = [choice for choice in choices if not valid(choice, kind)]
    report(f"{name}: valid answers, {kind}", f"{len(choices) - len(wrong)} of {len(choices)}")
    checks.expect(not wrong, f"{name}, {kind}: {wrong[:1]}")


def valid(answer: dict[str, Any], kind: str) -> bool:
    """Whether one choice of a chat completion is of its kind."""
    message = answer["message"]
    if not (message.get("reasoning") or message.get("reasoning_content")):
        return False
    try:
        if kind == "tool call":
            calls = [call["function"] for call in message["tool_calls"]]
            named = all(call["name"] == "move" for call in calls)
            return bool(calls) and named and all(json.loads(c["arguments"])["way"] in ("left", "right") for c in calls)
        if kind == "by a schema":
            return json.loads(message["content"])["colour"] in ("red", "blue")
        return answer["finish_reason"] == "stop"  # it may have said nothing after its reasoning
    except (KeyError, TypeError, ValueError):
        return False
