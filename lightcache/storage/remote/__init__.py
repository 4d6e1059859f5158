"""Storages beyond one machine: their base class, and Redis, S3 and Mooncake."""
