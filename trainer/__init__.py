"""The Megatron engine, and the SkyRL workers over it."""
