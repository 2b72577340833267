"""SkyRL's inference client, for one engine without a router in front of it."""

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient


class DirectClient(RemoteInferenceClient):
    """Talks to the engine itself, which has no sessions: only the router pins those to replicas."""

    async def finish_session(self, session_id: str) -> None:
        """Nothing to release."""
