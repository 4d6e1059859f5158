"""Bindings for libraries that run models.

`lightcache.connectors.transformers` is the one for Hugging Face transformers; the packages
`lightcache.connectors.vllm` and `lightcache.connectors.sglang` are those that vLLM and SGLang load;
`lightcache.connectors.lightllm` starts LightLLM. The other modules are shared by several of them.
"""
