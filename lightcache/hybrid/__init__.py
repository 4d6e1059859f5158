"""Hybrid models: checkpoints of recurrent state beside the KV of attention layers."""
