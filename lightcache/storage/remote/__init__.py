"""Storages beyond one machine: what they have in common, and Redis, S3 and Mooncake."""
