"""What Beam is: configuration, arithmetic, Megatron-Core modules, checkpoint names."""
