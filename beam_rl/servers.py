"""The rollout's inference servers: SkyRL's server actor, router and client, started without waiting.

Where there is one engine, its server is started here: start-up time is imports, so the actor builds vLLM's arguments
itself (the driver never imports vLLM), and the client talks to it without a router. Several are SkyRL's to start.
"""

import asyncio
import os
import sys
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from filelock import FileLock, Timeout
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from beam_rl.recipe import Recipe

if TYPE_CHECKING:
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
    from skyrl.train.utils.utils import ResolvedPlacementGroup

FIRST_PORT, LAST_PORT, SERVER_PORTS = 8000, 32000, 100
"""Ports of inference servers, and how many SkyRL gives to one; above begin those that the system hands out."""
HOST_FOLDER = Path("/tmp")
"""Where all runs of this host meet; TMPDIR is a run's own."""
MOVED = {"vllm.entrypoints.launchers.cli_args": "vllm.entrypoints.common.cli_args"}
"""Modules that SkyRL 0.4.0 imports, and where vLLM 0.33 has them."""


def find_moved_modules() -> None:
    """Let SkyRL import what vLLM has moved; called where SkyRL builds vLLM's arguments."""
    for old, new in MOVED.items():
        if find_spec(old) is None:
            sys.modules[old] = import_module(new)


def port_windows(servers: int, folder: Path = HOST_FOLDER) -> tuple[int, list[FileLock]]:
    """The first port of so many ranges in a row that no other run on this host has, and the locks that hold them.

    They are held while the process lives. SkyRL's server finds a port that is free, but does not listen on it until its
    engine has started. A second run on the host that starts meanwhile would take the same port, and both would talk to
    whichever server came first.
    """
    held: list[FileLock] = []
    for port in range(FIRST_PORT, LAST_PORT, SERVER_PORTS):
        lock = FileLock(folder / f"beam-rl-ports-{port}.lock")
        try:
            lock.acquire(timeout=0)
        except (Timeout, OSError):  # OSError: another user's
            for other in held:
                other.release()
            held = []
            continue
        held.append(lock)
        if len(held) == servers:
            return port - (servers - 1) * SERVER_PORTS, held
    raise RuntimeError(
        f"no {servers} x {SERVER_PORTS} ports in a row are left between {FIRST_PORT} and {LAST_PORT}: "
        "other runs on this host hold them"
    )


@ray.remote(num_cpus=1)
class SingleEngineServer:
    """SkyRL's `VLLMServerActor` for one engine in one process, with arguments built where they are used."""

    def __init__(self, recipe: Recipe, gpus: str | None) -> None:
        """`gpus` are the devices of the engine (as of CUDA_VISIBLE_DEVICES); None: those that Ray gave this actor."""
        from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args
        from skyrl.backends.skyrl_train.inference_servers.vllm_server_actor import VLLMServerActor

        find_moved_modules()
        arguments = build_vllm_cli_args(recipe.skyrl())
        arguments.disable_uvicorn_access_log = True  # a line a request: a training step has hundreds
        arguments.middleware = ["beam_rl.batched_route.BatchedRoute"]
        if recipe.beam.device == "gpu":
            gpus = gpus or ",".join(map(str, ray.get_gpu_ids()))
        port, self.windows = port_windows(1)
        self.server = VLLMServerActor(
            arguments,
            port,
            distributed_executor_backend="mp",
            mp_cuda_visible_devices=gpus,
            enable_ray_prometheus_stats=False,
        )

    async def start(self) -> Any:
        """Serve; returns SkyRL's ServerInfo once the engine answers."""
        return await self.server.start()


