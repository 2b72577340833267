"""Beam in vLLM: plugin, routed-expert capture, weight transfer, engine profiles."""
