"""A light stand-in for SkyRL's registry actors.

SkyRL keeps one named actor for custom losses and one for custom advantages, and creates them on the first look-up.
Each is a process that imports torch and SkyRL (about 8 CPU seconds) to hold a dictionary of bytes. An actor of the
same name that exists already is used instead: this one imports Ray alone.
"""

from collections.abc import Iterable

import ray


@ray.remote(num_cpus=0)
class Registry:
    """The interface of SkyRL's `RegistryActor`: serialized functions by name."""

    def __init__(self) -> None:
        self.functions: dict[str, bytes] = {}

    def register(self, name: str, function: bytes) -> None:
        self.functions[name] = function

    def get(self, name: str) -> bytes | None:
        return self.functions.get(name)

    def list_available(self) -> list[str]:
        return list(self.functions)

    def unregister(self, name: str) -> None:
        del self.functions[name]


def start(names: Iterable[str]) -> list[ray.actor.ActorHandle]:
    """Create the named actors; they live as long as the returned handles."""
    return [Registry.options(name=name).remote() for name in names]  # type: ignore[attr-defined]
