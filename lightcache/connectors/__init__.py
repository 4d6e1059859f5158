"""Bindings for libraries that run models: one module for each, which imports its library.

`lightcache.connectors.transformers` is the one for Hugging Face transformers,
`lightcache.connectors.vllm` the one that vLLM loads, and `lightcache.connectors.lightllm` starts
LightLLM.
"""
