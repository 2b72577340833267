"""The plugin can be loaded any number of times, and steps back where vLLM has a Beam of its own."""

from types import SimpleNamespace
from typing import Any

import pytest

from beam_rl.rollout import plugin
from beam_rl.rollout.transfer import BACKEND, ShmTrainer, ShmTrainerInit


def test_plugin_loads_twice() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.models import ModelRegistry

    plugin.register()
    registered = ModelRegistry.models[plugin.ARCHITECTURE]
    plugin.register()
    assert ModelRegistry.models[plugin.ARCHITECTURE] is registered
    assert BACKEND in WeightTransferEngineFactory._registry


@pytest.mark.parametrize(("cuda", "used"), [(True, "vllm.models.beam"), (False, "beam_rl.rollout.portable")])
def test_vllms_own_beam_is_used_where_it_runs(cuda: bool, used: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms import current_platform

    monkeypatch.setitem(ModelRegistry.models, plugin.ARCHITECTURE, SimpleNamespace(module_name="vllm.models.beam"))
    monkeypatch.setattr(current_platform, "is_cuda", lambda: cuda, raising=False)
    plugin.register()
    registered: Any = ModelRegistry.models[plugin.ARCHITECTURE]
    assert registered.module_name == used


def test_vllms_factory_builds_the_trainers_half() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    plugin.register()
    engine = WeightTransferTrainerFactory.trainer_init(ShmTrainerInit(rank=1), client=None, source=None)  # type: ignore[arg-type]
    assert isinstance(engine, ShmTrainer)


def test_skyrl_finds_every_attribute_it_asks_of_a_trainers_half() -> None:
    from skyrl.backends.skyrl_train.weight_sync.weight_senders import SkyrlTrainerCapabilities

    asked = [name for name in vars(SkyrlTrainerCapabilities) if name.startswith("skyrl_")]
    assert len(asked) >= 4
    assert [name for name in asked if not hasattr(ShmTrainer, name)] == []
