"""Bindings for libraries that run models: one module for each, which imports its library.

`lightcache.connectors.transformers` is the one for Hugging Face transformers;
`lightcache.connectors.vllm` and `lightcache.connectors.sglang` are those that vLLM and SGLang load;
`lightcache.connectors.lightllm` starts LightLLM.
"""
