"""The options of a server that do not concern its engine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from omniserve.server.access.keys import KeyRing
from omniserve.server.access.limits import Limits
from omniserve.server.batches.files import BatchSettings
from omniserve.server.engines.sources import RemoteEngines
from omniserve.server.telemetry.traces import checked_endpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """Options of a server that do not concern its engine."""

    tokenizer: str
    """Folder or hub id of the tokenizer."""
    trust_remote_code: bool = False
    """Run code that comes with it."""
    model_names: tuple[str, ...]
    """The names that the model is served under; answers have the first unless a request gives another."""
    chat_template: str | None = None
    """Write chats with this template: the name of one of the model's, or a Jinja file (default: the model's own)."""
    tool_call_parser: str = "auto"
    """How the model writes calls of tools: a name as vLLM has it, such as hermes or qwen3_coder; auto: as its chat
    template says; none: no tools."""
    reasoning_parser: str = "auto"
    """How the model marks its reasoning: a name as vLLM has it, such as deepseek_r1 or openai_gptoss; auto: as its chat
    template says; none: reasoning stays in the text."""
    generation_config: str = "auto"
    """The source of temperature, top_p, top_k, min_p, repetition_penalty and length for requests that do not give them:
    auto (the model's generation_config.json), none (OpenAI's defaults), or the path of another such file."""
    embedding_model: str | None = None
    """Folder or hub id of a second model, which reads texts on the CPU for /v1/embeddings, /v1/score and /v1/rerank: an
    encoder such as BERT, or a cross-encoder (default: the served model reads them)."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    replicas: int = 1
    """Engines that serve the model on this machine, each with its part of the cores or GPUs and with its own memory:
    --device-kv-gib and --host-kv-gib are those of one. 0: those of --engines alone."""
    ray_address: str | None = None
    """Have Ray place the --replicas on the nodes of its cluster at this address (auto: the one that this machine is a
    node of), and start them again (default: they are on this machine)."""
    num_ranks: int = 1
    """Processes of an engine, each of which needs a GPU where there are any."""
    engines: RemoteEngines | None = None
    """Engines on other machines; None: only those of this one are used."""
    router: Literal["predicted", "least-loaded", "fewest-requests", "round-robin", "prefix"] = "predicted"
    """How requests are divided among the replicas."""
    api_processes: int = 1
    """Processes that answer requests, on one port: where one core for HTTP and text is the limit, not the engines."""
    keys: KeyRing | None = None
    """Keys of those that may call; None: calls need no key."""
    root_path: str = ""
    """The path under which a proxy shows this server, such as /llm for /llm/v1/models; it may cut it off or not."""
    ssl_certfile: str | None = None
    """Serve HTTPS, with the certificate, and those that vouch for it, of this PEM file."""
    ssl_keyfile: str | None = None
    """The private key of the certificate, a PEM file without a password (default: in the certificate's)."""
    guard_all: bool = False
    """Ask for a key for /health and /metrics, too."""
    limits: Limits = field(default_factory=Limits)
    """Upper bounds."""
    loras: Mapping[str, str] = field(default_factory=dict)
    """Folders of the LoRA adapters that are there from the start, by name."""
    lora_dirs: tuple[Path, ...] = ()
    """Folders from which calls may load others."""
    cors_origins: tuple[str, ...] = ()
    """Origins of pages that may call from a browser."""
    unknown_fields: Literal["drop", "refuse"] = "drop"
    """Fields of requests that neither OpenAI's nor vLLM's API has: drop them, with a warning for each name and a header
    in the answer; or refuse the request."""
    drop_billing_header: bool = False
    """Leave out the block x-anthropic-billing-header at the begin of a system prompt (/v1/messages): Claude Code writes
    a hash into it, so that no two conversations, or calls, begin alike and share what the prefix cache has."""
    otlp_endpoint: str | None = None
    """Send an OpenTelemetry trace of each request to this collector, such as http://127.0.0.1:4318 (default:
    OTEL_EXPORTER_OTLP_ENDPOINT, if set)."""
    batches: BatchSettings = field(default_factory=BatchSettings)
    """The places where batches are kept."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level of what is logged."""
    log_format: Literal["text", "json"] = "text"
    """json: an object a line, and a line for each request."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port must be in 0..65535, got {self.port}")
        has_others = self.engines is not None and self.engines.addresses
        if self.replicas < (0 if has_others else 1):
            raise ValueError(f"--replicas must be at least 1, or 0 beside --engines that has some, got {self.replicas}")
        if self.api_processes < 1:
            raise ValueError(f"--api-processes must be at least 1, got {self.api_processes}")
        if self.guard_all and self.keys is None:
            raise ValueError("--guard-all needs keys; give --api-key or --api-key-file")
        if self.root_path and not re.fullmatch(r"(/[^/?#\s]+)+", self.root_path):
            raise ValueError(f"--root-path must be a path such as /llm, got {self.root_path!r}")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("--ssl-keyfile needs --ssl-certfile, the certificate of the key")
        if self.otlp_endpoint is not None:
            checked_endpoint(self.otlp_endpoint)