@dataclass
class Servers:
    """Inference servers that are starting or running."""

    recipe: Recipe
    placement: "ResolvedPlacementGroup | None" = None
    """The GPUs that trainer and rollout share, where they do."""
    actor: Any = None
    info: Any = None
    """The single engine's actor, and the reference to its ServerInfo."""
    setup: Any = field(default=None, repr=False)
    """SkyRL's InferenceServerSetup, where SkyRL starts several engines and a router."""
    windows: list[FileLock] = field(default_factory=list, repr=False)
    """The ports of those engines."""

    def client(self, tokenizer: Any) -> "RemoteInferenceClient":
        """Wait for the servers; returns SkyRL's client of them. Where they share the trainer's GPUs, they sleep now."""
        client = self._several(tokenizer) if self.actor is None else self._single(tokenizer)
        if self.placement is not None:
            asyncio.run(sleep(client))
        return client

    def _several(self, tokenizer: Any) -> "RemoteInferenceClient":
        engine = self.recipe.generator.inference_engine
        port, self.windows = port_windows(engine.num_engines * engine.data_parallel_size)
        os.environ.setdefault("SKYRL_VLLM_START_PORT", str(port))  # read by the import that follows

        from skyrl.backends.skyrl_train.inference_servers.setup import build_new_inference_client

        from beam_rl.client import CompletingClient

        find_moved_modules()
        client, self.setup = build_new_inference_client(self.recipe.skyrl(), tokenizer, self.placement)
        client._generate_client = CompletingClient(client.proxy_url, route_shape=self.recipe.route_shape)
        return client

    def _single(self, tokenizer: Any) -> "RemoteInferenceClient":
        from beam_rl.client import BatchingClient, DirectClient

        url = ray.get(self.info).url
        engine = self.recipe.generator.inference_engine
        return DirectClient(
            proxy_url=url,
            server_urls=[url],
            model_name=engine.served_model_name or self.recipe.trainer.policy.model.path,
            enable_return_routed_experts=engine.enable_return_routed_experts,
            data_parallel_size=1,
            tokenizer=tokenizer,
            _generate_client=BatchingClient(proxy_url=url, route_shape=self.recipe.route_shape),
        )

    def shutdown(self) -> None:
        """Stop the router, if there is one; actors end with Ray."""
        if self.setup is not None and self.setup.router is not None:
            self.setup.router.shutdown()


async def sleep(client: "RemoteInferenceClient") -> None:
    """Let the engines give their GPUs' memory up, and close connections, which belong to this event loop."""
    await client.sleep()
    await client.aclose()


def start(recipe: Recipe) -> Servers:
    """Begin to start the servers; several engines start in `Servers.client`. Waits for GPUs that are to be shared."""
    placement = shared_gpus(recipe)
    engine = recipe.generator.inference_engine
    if engine.num_engines * engine.data_parallel_size > 1 or engine.enable_pd:
        return Servers(recipe, placement)
    gpus = engine.tensor_parallel_size * engine.pipeline_parallel_size
    if placement is None:
        actor = SingleEngineServer.options(num_gpus=gpus).remote(recipe, None)  # type: ignore[attr-defined]
    else:
        strategy = PlacementGroupSchedulingStrategy(placement.pg, placement.reordered_bundle_indices[0])
        options = {"num_cpus": 0.2, "num_gpus": 0, "scheduling_strategy": strategy}
        visible = ",".join(map(str, placement.bundle_gpu_ids[:gpus]))
        actor = SingleEngineServer.options(**options).remote(recipe, visible)  # type: ignore[attr-defined]
    return Servers(recipe, placement, actor, actor.start.remote())


def shared_gpus(recipe: Recipe) -> "ResolvedPlacementGroup | None":
    """A bundle for each GPU that trainer and rollout share; None where each has its own."""
    if not recipe.trainer.placement.colocate_all:
        return None
    from skyrl.env_vars import SKYRL_RAY_PG_TIMEOUT_IN_S
    from skyrl.train.utils.utils import ResolvedPlacementGroup, get_ray_pg_ready_with_timeout

    group = ray.util.placement_group([{"GPU": 1, "CPU": 1}] * recipe.world_size, strategy="PACK")
    get_ray_pg_ready_with_timeout(group, timeout=SKYRL_RAY_PG_TIMEOUT_IN_S)
    return ResolvedPlacementGroup(group)
