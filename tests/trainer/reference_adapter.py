"""Run by `test_lora_reference.py` where transformers knows Beam: PEFT loads adapters, and scores tokens with them.

Arguments: model folder, safetensors file with input_ids [B, S], folder of adapter folders, file to write.
"""

import sys
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


@torch.no_grad()
def logprobs(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """float32 [B, S - 1]."""
    logits = model(tokens, use_cache=False).logits.float()
    return logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


def adapted(model: str, adapter: Path) -> PeftModel:
    """The model with an adapter, all of whose matrices PEFT must have found."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    result = PeftModel.from_pretrained(base, adapter)
    held = {name: parameter for name, parameter in result.named_parameters() if ".lora_" in name}
    given = load_file(adapter / "adapter_model.safetensors")
    if len(held) != len(given):
        raise SystemExit(f"{adapter.name}: PEFT made {len(held)} matrices of {len(given)}: {sorted(held)[:20]}")
    if empty := [name for name, parameter in held.items() if not parameter.any()]:
        raise SystemExit(f"{adapter.name}: PEFT left {len(empty)} matrices at zero: {empty[:20]}")
    return result


def main(model: str, tokens: str, adapters: str, out: str) -> None:
    input_ids = load_file(tokens)["input_ids"]
    save_file({path.name: logprobs(adapted(model, path), input_ids) for path in sorted(Path(adapters).iterdir())}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
