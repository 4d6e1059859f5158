"""Bindings for libraries that run models: each a module of its own, which imports its library.

`lightcache.connectors.transformers` is the one for Hugging Face transformers.
"""
