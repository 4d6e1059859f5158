"""Page geometry, Triton kernels, the copy engine and their host path will live here."""
