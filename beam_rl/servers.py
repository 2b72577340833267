"""The rollout's inference servers: SkyRL's server actor, router and client, started without waiting.

On a CPU there is one engine, and start-up time is imports. So the actor builds vLLM's arguments itself (the driver
never imports vLLM), the engine runs its model in its own process, and the client talks to it without a router.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from beam_rl.recipe import Recipe

if TYPE_CHECKING:
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient


@ray.remote(num_cpus=1, num_gpus=1)
class SingleEngineServer:
    """SkyRL's `VLLMServerActor` for one engine in one process, with arguments built where they are used."""

    def __init__(self, recipe: Recipe, port: int) -> None:
        from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args
        from skyrl.backends.skyrl_train.inference_servers.vllm_server_actor import VLLMServerActor

        arguments = build_vllm_cli_args(recipe.skyrl())
        arguments.disable_uvicorn_access_log = True  # a line a request: a training step has hundreds
        arguments.middleware = ["beam_rl.batched_route.BatchedRoute"]
        self.server = VLLMServerActor(
            arguments, port, distributed_executor_backend="mp", enable_ray_prometheus_stats=False
        )

    async def start(self) -> Any:
        """Serve; returns SkyRL's ServerInfo once the engine answers."""
        return await self.server.start()


@dataclass
class Servers:
    """Inference servers that are starting or running."""

    recipe: Recipe
    actor: Any = None
    info: Any = None
    """The single engine's actor, and the reference to its ServerInfo."""
    setup: Any = field(default=None, repr=False)
    """SkyRL's InferenceServerSetup, where SkyRL starts several engines and a router."""

    def client(self, tokenizer: Any) -> "RemoteInferenceClient":
        """Wait for the servers; returns SkyRL's client of them."""
        from beam_rl.client import BatchingClient, CompletingClient, DirectClient

        if self.actor is None:
            from skyrl.backends.skyrl_train.inference_servers.setup import build_new_inference_client

            client, self.setup = build_new_inference_client(self.recipe.skyrl(), tokenizer)
            client._generate_client = CompletingClient(client.proxy_url, route_shape=self.recipe.route_shape)
            return client
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


def start(recipe: Recipe, port: int = 8000) -> Servers:
    """Begin to start the servers; several engines, on GPUs, start in `Servers.client`."""
    if recipe.beam.device != "cpu":
        return Servers(recipe)
    actor = SingleEngineServer.remote(recipe, port)  # type: ignore[attr-defined]
    return Servers(recipe, actor, actor.start.remote())
