"""Values that a recipe has where it says nothing, in SkyRL's keys; SkyRL's own defaults lie beneath them."""

from typing import Any

DAPO: dict[str, Any] = {
    "trainer": {
        "algorithm": {
            "advantage_estimator": "grpo",
            "use_kl_loss": False,
            "policy_loss_type": "dual_clip",
            "eps_clip_low": 0.2,
            "eps_clip_high": 0.28,
            "clip_ratio_c": 10.0,
            "loss_reduction": "token_mean",
            "dynamic_sampling": {"type": "filter", "max_sample_batches": 10},
        },
        "policy": {
            "optimizer_config": {
                "lr": 1.0e-6,
                "num_warmup_steps": 10,
                "weight_decay": 0.1,
                "max_grad_norm": 1.0,
            },
        },
        "train_batch_size": 512,
        "policy_mini_batch_size": 32,
        "max_tokens_per_microbatch": 32768,
        "max_prompt_length": 2048,
        "max_training_steps": 50,
        "eval_interval": 10,
        "ckpt_interval": 10,
        "max_ckpts_to_keep": 2,
        "placement": {"colocate_all": False},
        "seed": 1,
        "logger": "console",
        "project_name": "beam-rl",
    },
    "generator": {
        "n_samples_per_prompt": 16,
        "eval_n_samples_per_prompt": 8,
        "sampling_params": {"temperature": 1.0, "top_p": 1.0, "max_generate_length": 20480, "logprobs": 0},
        "eval_sampling_params": {"temperature": 1.0, "top_p": 0.7, "logprobs": None},
    },
    "environment": {"env_class": "beam_math"},
}
"""The published DAPO recipe for a 32B model, in SkyRL's keys."""

CPU: dict[str, Any] = {
    "generator": {
        "inference_engine": {
            "enforce_eager": True,
            "max_num_seqs": 256,
            "engine_init_kwargs": {"kv_cache_memory_bytes": 2**28},
        }
    },
}
"""Defaults of `beam.device: cpu`: compiling takes longer than a small run, and routes are captured in eager mode."""
