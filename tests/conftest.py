"""Eight CPU devices for the sharded paths, and the hidden costs of JAX turned into errors."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
