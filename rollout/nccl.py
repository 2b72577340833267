"""Whether vLLM can use NCCL here: where it cannot, its broadcasts of weights return at once, and transfer nothing."""


def check() -> None:
    """Refuse to send or receive weights over NCCL where vLLM's communicator would be disabled.

    vLLM 0.33's `PyNcclCommunicator` disables itself, without a word, if its NCCL library lacks a function that it knows
    (of NCCL 2.29.7, say). An engine then runs on whatever its receive buffers held.
    The trainer's process checks, and so do engines with this project's receiver; with SkyRL's, an engine whose
    environment differs from the trainer's is not checked.

    Raises:
        RuntimeError: it would be; why, and what to do.
    """
    from vllm import envs
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    remedy = (
        "install NCCL 2.29.7 or later (VLLM_NCCL_SO_PATH names another library than PyTorch's), or let trainer and "
        "rollout share GPUs (trainer.placement.colocate_all=true)"
    )
    if envs.VLLM_DISABLE_PYNCCL:
        raise RuntimeError("VLLM_DISABLE_PYNCCL is set: no weights would arrive over NCCL. Unset it.")
    try:
        NCCLLibrary()
    except Exception as error:
        raise RuntimeError(f"vLLM cannot use NCCL here ({error}), so no weights would arrive: {remedy}.") from error
