"""RL post-training of Reflection's Beam: SkyRL drives, vLLM generates, Megatron-Core trains."""

from pkgutil import extend_path

# In a checkout the folder `beam_rl` shadows the installed package when the working directory is on sys.path;
# the subpackages (`model`, `trainer`, `rollout`, `evals`) are then still found in the installed one.
__path__ = extend_path(__path__, __name__)

__version__ = "0.1.0"
